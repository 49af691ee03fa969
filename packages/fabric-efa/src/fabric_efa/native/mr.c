/* Registrations. A descriptor carries a token that we choose (random, so that it cannot be guessed and is never used twice);
 * what the provider calls the memory is told to peers that ask for it (lease.c), over an authenticated link. */
#include "efa_int.h"

#include <poll.h>
#include <sched.h>

#define INDEX_BITS 20u
#define KEY_TRIES 16

static uint32_t index_of(uint64_t token) { return (uint32_t)token & ((1u << INDEX_BITS) - 1); }

static uint64_t key_wanted(const fe_dom *d) {
    if (d->prov_key) return 0;
    size_t size = d->info->domain_attr->mr_key_size;
    uint64_t k = fe_random();
    return size >= 8 || !size ? k : k & ((1ull << (8 * size)) - 1);
}

static int enable(fe_dom *d, struct fid_mr *mr) {
    if (!d->mr_endpoint) return 0;
    int rc = fi_mr_bind(mr, &d->ep->fid, 0);
    return rc ? rc : fi_mr_enable(mr);
}

static int reg(fe_dom *d, const fab_mr *m, uint64_t access, struct fid_mr **out) {
    struct iovec iov = {(void *)(uintptr_t)m->addr, m->len ? m->len : 1};
    union { /* newer libraries have fields after those that the oldest headers know */
        struct fi_mr_attr attr;
        uint64_t room[32];
    } u = {.room = {0}};
    u.attr.mr_iov = &iov;
    u.attr.iov_count = 1;
    u.attr.access = access;
    if (m->device_kind) {
        u.attr.iface = FI_HMEM_CUDA;
        u.attr.device.cuda = m->device_id;
    }
    int rc = -FI_ENOKEY;
    for (int i = 0; rc == -FI_ENOKEY && i < KEY_TRIES; i++) {
        u.attr.requested_key = key_wanted(d);
        rc = fi_mr_regattr(d->domain, &u.attr, 0, out);
    }
    if (!rc && (rc = enable(d, *out))) fi_close(&(*out)->fid);
    return rc;
}

/* Memory of our own, for datagrams and requests without any. */
int fe_mr_raw(fe_dom *d, void *at, uint64_t len, uint64_t access, struct fid_mr **out) {
    fab_mr m = {.addr = (uint64_t)(uintptr_t)at, .len = len, .fd = -1};
    return reg(d, &m, access, out);
}

static int slot(fe_dom *d, uint32_t *index) {
    if (d->free_mr == d->nmrs) {
        uint32_t more = d->nmrs ? d->nmrs * 2 : 64;
        if (more > 1u << INDEX_BITS) return -ENOSPC;
        fe_mr *m = realloc(d->mrs, more * sizeof *m);
        if (!m) return -ENOMEM;
        memset(m + d->nmrs, 0, (more - d->nmrs) * sizeof *m);
        for (uint32_t i = d->nmrs; i < more; i++) m[i].next_free = i + 1;
        d->mrs = m;
        d->nmrs = more;
    }
    *index = d->free_mr;
    d->free_mr = d->mrs[*index].next_free;
    return 0;
}

static void lock(fe_dom *d) {
    atomic_fetch_add(&d->want, 1);
    pthread_mutex_lock(&d->mu);
    atomic_fetch_sub(&d->want, 1);
}

int fe_mr_reg(void *ctx, const fab_mr *mr, fab_mr_keys *out) {
    fe_dom *d = ctx;
    if (mr->device_kind && !d->hmem) return -EOPNOTSUPP;
    uint64_t access = FI_WRITE | (mr->access & FAB_ACCESS_REMOTE_WRITE ? FI_REMOTE_WRITE : 0);
    struct fid_mr *fid = NULL;
    int rc = 0;
    uint32_t i;
    if (d->mr_unlocked) rc = reg(d, mr, access, &fid); /* EFA pins memory, which can take long */
    lock(d);
    if (d->closed) rc = -ENETDOWN;
    if (!rc && !fid) rc = reg(d, mr, access, &fid);
    if (!rc) rc = slot(d, &i);
    if (!rc) {
        fe_mr *m = &d->mrs[i];
        uint32_t *holders = m->holders, cap = m->cap;
        *m = (fe_mr){.fid = fid,
                     .desc = fi_mr_desc(fid),
                     .token = (fe_random() & ~(uint64_t)((1u << INDEX_BITS) - 1)) | i,
                     .va = mr->addr,
                     .len = mr->len,
                     .key = fi_mr_key(fid),
                     .base = d->virt_addr ? mr->addr : 0,
                     .access = mr->access,
                     .gen = m->gen + 1,
                     .holders = holders,
                     .cap = cap};
        if (!m->token) m->token = 1ull << INDEX_BITS;
        *out = (fab_mr_keys){(uint64_t)m->gen << 32 | (i + 1), m->token, mr->addr};
    }
    pthread_mutex_unlock(&d->mu);
    if (rc && fid) fi_close(&fid->fid);
    return rc < 0 ? (rc > -256 ? rc : fe_errno(rc)) : rc;
}

void *fe_mr_desc_of(fe_dom *d, uint64_t local_key) {
    uint32_t i = (uint32_t)local_key - 1;
    return i < d->nmrs && d->mrs[i].gen == local_key >> 32 && d->mrs[i].fid ? d->mrs[i].desc : NULL;
}

