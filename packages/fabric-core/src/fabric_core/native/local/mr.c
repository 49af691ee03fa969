/* mr.c - registrations: a table in the shared header, which a sender reads as a NIC would read its own.
 *
 * Deregistration must not return while a peer still writes: the sender marks itself busy (odd) before it looks at the
 * generation, the owner changes the generation before it looks at the busy words. All four are seq_cst, so either the
 * sender sees that the key is gone, or the owner sees that the sender is busy and waits for the end of that slice.
 */
#include "local_int.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define FLIGHT_NS 30000000000ull /* longer than any copy that will still end */

static void quiesce(struct fab_local_node *n) {
    /* A slice takes some 50 us. A peer that was stopped within one is lost after two heartbeats, and can then write only what it has
     * mapped, which is its own until it unmaps it. One that was killed within one stays "busy", but its link is closed.
     * A GPU has no such bound: others' kernels may hold it up, while its process is well. */
    uint64_t t0 = fl_now(), until = t0 + 2 * n->heartbeat_ns;
    pthread_mutex_lock(&n->quiesce_mu);
    uint64_t dom_seq[FAB_MAX_NICS] = {0};
    for (int pass = 0;; pass++) {
        bool busy = false, flying = false;
        pthread_mutex_lock(&n->mu);
        for (fl_link *l = n->links; l; l = l->all) {
            if (!l->ch || (l->st == FL_ST_CLOSED && fl_now() > t0 + 20000000)) {
                l->quiesce_seq = 0;
                continue;
            }
            uint64_t s = atomic_load_explicit(&l->ch->busy, memory_order_seq_cst);
            if (!pass) {
                l->quiesce_seq = s & 1 ? s : 0;
                l->quiesce_fly = 0;
            }
            bool inside = l->quiesce_seq && l->quiesce_seq == s;
            /* Whoever saw the key has left, so what it gave to a GPU is counted. */
            if (!inside && !l->quiesce_fly && l->in) /* what we write ourselves lies in a peer's memory */
                l->quiesce_fly = atomic_load_explicit(&l->ch->fly_begun, memory_order_acquire);
            busy |= inside;
            flying |= atomic_load_explicit(&l->ch->fly_ended, memory_order_acquire) < l->quiesce_fly;
        }
        pthread_mutex_unlock(&n->mu);
        for (uint32_t i = 0; i < n->nics; i++) {
            uint64_t s = atomic_load_explicit(&n->dom[i].busy, memory_order_seq_cst);
            if (!pass) dom_seq[i] = s & 1 ? s : 0;
            busy |= dom_seq[i] && dom_seq[i] == s;
        }
        if ((!busy && !flying) || fl_now() > until + (flying ? FLIGHT_NS : 0)) break;
        if (pass < 16) sched_yield();
        else nanosleep(&(struct timespec){0, 20000}, NULL);
    }
    pthread_mutex_unlock(&n->quiesce_mu);
}

