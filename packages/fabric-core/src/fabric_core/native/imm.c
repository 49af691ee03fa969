/* The IMMCOUNTER (paper, section 2): arrivals are counted per immediate, in any order, before or after somebody waits.
 *
 * A slot's word holds its generation beside the count, so that adding and checking the generation is one exchange: a
 * late immediate of an earlier owner is stray and never credited to the new one (C4). An arrival adds to the word and
 * then reads the threshold; an expectation stores the threshold and then reads the word; both sequentially consistent,
 * so at least one of the two sees that the count is reached. Expectations are served first come first served, and each
 * claims its count. */
#include "engine_internal.h"

#define UNITS_BITS 58
#define UNITS_MASK ((UINT64_C(1) << UNITS_BITS) - 1)
#define IN_USE (UINT64_C(1) << 63)
#define TAG(gen) (IN_USE | (uint64_t)(gen) << UNITS_BITS)
#define TAG_OF(word) ((word) & ~UNITS_MASK)
#define NO_SLOT UINT32_MAX

int fab_imm_init(fab_imm_table *table, uint32_t nslots) {
    table->slots = aligned_alloc(FAB_CACHELINE, sizeof(fab_imm_slot) * nslots);
    if (!table->slots) return -ENOMEM;
    memset(table->slots, 0, sizeof(fab_imm_slot) * nslots);
    table->nslots = nslots;
    for (uint32_t i = 0; i < nslots; i++) {
        fab_list_init(&table->slots[i].waiting);
        atomic_init(&table->slots[i].threshold, UINT64_MAX);
        table->slots[i].next_free = i + 1 < nslots ? i + 1 : NO_SLOT;
    }
    table->free_first = 0;
    table->free_last = nslots - 1;
    return 0;
}

void fab_imm_fini(fab_imm_table *table) { free(table->slots); }

/* ---- the owner's side --------------------------------------------------------------------------- */

int64_t fab_imm_alloc(fab_engine *e) {
    if (!e) return -ESHUTDOWN;
    fab_imm_table *table = &e->imms;
    fab_spin_lock(&table->lock);
    uint32_t i = table->free_first;
    if (i != NO_SLOT) {
        table->free_first = table->slots[i].next_free;
        if (table->free_first == NO_SLOT) table->free_last = NO_SLOT;
    }
    fab_spin_unlock(&table->lock);
    if (i == NO_SLOT) return -ENOSPC;
    fab_imm_slot *slot = &table->slots[i];
    uint64_t gen = atomic_load_explicit(&slot->word, memory_order_relaxed) >> UNITS_BITS & 31u;
    slot->consumed = 0;
    atomic_store_explicit(&slot->threshold, UINT64_MAX, memory_order_relaxed);
    atomic_store_explicit(&slot->word, TAG(gen), memory_order_release);
    return (int64_t)(gen << 24 | i);
}

static fab_imm_slot *slot_of(fab_engine *e, uint32_t imm) {
    if (!e || imm >> 29 || FAB_IMM_SLOT(imm) >= e->imms.nslots) return NULL;
    fab_imm_slot *slot = &e->imms.slots[FAB_IMM_SLOT(imm)];
    uint64_t word = atomic_load_explicit(&slot->word, memory_order_acquire);
    return TAG_OF(word) == TAG(FAB_IMM_GEN(imm)) ? slot : NULL;
}

static uint64_t arrived(const fab_imm_slot *slot) {
    return atomic_load_explicit(&((fab_imm_slot *)slot)->word, memory_order_seq_cst) & UNITS_MASK;
}

/* The one place where an expectation ends: once, since the caller holds the slot's lock and has just taken it off the
 * slot's queue (C1). */
static void end(fab_engine *e, fab_waiter *x, uint32_t phase, int32_t err, uint32_t peer) {
    uint64_t flag = x->flag;
    fab_bell_fn bell = x->bell;
    void *bell_arg = x->bell_arg;
    x->err = err;
    x->err_peer = peer;
    /* release: err is visible to whoever sees the phase; acquire: with the flags that a waiter set */
    uint32_t state = atomic_fetch_or_explicit(&x->state, phase, memory_order_acq_rel);
    if (state & FAB_NOTIFY) fab_event_push(e, &x->event, FAB_EV_EXPECT);
    if (state & FAB_WAITED) fab_futex_wake_all(&x->state);
    fab_waiter *head = atomic_load_explicit(&e->ended, memory_order_relaxed);
    do x->ended = head;
    while (!atomic_compare_exchange_weak_explicit(&e->ended, &head, x, memory_order_release, memory_order_relaxed));
    if (flag) fab_flag_bump(flag, phase == FAB_DONE);
    if (bell) bell(bell_arg);
}

