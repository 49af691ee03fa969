/* What tests of lock-free code share: threads that start each round together, and numbers that shrink under a sanitizer.
 *
 * Rounds, and not one long run: what is looked for hides in the few instructions around a hand-over, so every round
 * brings all threads back to it at the same time. */
#ifndef FAB_TEST_LITMUS_H
#define FAB_TEST_LITMUS_H
#include "common.h"

#include "check.h"

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#    define LITMUS_ROUNDS(n) ((n) / 8)
#else
#    define LITMUS_ROUNDS(n) (n)
#endif
#define LITMUS_MAX 8u
#define LITMUS_DEADLINE_NS 100000000000ull /* a test that hangs says where, before the runner ends it */
#define LITMUS_LOST_NS 2000000000ull /* nobody else is needed for what has not happened after so long */

typedef struct litmus_barrier {
    FAB_ALIGNED _Atomic uint32_t waiting;
    FAB_ALIGNED _Atomic uint32_t turn;
    uint32_t threads;
} litmus_barrier;

static inline void litmus_meet(litmus_barrier *b) {
    uint32_t turn = atomic_load_explicit(&b->turn, memory_order_acquire);
    if (atomic_fetch_add_explicit(&b->waiting, 1, memory_order_acq_rel) + 1 == b->threads) {
        atomic_store_explicit(&b->waiting, 0, memory_order_relaxed);
        atomic_store_explicit(&b->turn, turn + 1, memory_order_release);
        return;
    }
    uint64_t until = 0;
    for (uint32_t i = 0; atomic_load_explicit(&b->turn, memory_order_acquire) == turn; i++) {
        if (i < 200) {
            fab_relax();
            continue;
        }
        sched_yield(); /* fewer cores than threads */
        if (!until) until = fab_now() + LITMUS_DEADLINE_NS;
        CHECK(fab_now() < until, "a thread does not come");
    }
}

/* About a nanosecond a turn: what is looked for is a window of a few. */
static inline void litmus_pause(uint32_t turns) {
    for (volatile uint32_t i = 0; i < turns; i++) {
    }
}

typedef struct litmus_thread {
    uint32_t index;
    uint32_t rng;
    void (*body)(struct litmus_thread *self);
} litmus_thread;

static inline void *litmus_main(void *arg) {
    litmus_thread *self = arg;
    self->body(self);
    return NULL;
}

/* Runs body in n threads and waits for all of them. */
static inline void litmus_run(uint32_t n, void (*body)(litmus_thread *self)) {
    pthread_t id[LITMUS_MAX];
    litmus_thread self[LITMUS_MAX];
    CHECK(n <= LITMUS_MAX);
    for (uint32_t i = 0; i < n; i++) {
        self[i] = (litmus_thread){.index = i, .rng = (i + 1) * 2654435761u | 1u, .body = body};
        CHECK(pthread_create(&id[i], NULL, litmus_main, &self[i]) == 0);
    }
    for (uint32_t i = 0; i < n; i++) CHECK(pthread_join(id[i], NULL) == 0);
}
#endif