int fl_mr_reg(void *ctx, const fab_mr *mr, fab_mr_keys *out) {
    fl_dom *d = ctx;
    struct fab_local_node *n = d->node;
    if (mr->device_kind > 1) return -EOPNOTSUPP;
    if (mr->addr + mr->len < mr->addr) return -EINVAL;
    if (mr->device_kind == 1 && (n->gpu < 0 || mr->device_id != n->gpu)) return -ENXIO;
    int fd = -1;
    uint64_t off = mr->fd_offset;
    fc_ipc ipc = {{0}};
    struct fl_pin *pin = NULL;
    uint32_t flags = (mr->access & FAB_ACCESS_REMOTE_WRITE ? FL_MR_WRITE : 0) | d->nic << 8;
    if (mr->fd >= 0 && mr->len && (flags & FL_MR_WRITE)) {
        struct stat st;
        /* Peers map it: if it could shrink, their writes would end in SIGBUS. What cannot be sealed (a file in /dev/shm) goes by
         * the other paths, unless mapping is forced. */
        int seals = fcntl(mr->fd, F_GET_SEALS);
        bool sealed = seals >= 0 && ((seals & F_SEAL_SHRINK) || fcntl(mr->fd, F_ADD_SEALS, F_SEAL_SHRINK) == 0);
        if ((sealed || n->path_mode == FL_PATH_MAP) && fstat(mr->fd, &st) == 0 &&
            (uint64_t)st.st_size >= mr->fd_offset + mr->len && mr->fd_offset + mr->len >= mr->len)
            fd = fcntl(mr->fd, F_DUPFD_CLOEXEC, 0);   /* the caller may close its own */
        if (fd >= 0) flags |= FL_MR_MAPPABLE;
    }
    if (mr->device_kind == 1) {
        flags |= FL_MR_CUDA;
        if ((flags & FL_MR_WRITE) && mr->len && fl_gpu_export(n->gpu, mr->addr, mr->len, &ipc, &off))
            flags |= FL_MR_MAPPABLE;
    } else if (n->gpu >= 0 && mr->len && mr->addr) {
        fab_cuda_range what;
        bool known = !fab_cuda_what(mr->addr, &what) && what.pinned && !fab_cuda_what(mr->addr + mr->len - 1, &what) &&
                     what.pinned; /* somebody else's pin */
        pin = fl_pin(n->gpu, mr->addr, mr->len);
        /* Pins of ours that overlap it end when their registrations do: it must not lean on them. */
        if (!pin && fl_pins_meet(mr->addr, mr->len)) flags |= FL_MR_MIXED;
        else if (pin || known) flags |= FL_MR_PINNED;
    }
    pthread_mutex_lock(&n->mr_mu);
    uint32_t i = n->mr_free;
    if (i == UINT32_MAX || atomic_load(&d->closed)) {
        int err = i == UINT32_MAX ? -ENOSPC : -ENETDOWN;
        pthread_mutex_unlock(&n->mr_mu);
        if (fd >= 0) close(fd);
        fl_unpin(n->gpu, pin);
        return err;
    }
    n->mr_free = n->mr[i].next_free;
    n->mr[i].fd = fd;
    n->mr[i].fd_off = off;
    n->mr[i].pin = pin;
    n->mr[i].ipc = ipc;
    fl_mr_ent *e = &n->hdr->mr[i];
    atomic_store_explicit(&e->base, mr->addr, memory_order_relaxed);   /* all of them published by the generation */
    atomic_store_explicit(&e->len, mr->len, memory_order_relaxed);
    atomic_store_explicit(&e->gpu, mr->device_kind == 1 ? (uint64_t)mr->device_id + 1 : 0, memory_order_relaxed);
    atomic_store_explicit(&e->flags, flags, memory_order_relaxed);
    if (++n->gen_seed == 0) n->gen_seed = 1;
    uint64_t key = (uint64_t)n->gen_seed << 32 | i;
    atomic_store_explicit(&e->gen, n->gen_seed, memory_order_release);
    pthread_mutex_unlock(&n->mr_mu);
    *out = (fab_mr_keys){key, key, mr->addr};
    return 0;
}

static void drop_key(struct fab_local_node *n, uint32_t i) {   /* mr_mu held */
    atomic_store_explicit(&n->hdr->mr[i].gen, 0,
                          memory_order_seq_cst);   /* before the busy words are read: see the top */
    if (n->mr[i].fd >= 0) close(n->mr[i].fd);
    n->mr[i].fd = -1;
}

int fl_mr_dereg(void *ctx, uint64_t key) {
    struct fab_local_node *n = ((fl_dom *)ctx)->node;
    uint32_t i = (uint32_t)key, gen = (uint32_t)(key >> 32);
    if (i >= FL_MRS || !gen) return -EINVAL;
    pthread_mutex_lock(&n->mr_mu);
    if (atomic_load_explicit(&n->hdr->mr[i].gen, memory_order_relaxed) != gen) {
        pthread_mutex_unlock(&n->mr_mu);
        return -EKEYREVOKED;
    }
    drop_key(n, i);
    pthread_mutex_unlock(&n->mr_mu);
    quiesce(n);
    fl_unpin(n->gpu, n->mr[i].pin); /* the index is still ours */
    n->mr[i].pin = NULL;
    pthread_mutex_lock(
        &n->mr_mu);   /* the index is used again only now: whoever is busy with it has its range unchanged */
    n->mr[i].next_free = n->mr_free;
    n->mr_free = i;
    pthread_mutex_unlock(&n->mr_mu);
    return 0;
}

