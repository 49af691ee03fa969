/* Sequences: a watched word that counts steps, each with transfers of its own, as a model's layers are. Step k submits the k-th
 * list, in order, on the watcher's thread, or on a thread of the host's that steps itself. Nothing is allocated then.
 *
 * An item belongs to a lane (a peer, say). A lane ends when it is cancelled or when the engine refuses one of its items; what is
 * left of it is passed over, and the other lanes go on. */
#include "sequence.h"

static void went_wrong(fab_sequence *s, uint64_t handle, const fab_outcome *out) {
    if (s->first.phase) return;
    s->first = *out;
    s->first_handle = handle;
}

/* Stops at the first item under way. */
void fab_sequence_reap(fab_sequence *s) {
    uint32_t steps = atomic_load_explicit(&s->reached, memory_order_relaxed);
    for (uint32_t n = steps ? s->ends[steps - 1] : 0; s->ended < n; s->ended++) {
        fab_item *it = &s->items[s->ended];
        fab_outcome out;
        if (!it->handle || fab_transfer_outcome(s->e, it->handle, &out)) continue; /* or its taker has released it */
        if (out.phase == FAB_PENDING) return;
        if (out.phase != FAB_DONE) went_wrong(s, it->handle, &out);
        if (s->keep || it->taken) continue;
        fab_transfer_release(s->e, it->handle);
        it->taken = true;
    }
}

static void submit(fab_sequence *s, fab_item *it) {
    _Atomic int32_t *lane = &s->lanes[it->kept.draft.lane];
    if (atomic_load_explicit(lane, memory_order_relaxed)) return; /* whoever ended it waits for the mutex */
    int64_t h = fab_kept_submit(s->e, &it->kept);
    if (h > 0) {
        it->handle = (uint64_t)h;
        return;
    }
    int32_t open = 0;
    atomic_compare_exchange_strong_explicit(lane, &open, (int32_t)h, memory_order_relaxed, memory_order_relaxed);
    fab_outcome out = {.phase = FAB_FAILED, .err = (int32_t)h, .peer = FAB_PEER_NONE, .nic = -1};
    went_wrong(s, 0, &out);
}

/* [mutex] All steps up to `value`: returns how many that were. */
static uint32_t advance(fab_sequence *s, uint64_t value) {
    uint32_t to = value < s->nsteps ? (uint32_t)value : s->nsteps;
    uint32_t from = atomic_load_explicit(&s->reached, memory_order_relaxed), step = from;
    for (uint64_t seen = fab_now(); step < to; step++) {
        for (uint32_t i = step ? s->ends[step - 1] : 0; i < s->ends[step]; i++) submit(s, &s->items[i]);
        atomic_store_explicit(&s->seen_ns[step], seen, memory_order_relaxed);
        atomic_store_explicit(&s->posted_ns[step], fab_now(), memory_order_relaxed);
        atomic_store_explicit(&s->reached, step + 1, memory_order_release); /* publishes the times */
    }
    return step - from;
}

void fab_sequence_fire(void *arg, uint64_t old, uint64_t value) {
    fab_sequence *s = arg;
    (void)old; /* the word counts from 0: what it jumped over is due too */
    pthread_mutex_lock(&s->mutex);
    uint32_t did = advance(s, value);
    if (did && !s->keep) fab_sequence_reap(s);
    pthread_mutex_unlock(&s->mutex);
    if (!did) return;
    if (s->keep) fab_watch_tell(s->e, s->watch, atomic_load_explicit(&s->reached, memory_order_relaxed));
    /* What was posted is begun now, not when the worker wakes. Where processors are few that would keep this thread from the
     * next step, for as long as it copies. */
    if (!s->e->cfg.hand_over) fab_help_along(s->e);
}

