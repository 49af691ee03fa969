/* Prepared transfers: a watched word whose every step submits the same transfer, on the watcher's thread. So a GPU starts a
 * transfer with one addition, without Python and without a host synchronisation (paper, section 3). */
#include "engine_internal.h"

#define STEPS_MAX (1u << 24)
#define PATIENCE_NS 1000000ull /* for a full engine; the watcher's thread has others to look after */

struct fab_prepared {
    fab_engine *e;
    uint64_t local, loff, remote, roff, len, timeout_ns, flag;
    uint64_t sstride, dstride;
    fab_lists *lists; /* NULL: one write */
    int64_t imm, watch;
    int32_t nic;
    _Atomic uint64_t *word;
    uint64_t answered; /* [watcher thread, and close after it] additions that were submitted or refused */
    _Atomic bool closing;
    _Atomic int32_t refused;
    _Atomic uint64_t count;
};

static int64_t submit(fab_prepared *p) {
    if (!p->lists)
        return fab_submit_write(p->e, p->local, p->loff, p->remote, p->roff, p->len, p->imm, p->nic, p->timeout_ns,
                                p->flag);
    return fab_submit_lists(p->e, p->local, p->lists, p->sstride, p->loff, p->remote, p->dstride, p->roff, p->len,
                            p->imm, p->nic, p->timeout_ns, p->flag);
}

static void refuse(fab_prepared *p, int32_t why) {
    atomic_store_explicit(&p->refused, why, memory_order_relaxed); /* a number; the flag's bump publishes it */
    if (!p->flag) return;
    fab_flag_hold(p->flag);
    fab_flag_bump(p->flag, false);
}

static void once(fab_prepared *p) {
    uint64_t until = 0;
    int64_t h;
    while ((h = submit(p)) == -EAGAIN) {
        uint64_t now = fab_now();
        if (!until) until = now + PATIENCE_NS;
        else if (now > until) break;
        fab_progress(p->e);
    }
    atomic_fetch_add_explicit(&p->count, 1, memory_order_relaxed); /* a count */
    if (h > 0) {
        fab_transfer_release(p->e, (uint64_t)h);
        return;
    }
    refuse(p, (int32_t)h);
}

static void fire(void *arg, uint64_t old, uint64_t value) {
    fab_prepared *p = arg;
    uint64_t n = value - old;
    p->answered = value;
    if (n > STEPS_MAX) return; /* set back, not added to */
    for (; n; n--)
        if (atomic_load_explicit(&p->closing, memory_order_relaxed)) refuse(p, -ECANCELED); /* somebody waits for us */
        else once(p);
    fab_progress(p->e); /* what was posted is begun now, not when the worker looks next */
}

static void discard(fab_prepared *p) {
    fab_flag_let_go(p->flag);
    fab_lists_let_go(p->lists);
    free(p);
}

static fab_prepared *watch(fab_prepared *p, uint64_t word, int *rc) {
    uint64_t unused;
    fab_flag_hold(p->flag);
    p->word = (_Atomic uint64_t *)(uintptr_t)word;
    p->answered = atomic_load_explicit(p->word, memory_order_acquire);
    p->watch = fab_watch_add(p->e, word, fire, p, &unused);
    if (p->watch >= 0) return p;
    *rc = (int)p->watch;
    discard(p);
    return NULL;
}

/* All is checked at each submit; here once, so that a mistake is told to the one who makes it. */
static int check(const fab_prepared *p) {
    fab_ends at;
    int rc = fab_ends_find(p->e, p->local, p->remote, &at);
    if (rc) return rc;
    if (!fab_imm_ok(p->imm)) return -EINVAL;
    if (p->nic >= (int32_t)at.local->group->nnics) return -ENODEV;
    static const fab_lists one = {.npages = 1};
    return fab_lists_inside(p->lists ? p->lists : &one, &at, p->sstride, p->loff, p->dstride, p->roff, p->len)
               ? 0
               : -ERANGE;
}

static fab_prepared *prepare(fab_engine *e, uint64_t local, const uint32_t *sidx, uint64_t sstride, uint64_t soff,
                             uint64_t remote, const uint32_t *didx, uint64_t dstride, uint64_t doff, uint32_t npages,
                             uint64_t page_len, int64_t imm, int32_t nic, uint64_t timeout_ns, uint64_t flag,
                             uint64_t word, int *rc) {
    fab_prepared *p = calloc(1, sizeof *p);
    if (p && npages) p->lists = fab_lists_new(sidx, didx, npages);
    if (!p || (npages && !p->lists)) {
        free(p);
        *rc = -ENOMEM;
        return NULL;
    }
    p->e = e;
    p->local = local;
    p->loff = soff;
    p->sstride = sstride;
    p->remote = remote;
    p->roff = doff;
    p->dstride = dstride;
    p->len = page_len;
    p->imm = imm;
    p->nic = nic;
    p->timeout_ns = timeout_ns;
    p->flag = flag;
    *rc = check(p);
    if (*rc) {
        fab_lists_let_go(p->lists);
        free(p);
        return NULL;
    }
    return watch(p, word, rc);
}

fab_prepared *fab_prepare_paged(fab_engine *e, uint64_t local, const uint32_t *sidx, uint64_t sstride, uint64_t soff,
                                uint64_t remote, const uint32_t *didx, uint64_t dstride, uint64_t doff, uint32_t npages,
                                uint64_t page_len, int64_t imm, int32_t nic, uint64_t timeout_ns, uint64_t flag,
                                uint64_t word, int *rc) {
    if (!npages) { /* no pages are not one write */
        *rc = -EINVAL;
        return NULL;
    }
    return prepare(e, local, sidx, sstride, soff, remote, didx, dstride, doff, npages, page_len, imm, nic, timeout_ns,
                   flag, word, rc);
}

fab_prepared *fab_prepare_write(fab_engine *e, uint64_t local, uint64_t loff, uint64_t remote, uint64_t roff,
                                uint64_t len, int64_t imm, int32_t nic, uint64_t timeout_ns, uint64_t flag,
                                uint64_t word, int *rc) {
    return prepare(e, local, NULL, 0, loff, remote, NULL, 0, roff, 0, len, imm, nic, timeout_ns, flag, word, rc);
}

uint64_t fab_prepared_count(const fab_prepared *p, int32_t *refused) {
    *refused = atomic_load_explicit(&((fab_prepared *)p)->refused, memory_order_relaxed);
    return atomic_load_explicit(&((fab_prepared *)p)->count, memory_order_relaxed);
}

/* After it nothing is submitted any more. What was submitted goes on; additions that nobody has looked at are refused: a
 * stream may wait for them. */
void fab_prepared_close(fab_prepared *p) {
    atomic_store_explicit(&p->closing, true, memory_order_relaxed); /* a hint: the watcher need not submit the rest */
    fab_watch_close(p->e, (uint64_t)p->watch);
    fab_watch_settle(p->e); /* the watcher may have found it open just now */
    uint64_t left = atomic_load_explicit(p->word, memory_order_acquire) - p->answered;
    for (; left && left <= STEPS_MAX; left--) refuse(p, -ECANCELED);
    discard(p);
}