/* Called with the slot's lock: everything that the count has reached. */
static void serve(fab_engine *e, fab_imm_slot *slot) {
    for (;;) {
        uint64_t threshold = UINT64_MAX;
        while (!fab_list_empty(&slot->waiting)) {
            fab_waiter *x = FAB_CONTAINER(slot->waiting.next, fab_waiter, queue);
            threshold = slot->consumed + x->count * FAB_IMM_UNIT;
            if (arrived(slot) < threshold) break;
            fab_list_remove(&x->queue);
            slot->consumed = threshold;
            end(e, x, FAB_DONE, 0, FAB_PEER_NONE);
            threshold = UINT64_MAX;
        }
        atomic_store_explicit(&slot->threshold, threshold, memory_order_seq_cst);
        if (threshold == UINT64_MAX || arrived(slot) < threshold) return;
    }
}

int64_t fab_imm_free(fab_engine *e, uint32_t imm) {
    fab_imm_slot *slot = slot_of(e, imm);
    if (!slot) return -EINVAL;
    fab_spin_lock(&slot->lock);
    uint64_t gen = FAB_IMM_GEN(imm);
    uint64_t last = atomic_load_explicit(&slot->word, memory_order_relaxed);
    do {
        if (TAG_OF(last) != TAG(gen)) { /* another thread freed it first */
            fab_spin_unlock(&slot->lock);
            return -EINVAL;
        }
    } while (!atomic_compare_exchange_weak_explicit(&slot->word, &last, ((gen + 1) & 31u) << UNITS_BITS,
                                                    memory_order_acq_rel, memory_order_relaxed));
    atomic_store_explicit(&slot->threshold, UINT64_MAX, memory_order_relaxed);
    while (!fab_list_empty(&slot->waiting)) {
        fab_waiter *x = FAB_CONTAINER(slot->waiting.next, fab_waiter, queue);
        fab_list_remove(&x->queue);
        end(e, x, FAB_CANCELLED, -ECANCELED, FAB_PEER_NONE);
    }
    uint64_t surplus = (last & UNITS_MASK) - slot->consumed;
    fab_spin_unlock(&slot->lock);

    fab_imm_table *table = &e->imms;
    fab_spin_lock(&table->lock);
    slot->next_free = NO_SLOT;
    if (table->free_last == NO_SLOT) table->free_first = FAB_IMM_SLOT(imm);
    else table->slots[table->free_last].next_free = FAB_IMM_SLOT(imm);
    table->free_last = FAB_IMM_SLOT(imm);
    fab_spin_unlock(&table->lock);
    return (int64_t)(surplus / FAB_IMM_UNIT);
}

int64_t fab_imm_count(fab_engine *e, uint32_t imm) {
    for (uint32_t i = 0; e && i < e->ngroups; i++) fab_group_help(e->groups[i], true);
    fab_imm_slot *slot = slot_of(e, imm);
    if (!slot) return -EINVAL;
    fab_spin_lock(&slot->lock);
    uint64_t units = arrived(slot) - slot->consumed;
    fab_spin_unlock(&slot->lock);
    return (int64_t)(units / FAB_IMM_UNIT);
}

/* ---- the network's side -------------------------------------------------------------------------- */

void fab_imm_arrive(fab_engine *e, uint32_t imm, uint32_t count) {
    uint64_t units = (uint64_t)count * (FAB_IMM_UNIT / FAB_IMM_SPLIT(imm));
    fab_imm_slot *slot = slot_of(e, imm & 0x1fffffffu);
    uint64_t tag = TAG(FAB_IMM_GEN(imm));
    if (slot) {
        uint64_t word = atomic_load_explicit(&slot->word, memory_order_relaxed);
        while (TAG_OF(word) == tag) {
            if (atomic_compare_exchange_weak_explicit(&slot->word, &word, word + units, memory_order_seq_cst,
                                                      memory_order_relaxed)) {
                uint64_t now = (word & UNITS_MASK) + units;
                if (now >= atomic_load_explicit(&slot->threshold, memory_order_seq_cst)) {
                    fab_spin_lock(&slot->lock);
                    serve(e, slot);
                    fab_spin_unlock(&slot->lock);
                }
                return;
            }
        }
    }
    FAB_COUNT(e->imms.stray, units);
}

/* ---- expectations ---------------------------------------------------------------------------------- */

static void discard(fab_waiter *x) {
    for (uint32_t i = 0; i < x->npeers; i++) fab_peer_let_go(fab_peer_at(x->engine->groups[0], x->peers[i]));
    free(x->peers);
    fab_pool_free(&x->engine->expects, x);
}

