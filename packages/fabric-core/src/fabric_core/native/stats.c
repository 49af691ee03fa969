/* Counters, read while others count (relaxed: each is right, their sum may be a moment apart), and the native table. */
#include "engine_internal.h"
#include "fabric/contact.h"

void fab_hist_count(_Atomic uint64_t *hist, uint64_t from, uint64_t to) {
    uint64_t ns = to > from ? to - from : 0;
    uint32_t bucket = ns ? 63u - (uint32_t)__builtin_clzll(ns) : 0;
    FAB_COUNT_LOCKED(hist[bucket < FAB_HIST ? bucket : FAB_HIST - 1], 1);
}

int fab_engine_stats(fab_engine *e, uint32_t group, fab_stats *out) {
    if (!e) return -ESHUTDOWN;
    if (group >= e->ngroups) return -EINVAL;
    fab_counters *c = &e->groups[group]->stats;
#define READ(field) out->field = atomic_load_explicit(&c->field, memory_order_relaxed)
    READ(submitted);
    READ(done);
    READ(failed);
    READ(cancelled);
    READ(bytes);
    READ(wrs);
    READ(imms);
    READ(recvs);
    READ(steps);
    READ(helps);
    READ(sleeps);
    READ(kicks);
    READ(faults);
    for (uint32_t i = 0; i < FAB_HIST; i++) {
        READ(submit_to_post[i]);
        READ(post_to_done[i]);
    }
#undef READ
    out->imm_stray = atomic_load_explicit(&e->imms.stray, memory_order_relaxed) / FAB_IMM_UNIT;
    out->inflight = atomic_load_explicit(&e->inflight, memory_order_relaxed);
    return 0;
}

int fab_nic_counters(fab_engine *e, uint32_t group, uint32_t nic, fab_counter *out, uint32_t cap) {
    if (!e) return -ESHUTDOWN;
    if (group >= e->ngroups || nic >= e->groups[group]->nnics) return -EINVAL;
    fab_nic *n = &e->groups[group]->nics[nic];
    if (n->ops->struct_size < offsetof(fab_domain_ops, post_pages) || !n->ops->counters) return 0;
    pthread_rwlock_rdlock(&e->domains); /* against close */
    int rc = n->closed ? 0 : n->ops->counters(n->ctx, out, cap);
    pthread_rwlock_unlock(&e->domains);
    return rc;
}

static const void *contact_api(void) { return fab_contact_api_get(); }

static const fab_native_table table = {
    .version = 1,
    .struct_size = sizeof(fab_native_table),
    .submit_write = fab_submit_write,
    .submit_paged = fab_submit_paged,
    .submit_many = fab_submit_many,
    .submit_send = fab_submit_send,
    .transfer_poll = fab_transfer_poll,
    .transfer_wait = fab_transfer_wait,
    .transfer_cancel = fab_transfer_cancel,
    .transfer_release = fab_transfer_release,
    .imm_count = fab_imm_count,
    .expect = fab_expect,
    .expect_poll = fab_expect_poll,
    .expect_wait = fab_expect_wait,
    .expect_release = fab_expect_release,
    .watch_add = fab_watch_add,
    .progress = fab_progress,
    .transfer_outcome = fab_transfer_outcome,
    .expect_outcome = fab_expect_outcome,
    .expect_cancel = fab_expect_cancel,
    .imm_alloc = fab_imm_alloc,
    .imm_free = fab_imm_free,
    .watch_close = fab_watch_close,
    .contact_api = contact_api,
    .expect_bell = fab_expect_bell,
};

const fab_native_table *fab_native_api(void) { return &table; }
