/* Slots with a generation (pool.h): one owner at a time for any number of threads, also where a slot comes back to the
 * top of the free list at the wrong moment (ABA); a handle kept too long names nothing (C6). */
#include "pool.h"

#include "litmus.h"

typedef struct object {
    fab_slot slot;
    uint64_t owner; /* plain: two owners are a data race for ThreadSanitizer, and a wrong number without it */
    uint64_t note;
} object;

static fab_pool pool;

/* C6: a freed slot matches no handle, its next owner has another one */
static void handles_go_stale(void) {
    CHECK(fab_pool_init(&pool, sizeof(object), 1024) == 0);
    uint32_t gen = 0;
    for (uint32_t i = 0; i < 1000; i++) {
        object *o = fab_pool_alloc(&pool);
        uint32_t index = o->slot.index, now = fab_slot_gen(&o->slot);
        CHECK(now & 1u && now != gen, "generation %u again", now);
        CHECK(fab_pool_get(&pool, index, now) == o);
        CHECK(!fab_pool_get(&pool, index, now + 2) && !fab_pool_get(&pool, index, now - 1));
        CHECK(!fab_pool_get(&pool, index + 1024, now) && !fab_pool_get(&pool, UINT32_MAX, now));
        fab_pool_free(&pool, o);
        CHECK(!fab_pool_get(&pool, index, now), "a handle outlived its object");
        CHECK(!fab_pool_get(&pool, index, fab_slot_gen(&o->slot)), "a free slot has no handle");
        gen = now;
    }
    fab_pool_fini(&pool);
}

/* The pool grows chunk by chunk, up to its maximum, and gives every slot once */
static void every_slot_once(void) {
    enum { MOST = 3 * FAB_POOL_CHUNK };
    static object *all[MOST];
    CHECK(fab_pool_init(&pool, sizeof(object), MOST) == 0);
    for (uint32_t turn = 0; turn < 3; turn++) {
        for (uint32_t i = 0; i < MOST; i++) {
            all[i] = fab_pool_alloc(&pool);
            CHECK(all[i], "slot %u of %u", i, MOST);
            CHECK(all[i]->owner == 0, "slot %u has two owners", all[i]->slot.index);
            CHECK(fab_pool_at(&pool, all[i]->slot.index) == all[i]);
            all[i]->owner = i + 1;
        }
        CHECK(!fab_pool_alloc(&pool), "more than the maximum");
        for (uint32_t i = 0; i < MOST; i++) {
            CHECK(all[i]->owner == i + 1);
            all[i]->owner = 0;
            fab_pool_free(&pool, all[i]);
        }
    }
    fab_pool_fini(&pool);
}

/* ---- ABA ------------------------------------------------------------------------------------------------
 * One thread has read that slot A is on top and B below it; before its exchange another takes A and B and gives A
 * back: A is on top again, B is taken. Without the tag the exchange succeeds and hands B out twice. So: few slots on the
 * list, taken two at a time, the first given back at once. */

enum { THREADS = 4, KEEP = 3 };
#define TURNS ((uint32_t)LITMUS_ROUNDS(800000))

static object *take(uint64_t me) {
    object *o = fab_pool_alloc(&pool);
    CHECK(o);
    CHECK(o->owner == 0, "slot %u has two owners: %lu and %lu", o->slot.index, (unsigned long)o->owner,
          (unsigned long)me);
    o->owner = me;
    return o;
}

static void give(object *o, uint64_t me) {
    CHECK(o->owner == me, "slot %u was given to %lu as well", o->slot.index, (unsigned long)o->owner);
    o->note = me * 3;
    o->owner = 0;
    fab_pool_free(&pool, o);
}

static void take_and_give(litmus_thread *self) {
    uint64_t me = self->index + 1u;
    for (uint32_t i = 0; i < TURNS; i++) {
        object *first = take(me), *second = take(me);
        give(first, me);
        object *third = i & 1u ? take(me) : NULL;
        give(second, me);
        if (third) give(third, me);
    }
}

static void one_owner_at_a_time(void) {
    CHECK(fab_pool_init(&pool, sizeof(object), FAB_POOL_CHUNK) == 0);
    /* all but a few slots are put aside, so that the list is short and the threads meet on it */
    static object *aside[FAB_POOL_CHUNK];
    uint32_t left = FAB_POOL_CHUNK - THREADS * KEEP;
    for (uint32_t i = 0; i < left; i++) aside[i] = take(99);
    litmus_run(THREADS, take_and_give);
    for (uint32_t i = 0; i < left; i++) give(aside[i], 99);
    for (uint32_t i = 0; i < FAB_POOL_CHUNK; i++) CHECK(fab_pool_alloc(&pool), "slot %u of the list is lost", i);
    CHECK(!fab_pool_alloc(&pool));
    fab_pool_fini(&pool);
}

/* Threads that find the list empty at the same time grow the pool once each time, and lose no chunk */
static _Atomic uint32_t given;
static void grow_together(litmus_thread *self) {
    (void)self;
    for (uint32_t i = 0; i < 2 * FAB_POOL_CHUNK; i++)
        if (fab_pool_alloc(&pool)) atomic_fetch_add_explicit(&given, 1, memory_order_relaxed);
}

static void growth_is_shared(void) {
    for (uint32_t i = 0; i < 20; i++) {
        CHECK(fab_pool_init(&pool, sizeof(object), 4 * FAB_POOL_CHUNK) == 0);
        atomic_store(&given, 0);
        litmus_run(THREADS, grow_together);
        CHECK(atomic_load(&given) == 4 * FAB_POOL_CHUNK, "%u slots", atomic_load(&given));
        fab_pool_fini(&pool);
    }
}

int main(void) {
    handles_go_stale();
    every_slot_once();
    one_owner_at_a_time();
    growth_is_shared();
    return 0;
}