/* [lock of group 0] takes ended expectations off the group's lists; then their slots may be used again */
void fab_expect_reap(fab_group *g) {
    if (!atomic_load_explicit(&g->engine->ended, memory_order_relaxed)) return;
    fab_waiter *x = atomic_exchange_explicit(&g->engine->ended, NULL, memory_order_acquire);
    while (x) {
        fab_waiter *next = x->ended;
        fab_timer_remove(g, &x->timer);
        if (fab_linked(&x->watch)) fab_list_remove(&x->watch);
        if (atomic_fetch_or_explicit(&x->state, FAB_REAPED, memory_order_acq_rel) & FAB_RELEASED) discard(x);
        x = next;
    }
}

/* A deadline or a lost peer: leave the slot's queue first, so that the count goes to the next in line. */
static void abandon(fab_engine *e, fab_waiter *x, uint32_t phase, int32_t err, uint32_t peer) {
    fab_imm_slot *slot = &e->imms.slots[FAB_IMM_SLOT(x->imm)];
    fab_spin_lock(&slot->lock);
    if (fab_linked(&x->queue)) {
        fab_list_remove(&x->queue);
        end(e, x, phase, err, peer);
        if (slot_of(e, x->imm)) serve(e, slot);
    }
    fab_spin_unlock(&slot->lock);
}

void fab_expect_expire(fab_engine *e, fab_waiter *x) {
    uint32_t culprit = x->npeers == 1 ? x->peers[0] : FAB_PEER_NONE; /* of several, who is missing is not known */
    abandon(e, x, FAB_FAILED, -ETIME, culprit);
}

void fab_expect_begin(fab_group *g, uint64_t handle, uint64_t now) {
    fab_waiter *x = fab_expect_get(g->engine, handle);
    if (!x || atomic_load_explicit(&x->state, memory_order_acquire) & FAB_PHASE_MASK) return;
    fab_timer_add(g, &x->timer, FAB_TIMER_EXPECT, now + x->timeout_ns);
    if (!x->npeers) return;
    fab_list_append(&g->watching, &x->watch);
    for (uint32_t i = 0; i < x->npeers; i++) {
        fab_peer *peer = fab_peer_at(g, x->peers[i]);
        uint32_t state = atomic_load_explicit(&peer->state, memory_order_relaxed);
        if (state == FAB_PEER_NEW || state == FAB_PEER_LOST) fab_peer_connect(g, peer, now);
    }
}

void fab_expect_peer_lost(fab_group *g, fab_peer *peer) {
    for (fab_link *link = g->watching.next, *next; link != &g->watching; link = next) {
        next = link->next;
        fab_waiter *x = FAB_CONTAINER(link, fab_waiter, watch);
        for (uint32_t i = 0; i < x->npeers; i++) {
            if (x->peers[i] != peer->number) continue;
            abandon(g->engine, x, FAB_FAILED, peer->status, peer->number);
            break;
        }
    }
}

int64_t fab_expect(fab_engine *e, uint32_t imm, uint64_t count, uint64_t timeout_ns, const uint32_t *peers,
                   uint32_t npeers) {
    if (!e || atomic_load_explicit(&e->closed, memory_order_acquire)) return -ESHUTDOWN;
    fab_imm_slot *slot = slot_of(e, imm);
    if (!slot || count > UNITS_MASK / FAB_IMM_UNIT / 2) return -EINVAL;
    fab_group *g = e->groups[0];
    fab_waiter *x = fab_pool_alloc(&e->expects);
    if (!x) return -EAGAIN;
    memset((char *)x + sizeof(fab_slot), 0, sizeof *x - sizeof(fab_slot));
    x->err_peer = FAB_PEER_NONE;
    x->imm = imm;
    x->count = count;
    x->timeout_ns = timeout_ns ? timeout_ns : e->cfg.timeout_ns;
    x->engine = e;
    if (npeers) {
        x->peers = malloc(sizeof *peers * npeers);
        if (!x->peers) {
            fab_pool_free(&e->expects, x);
            return -ENOMEM;
        }
        memcpy(x->peers, peers, sizeof *peers * npeers);
        for (; x->npeers < npeers; x->npeers++)
            if (!fab_peer_hold(g, peers[x->npeers])) {
                discard(x);
                return -ESRCH;
            }
    }
    uint64_t handle = fab_expect_handle(x);
    /* into the slot's queue first (so that a lost peer or a deadline finds it there), then to group 0 */
    fab_spin_lock(&slot->lock);
    /* under the slot's lock: close sets `closed` and then sweeps every slot */
    int rc = atomic_load_explicit(&e->closed, memory_order_seq_cst)     ? -ESHUTDOWN
             : slot_of(e, imm) != slot                                  ? -EINVAL
             : !fab_ring_push(&g->ring, FAB_RQ_EXPECT, 0, NULL, handle) ? -EAGAIN
                                                                        : 0;
    if (rc) {
        fab_spin_unlock(&slot->lock);
        discard(x);
        return rc;
    }
    fab_list_append(&slot->waiting, &x->queue);
    serve(e, slot);
    fab_spin_unlock(&slot->lock);
    fab_group_help(g, false);
    return (int64_t)handle;
}