/* ---- leases, at the owner ---------------------------------------------------------------------------- */

static fe_mr *by_token(fe_dom *d, uint64_t token) {
    uint32_t i = index_of(token);
    return token && i < d->nmrs && d->mrs[i].token == token ? &d->mrs[i] : NULL;
}

static void tell(fe_dom *d, uint32_t number, uint8_t type, uint64_t token, int32_t status, const fe_grant *g) {
    fe_in *in = d->ins[number];
    fe_hdr h = {
        .magic = FE_MAGIC, .type = type, .session = in->theirs, .link = in->their_link, .a = token, .status = status};
    fe_tell(d, &in->dest->chan, &h, g, g ? sizeof *g : 0);
}

static int hold(fe_mr *m, uint32_t in) {
    for (uint32_t i = 0; i < m->nholders; i++)
        if (m->holders[i] == in) return 0;
    if (m->nholders == m->cap) {
        uint32_t more = m->cap ? m->cap * 2 : 4;
        uint32_t *p = realloc(m->holders, more * sizeof *p);
        if (!p) return -ENOMEM;
        m->holders = p;
        m->cap = more;
    }
    m->holders[m->nholders++] = in;
    return 0;
}

static void let_go(fe_mr *m, uint32_t in) {
    for (uint32_t i = 0; i < m->nholders; i++)
        if (m->holders[i] == in) {
            m->holders[i] = m->holders[--m->nholders];
            return;
        }
}

void fe_mr_asked(fe_dom *d, uint32_t in, const fe_hdr *h) {
    fe_mr *m = by_token(d, h->a);
    int32_t rc = !m || m->closing ? -EKEYREVOKED : !(m->access & FAB_ACCESS_REMOTE_WRITE) ? -EACCES : hold(m, in);
    if (rc) {
        fe_count(d, rc == -EACCES ? FE_R_RIGHTS : FE_R_REVOKED);
        tell(d, in, FE_T_LEASE, h->a, rc, NULL);
        return;
    }
    fe_grant g = {m->key, m->base, m->va, m->len};
    tell(d, in, FE_T_LEASE, h->a, 0, &g);
}

void fe_mr_ended(fe_dom *d, uint32_t in, uint64_t token) {
    fe_mr *m = by_token(d, token);
    if (m) let_go(m, in);
}

void fe_mr_forget_in(fe_dom *d, uint32_t in) {
    for (uint32_t i = 0; i < d->nmrs; i++)
        if (d->mrs[i].nholders) let_go(&d->mrs[i], in);
}

/* ---- revocation ---------------------------------------------------------------------------------------- */

static void wait_for_holders(fe_dom *d, uint32_t index) {
    uint64_t until = fe_clock() + d->connect_ns;
    fe_mr *m = &d->mrs[index];
    for (uint32_t i = 0; i < m->nholders; i++) tell(d, m->holders[i], FE_T_REVOKE, m->token, 0, NULL);
    while (d->mrs[index].nholders && fe_clock() < until) { /* mrs may move */
        fe_progress(d, fe_clock());
        if (!d->mrs[index].nholders) break;
        pthread_mutex_unlock(&d->mu);
        struct pollfd fd = {.fd = d->cq_fd, .events = POLLIN};
        if (d->cq_fd >= 0) poll(&fd, 1, 1);
        else sched_yield();
        lock(d);
    }
}

/* Returns when no peer writes there any more. Those that hold a lease say so; one that does not answer within the time of
 * a first contact is cut off, which is as far as a provider without revocation goes (docs/efa.md). */
int fe_mr_dereg(void *ctx, uint64_t local_key) {
    fe_dom *d = ctx;
    uint32_t i = (uint32_t)local_key - 1;
    lock(d);
    if (i >= d->nmrs || d->mrs[i].gen != local_key >> 32 || !d->mrs[i].fid || d->mrs[i].closing) {
        pthread_mutex_unlock(&d->mu);
        return -EKEYREVOKED;
    }
    d->mrs[i].closing = true;
    bool held = d->mrs[i].nholders != 0;
    if (held) wait_for_holders(d, i);
    fe_mr *m = &d->mrs[i];
    for (uint32_t k = 0; k < m->nholders; k++) d->capi->drop(d->contact, m->holders[k], d->now); /* no `gone` follows */
    while (m->nholders) fe_in_free(d, m->holders[0]);
    if (held) fe_progress(d, fe_clock()); /* what of a cut link is here already goes where it was meant to, not later */
    m = &d->mrs[i];
    struct fid_mr *fid = m->fid;
    m->fid = NULL;
    m->desc = NULL;
    m->token = 0;
    m->closing = false;
    if (!d->mr_unlocked) fi_close(&fid->fid);
    m->next_free = d->free_mr;
    d->free_mr = i;
    if (fab_wc_ready(&d->wcq)) fe_wake(d);
    pthread_mutex_unlock(&d->mu);
    if (d->mr_unlocked) fi_close(&fid->fid);
    return 0;
}

void fe_mr_free_all(fe_dom *d) {
    for (uint32_t i = 0; i < d->nmrs; i++) {
        if (d->mrs[i].fid) fi_close(&d->mrs[i].fid->fid);
        free(d->mrs[i].holders);
    }
    free(d->mrs);
    d->mrs = NULL;
    d->nmrs = 0;
}