int64_t fab_sequence_step(fab_sequence *s, uint64_t value) {
    pthread_mutex_lock(&s->mutex);
    int64_t rc = -EBADF;
    if (!s->closed) {
        uint64_t before = atomic_load_explicit(s->word, memory_order_relaxed);
        if (!value) value = atomic_fetch_add_explicit(s->word, 1, memory_order_acq_rel) + 1;
        else /* it never goes back; others may add to it meanwhile */
            while (before < value && !atomic_compare_exchange_weak_explicit(
                                         s->word, &before, value, memory_order_acq_rel, memory_order_relaxed));
        rc = (int64_t)advance(s, value);
    }
    pthread_mutex_unlock(&s->mutex);
    return rc;
}

/* A lane is marked first, so that who is submitting stops soon, and is waited for. All lanes are marked between two steps: else
 * one step could be submitted to some of them only. */
uint32_t fab_sequence_cancel(fab_sequence *s, int64_t lane, uint32_t under_way) {
    uint32_t never = 0;
    if (lane < 0) pthread_mutex_lock(&s->mutex);
    for (uint32_t l = 0; l < s->nlanes; l++) {
        int32_t open = 0;
        if (lane >= 0 && lane != (int64_t)l) continue;
        atomic_compare_exchange_strong_explicit(&s->lanes[l], &open, -ECANCELED, memory_order_relaxed,
                                                memory_order_relaxed);
    }
    if (lane >= 0) pthread_mutex_lock(&s->mutex);
    for (uint32_t i = 0; i < s->nitems; i++) {
        fab_item *it = &s->items[i];
        if (lane >= 0 && lane != (int64_t)it->kept.draft.lane) continue;
        if (!it->handle) never++;
        if (!it->handle) fab_kept_let_go(&it->kept); /* its lane has ended */
        else if (under_way && !s->closed) fab_transfer_cancel(s->e, it->handle);
    }
    pthread_mutex_unlock(&s->mutex);
    return never;
}

uint32_t fab_sequence_take(fab_sequence *s, uint32_t step, uint32_t most, uint64_t *handles, uint64_t *seen,
                           uint64_t *posted) {
    uint32_t n = fab_sequence_times(s, seen, posted, step, most);
    uint32_t first = step && n ? s->ends[step - 1] : 0, end = n ? s->ends[step + n - 1] : 0;
    pthread_mutex_lock(&s->mutex);
    for (uint32_t i = first; i < end; i++) {
        fab_item *it = &s->items[i];
        handles[i - first] = it->taken ? 0 : it->handle;
        it->taken = it->taken || it->handle;
    }
    pthread_mutex_unlock(&s->mutex);
    return n;
}

void fab_sequence_look(fab_sequence *s, fab_sequence_state *out) {
    pthread_mutex_lock(&s->mutex);
    if (!s->closed) fab_sequence_reap(s);
    uint32_t steps = out->submitted = atomic_load_explicit(&s->reached, memory_order_relaxed), ended = 0;
    while (ended < steps && s->ends[ended] <= s->ended) ended++;
    out->ended = ended;
    out->first = s->first;
    out->first_handle = s->first_handle;
    out->waits_for = ended < steps && !s->closed ? s->items[s->ended].handle : 0;
    pthread_mutex_unlock(&s->mutex);
}

int32_t fab_sequence_lane(const fab_sequence *s, uint32_t lane) {
    return lane < s->nlanes ? atomic_load_explicit(&s->lanes[lane], memory_order_relaxed) : -EINVAL;
}

uint32_t fab_sequence_times(const fab_sequence *s, uint64_t *seen, uint64_t *posted, uint32_t from, uint32_t cap) {
    uint32_t n = atomic_load_explicit(&s->reached, memory_order_acquire);
    uint32_t most = n > from ? n - from < cap ? n - from : cap : 0;
    for (uint32_t i = 0; i < most; i++) {
        seen[i] = atomic_load_explicit(&s->seen_ns[from + i], memory_order_relaxed);
        posted[i] = atomic_load_explicit(&s->posted_ns[from + i], memory_order_relaxed);
    }
    return most;
}
