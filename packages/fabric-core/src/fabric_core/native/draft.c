/* Drafts: writes, and pages, whose arguments were looked at, to be submitted later, once or often, on any thread. A prepared
 * transfer has one, a sequence many. Submitting one allocates nothing but a slot of the engine's. */
#include "engine_internal.h"

#define PATIENCE_NS 1000000ull /* for a full engine; the watcher's thread has others to look after */

/* All is checked at each submit; here once, so that a mistake is told to the one who makes it. */
static int check(fab_engine *e, const fab_kept *k) {
    const fab_draft *d = &k->draft;
    fab_ends at;
    int rc = fab_ends_find(e, d->local, d->remote, &at);
    if (rc) return rc;
    if (!fab_imm_ok(d->imm)) return -EINVAL;
    if (d->nic >= (int32_t)at.local->group->nnics) return -ENODEV;
    static const fab_lists one = {.npages = 1};
    return fab_lists_inside(k->lists ? k->lists : &one, &at, d->sstride, d->loff, d->dstride, d->roff, d->len)
               ? 0
               : -ERANGE;
}

static bool same(const fab_lists *l, const fab_draft *d) {
    size_t bytes = sizeof *l->numbers * d->npages;
    return l && l->npages == d->npages && !memcmp(l->numbers, d->sidx, bytes) &&
           !memcmp(l->numbers + d->npages, d->didx, bytes);
}

int fab_draft_keep(fab_engine *e, const fab_draft *draft, fab_lists *like, fab_kept *out) {
    out->draft = *draft;
    out->lists = NULL;
    if (draft->npages) {
        if (same(like, draft)) fab_lists_hold(out->lists = like);
        else out->lists = fab_lists_new(draft->sidx, draft->didx, draft->npages);
        if (!out->lists) return -ENOMEM;
    }
    out->draft.sidx = out->draft.didx = NULL; /* the caller's */
    int rc = check(e, out);
    if (rc) fab_lists_let_go(out->lists);
    else fab_flag_hold(draft->flag);
    return rc;
}

void fab_kept_let_go(fab_kept *k) {
    fab_flag_let_go(k->draft.flag);
    fab_lists_let_go(k->lists);
    k->lists = NULL;
    k->draft.flag = 0;
}

void fab_help_along(fab_engine *e) {
    /* not as a poller: it would have the worker leave the work to a thread that is about to sleep (worker.c) */
    for (uint32_t i = 0; i < e->ngroups; i++) fab_group_help(e->groups[i], false);
}

static int64_t submit(fab_engine *e, const fab_kept *k) {
    const fab_draft *d = &k->draft;
    uint64_t timeout = d->timeout_ns;
    if (d->until_ns) {
        uint64_t now = fab_time(e);
        if (now >= d->until_ns) return -ETIME;
        timeout = d->until_ns - now;
    }
    if (!k->lists)
        return fab_submit_write(e, d->local, d->loff, d->remote, d->roff, d->len, d->imm, d->nic, timeout, d->flag);
    return fab_submit_lists(e, d->local, k->lists, d->sstride, d->loff, d->remote, d->dstride, d->roff, d->len, d->imm,
                            d->nic, timeout, d->flag);
}

int64_t fab_kept_submit(fab_engine *e, const fab_kept *k) {
    uint64_t until = 0;
    int64_t h;
    while ((h = submit(e, k)) == -EAGAIN) {
        uint64_t now = fab_now();
        if (!until) until = now + PATIENCE_NS;
        else if (now > until) break;
        fab_help_along(e);
    }
    return h;
}