/* At close: whoever still waits is told so. */
void fab_imm_sweep(fab_engine *e) {
    for (uint32_t i = 0; i < e->imms.nslots; i++) {
        fab_imm_slot *slot = &e->imms.slots[i];
        if (!(atomic_load_explicit(&slot->word, memory_order_acquire) & IN_USE)) continue;
        fab_spin_lock(&slot->lock);
        while (!fab_list_empty(&slot->waiting)) {
            fab_waiter *x = FAB_CONTAINER(slot->waiting.next, fab_waiter, queue);
            fab_list_remove(&x->queue);
            end(e, x, FAB_CANCELLED, -ECANCELED, FAB_PEER_NONE);
        }
        atomic_store_explicit(&slot->threshold, UINT64_MAX, memory_order_seq_cst);
        fab_spin_unlock(&slot->lock);
    }
}

int fab_expect_cancel(fab_engine *e, uint64_t handle) {
    fab_waiter *x = fab_expect_get(e, handle);
    if (!x) return -EBADF;
    abandon(e, x, FAB_CANCELLED, -ECANCELED, FAB_PEER_NONE);
    return 0;
}

int fab_expect_outcome(fab_engine *e, uint64_t handle, fab_outcome *out) {
    fab_waiter *x = fab_expect_get(e, handle);
    if (!x) return -EBADF;
    out->phase = atomic_load_explicit(&x->state, memory_order_acquire) & FAB_PHASE_MASK;
    out->err = out->phase ? x->err : 0;
    out->peer = out->phase ? x->err_peer : FAB_PEER_NONE;
    out->nic = -1;
    out->op = 0;
    return 0;
}

int fab_expect_notify(fab_engine *e, uint64_t handle) {
    fab_waiter *x = fab_expect_get(e, handle);
    if (!x) return -EBADF;
    uint32_t old = atomic_fetch_or_explicit(&x->state, FAB_NOTIFY, memory_order_acq_rel);
    if ((old & FAB_PHASE_MASK) && !(old & FAB_NOTIFY)) fab_event_push(e, &x->event, FAB_EV_EXPECT);
    return 0;
}

/* Has `flag` bumped when it ends, at once if it has. One flag per expectation. */
int fab_expect_flag(fab_engine *e, uint64_t handle, uint64_t flag) {
    fab_waiter *x = fab_expect_get(e, handle);
    if (!x) return -EBADF;
    fab_imm_slot *slot = &e->imms.slots[FAB_IMM_SLOT(x->imm)];
    fab_spin_lock(&slot->lock); /* it ends under this lock, and is off the queue then */
    bool waits = fab_linked(&x->queue);
    fab_flag_hold(flag);
    if (waits) x->flag = flag;
    fab_spin_unlock(&slot->lock);
    if (!waits)
        fab_flag_bump(flag, (atomic_load_explicit(&x->state, memory_order_acquire) & FAB_PHASE_MASK) == FAB_DONE);
    return 0;
}

/* Has fn(arg) called when it ends, at once if it has. One for each expectation. */
int fab_expect_bell(fab_engine *e, uint64_t handle, fab_bell_fn fn, void *arg) {
    fab_waiter *x = fab_expect_get(e, handle);
    if (!x) return -EBADF;
    fab_imm_slot *slot = &e->imms.slots[FAB_IMM_SLOT(x->imm)];
    fab_spin_lock(&slot->lock); /* as above; and whoever frees the immediate knows that no call comes after it */
    if (fab_linked(&x->queue)) {
        x->bell = fn;
        x->bell_arg = arg;
    } else {
        fn(arg);
    }
    fab_spin_unlock(&slot->lock);
    return 0;
}

int fab_expect_release(fab_engine *e, uint64_t handle) {
    fab_waiter *x = fab_expect_get(e, handle);
    if (!x) return -EBADF;
    if (atomic_fetch_or_explicit(&x->state, FAB_RELEASED, memory_order_acq_rel) & FAB_REAPED) discard(x);
    return 0;
}