void fl_mr_revoke_nic(fl_dom *d) {
    struct fab_local_node *n = d->node;
    pthread_mutex_lock(&n->mr_mu);
    atomic_store(&d->closed, true);
    for (uint32_t i = 0; i < FL_MRS; i++)
        if (atomic_load_explicit(&n->hdr->mr[i].gen, memory_order_relaxed) &&
            atomic_load_explicit(&n->hdr->mr[i].flags, memory_order_relaxed) >> 8 == d->nic)
            drop_key(n, i);            /* not put on the free list: with it the NIC's indices end */
    pthread_mutex_unlock(&n->mr_mu);
    quiesce(n);
    for (uint32_t i = 0; n->gpu >= 0 && i < FL_MRS; i++) {
        if (!n->mr[i].pin || atomic_load_explicit(&n->hdr->mr[i].flags, memory_order_relaxed) >> 8 != d->nic) continue;
        fl_unpin(n->gpu, n->mr[i].pin);
        n->mr[i].pin = NULL;
    }
}

int fl_mr_share(struct fab_local_node *n, uint32_t nic, uint64_t key, fl_share *out) {
    uint32_t i = (uint32_t)key, gen = (uint32_t)(key >> 32);
    int r = -EKEYREVOKED;
    *out = (fl_share){.fd = -1};
    if (i >= FL_MRS || !gen) return r;
    pthread_mutex_lock(&n->mr_mu);
    fl_mr_ent *e = &n->hdr->mr[i];
    if (atomic_load_explicit(&e->gen, memory_order_relaxed) == gen) {
        uint32_t f = atomic_load_explicit(&e->flags, memory_order_relaxed);
        out->off = n->mr[i].fd_off;
        out->len = atomic_load_explicit(&e->len, memory_order_relaxed);
        out->cuda = f & FL_MR_CUDA;
        out->ipc = n->mr[i].ipc;
        if (f >> 8 != nic || !(f & FL_MR_WRITE) || !(f & FL_MR_MAPPABLE)) r = -EACCES;
        else if (out->cuda) r = 0;
        else r = (out->fd = fcntl(n->mr[i].fd, F_DUPFD_CLOEXEC, 0)) < 0 ? -errno : 0;
    }
    pthread_mutex_unlock(&n->mr_mu);
    return r;
}

int fl_mr_check(fl_node_hdr *h, uint64_t key, uint32_t nic, uint64_t addr, uint64_t len, uint32_t need,
                uint32_t *flags) {
    uint32_t i = (uint32_t)key, gen = (uint32_t)(key >> 32);
    if (i >= FL_MRS || !gen) return -EKEYREVOKED;
    fl_mr_ent *e = &h->mr[i];
    if (atomic_load_explicit(&e->gen, memory_order_seq_cst) != gen) return -EKEYREVOKED; /* after busy: see the top */
    uint64_t base = atomic_load_explicit(&e->base, memory_order_acquire),
             span = atomic_load_explicit(&e->len, memory_order_acquire);
    uint32_t f = atomic_load_explicit(&e->flags, memory_order_acquire);
    /* Acquire above keeps this load last: unchanged means that the three belong to this registration. */
    if (atomic_load_explicit(&e->gen, memory_order_relaxed) != gen) return -EKEYREVOKED;
    if (addr < base || len > span || addr - base > span - len) return -EFAULT;
    if (f >> 8 != nic || (need & ~f)) return -EACCES;
    if (flags) *flags = f;
    return 0;
}
