/* Registrations. From any thread at any time.
 *
 * A local key is (index + 1) << 32 | lkey; the hot path needs the low half only. A remote key is nonce << 32 | rkey: the nonce
 * makes every registration's key a new one, although NICs use rkeys again, so that a sender who was told that a key is
 * revoked may remember that for good. */
#include "verbs_int.h"

static struct ibv_mr *reg(fv_dom *d, const fab_mr *mr) {
    int access = mr->access & FAB_ACCESS_REMOTE_WRITE ? IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE : 0;
    bool relaxed = d->cfg.relaxed && fv_ibv.reg_mr_iova2;
    if (relaxed) access |= IBV_ACCESS_RELAXED_ORDERING;
    if (mr->device_kind) return fv_reg_gpu(d, mr, access);
    void *at = (void *)(uintptr_t)mr->addr;
    return relaxed ? fv_ibv.reg_mr_iova2(d->pd, at, mr->len, mr->addr, (unsigned)access)
                   : fv_ibv.reg_mr(d->pd, at, mr->len, access);
}

static int put(fv_mrs *t, fv_reg r, uint32_t *index) {
    for (uint32_t k = 0; t->nfree && k < t->n; k++) {
        uint32_t i = (t->free_hint + k) % t->n;
        if (t->at[i].mr) continue;
        t->at[i] = r;
        t->nfree--;
        t->free_hint = i + 1;
        *index = i;
        return 0;
    }
    if (t->n == t->cap) {
        uint32_t cap = t->cap ? t->cap * 2 : 64;
        if (cap > 1u << 24) return -ENOSPC;
        fv_reg *p = realloc(t->at, cap * sizeof *p);
        if (!p) return -ENOMEM;
        t->at = p;
        t->cap = cap;
    }
    t->at[t->n] = r;
    *index = t->n++;
    t->free_hint = 0;
    return 0;
}

int fv_mr_reg(void *ctx, const fab_mr *mr, fab_mr_keys *out) {
    fv_dom *d = ctx;
    if (!mr->len || mr->addr + mr->len < mr->addr) return -EINVAL;
    errno = 0;
    struct ibv_mr *m = reg(d, mr);
    if (!m) return errno ? -errno : -EIO;
    uint32_t index = 0;
    fv_reg r = {m, fv_random() << 32 | m->rkey};
    pthread_mutex_lock(&d->mrs.mu);
    int rc = put(&d->mrs, r, &index);
    pthread_mutex_unlock(&d->mrs.mu);
    if (rc) {
        fv_ibv.dereg_mr(m);
        return rc;
    }
    out->local_key = (uint64_t)(index + 1) << 32 | m->lkey | (mr->device_kind ? FV_KEY_DEVICE : 0);
    out->remote_key = r.remote_key;
    out->remote_base = mr->addr;
    return 0;
}

/* Once this returned the NIC refuses the key: the driver sees to it that nothing is under way. */
int fv_mr_dereg(void *ctx, uint64_t local_key) {
    fv_dom *d = ctx;
    uint32_t index = (uint32_t)((local_key & ~FV_KEY_DEVICE) >> 32) - 1;
    pthread_mutex_lock(&d->mrs.mu);
    struct ibv_mr *m = index < d->mrs.n ? d->mrs.at[index].mr : NULL;
    if (m) {
        d->mrs.at[index] = (fv_reg){0};
        d->mrs.nfree++;
    }
    pthread_mutex_unlock(&d->mrs.mu);
    if (!m) return -EBADF;
    int rc = fv_ibv.dereg_mr(m);
    return rc ? -rc : 0;
}

/* Whether a remote key of ours is good: a peer whose write was refused asks. */
bool fv_mr_known(fv_dom *d, uint64_t remote_key) {
    bool known = false;
    pthread_mutex_lock(&d->mrs.mu); /* held for moments only */
    for (uint32_t i = 0; i < d->mrs.n && !known; i++) known = d->mrs.at[i].mr && d->mrs.at[i].remote_key == remote_key;
    pthread_mutex_unlock(&d->mrs.mu);
    return known;
}

void fv_mrs_free(fv_dom *d) {
    for (uint32_t i = 0; i < d->mrs.n; i++)
        if (d->mrs.at[i].mr) fv_ibv.dereg_mr(d->mrs.at[i].mr);
    free(d->mrs.at);
    pthread_mutex_destroy(&d->mrs.mu);
}
