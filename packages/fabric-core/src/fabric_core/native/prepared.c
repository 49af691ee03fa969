/* Prepared transfers: a watched word whose every step submits the same transfer, on the watcher's thread. So a GPU starts a
 * transfer with one addition, without Python and without a host synchronisation (paper, section 3). */
#include "engine_internal.h"

#define STEPS_MAX (1u << 24)

struct fab_prepared {
    fab_engine *e;
    fab_kept kept;
    int64_t watch;
    _Atomic uint64_t *word;
    uint64_t answered; /* [watcher thread, and close after it] additions that were submitted or refused */
    _Atomic bool closing;
    _Atomic int32_t refused;
    _Atomic uint64_t count;
};

static void refuse(fab_prepared *p, int32_t why) {
    atomic_store_explicit(&p->refused, why, memory_order_relaxed); /* a number; the flag's bump publishes it */
    if (!p->kept.draft.flag) return;
    fab_flag_hold(p->kept.draft.flag);
    fab_flag_bump(p->kept.draft.flag, false);
}

static void once(fab_prepared *p) {
    /* counted first: whoever sees the transfer's end finds it counted */
    atomic_fetch_add_explicit(&p->count, 1, memory_order_relaxed);
    int64_t h = fab_kept_submit(p->e, &p->kept);
    if (h > 0) fab_transfer_release(p->e, (uint64_t)h);
    else refuse(p, (int32_t)h);
}

static void fire(void *arg, uint64_t old, uint64_t value) {
    fab_prepared *p = arg;
    uint64_t n = value - old;
    p->answered = value;
    if (n > STEPS_MAX) return; /* set back, not added to */
    for (; n; n--)
        if (atomic_load_explicit(&p->closing, memory_order_relaxed)) refuse(p, -ECANCELED); /* somebody waits for us */
        else once(p);
    fab_help_along(p->e); /* what was posted is begun now, not when the worker looks next */
}

static void discard(fab_prepared *p) {
    fab_kept_let_go(&p->kept);
    free(p);
}

static fab_prepared *prepare(fab_engine *e, const fab_draft *draft, uint64_t word, int *rc) {
    fab_prepared *p = calloc(1, sizeof *p);
    *rc = p ? fab_draft_keep(e, draft, NULL, &p->kept) : -ENOMEM;
    if (*rc) {
        free(p);
        return NULL;
    }
    uint64_t unused;
    p->e = e;
    p->word = (_Atomic uint64_t *)(uintptr_t)word;
    p->answered = atomic_load_explicit(p->word, memory_order_acquire);
    p->watch = fab_watch_add(p->e, word, fire, p, &unused);
    if (p->watch >= 0) return p;
    *rc = (int)p->watch;
    discard(p);
    return NULL;
}

fab_prepared *fab_prepare_paged(fab_engine *e, uint64_t local, const uint32_t *sidx, uint64_t sstride, uint64_t soff,
                                uint64_t remote, const uint32_t *didx, uint64_t dstride, uint64_t doff, uint32_t npages,
                                uint64_t page_len, int64_t imm, int32_t nic, uint64_t timeout_ns, uint64_t flag,
                                uint64_t word, int *rc) {
    if (!npages) { /* no pages are not one write */
        *rc = -EINVAL;
        return NULL;
    }
    fab_draft draft = {.local = local,
                       .loff = soff,
                       .remote = remote,
                       .roff = doff,
                       .len = page_len,
                       .sstride = sstride,
                       .dstride = dstride,
                       .timeout_ns = timeout_ns,
                       .flag = flag,
                       .imm = imm,
                       .nic = nic,
                       .npages = npages,
                       .sidx = sidx,
                       .didx = didx};
    return prepare(e, &draft, word, rc);
}

fab_prepared *fab_prepare_write(fab_engine *e, uint64_t local, uint64_t loff, uint64_t remote, uint64_t roff,
                                uint64_t len, int64_t imm, int32_t nic, uint64_t timeout_ns, uint64_t flag,
                                uint64_t word, int *rc) {
    fab_draft draft = {.local = local,
                       .loff = loff,
                       .remote = remote,
                       .roff = roff,
                       .len = len,
                       .timeout_ns = timeout_ns,
                       .flag = flag,
                       .imm = imm,
                       .nic = nic};
    return prepare(e, &draft, word, rc);
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
