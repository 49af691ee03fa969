/* What rings is served, whichever thread is in one of our calls at that moment. Built with thread.c in it: the two halves of a
 * ring are apart here, as they are if its thread loses the processor between them.
 * usage: test_rings [seed] */
#include "thread.c"

#include "moe_check.h"

static const fab_native_table table = {.version = 1,
                                       .struct_size = sizeof table}; /* no step begins: nothing is called */

static moe_rank *opened(void) {
    moe_shape shape = {.api = (uint64_t)(uintptr_t)&table, .shared = 1, .ranks = 1, .depth = 2};
    moe_rank *made =
        moe_rank_new(&shape, (uint64_t[]){0}, (uint8_t[]){1}, (uint32_t[2 * MOE_KINDS]){0}, (uint32_t[]){0, 0});
    CHECK(made);
    return made;
}

static bool rung(moe_rank *r) { return atomic_load(&r->slots[0].credit.rung); }

static void asleep(void) {
    struct timespec pause = {0, 100000};
    while (!atomic_load(&proxy.sleeping)) nanosleep(&pause, NULL);
}

/* moe_ring, up to where it asks for helpers. */
static void first_half(moe_bell *b) {
    atomic_store(&b->rung, 1);
    atomic_fetch_add(&proxy.rings, 1);
}

int main(void) {
    moe_rank *r = opened();
    moe_bell *bell = &r->slots[0].credit;
    struct timespec pause = {0, 100000};

    asleep();
    moe_ring(bell); /* nobody helps: the thread does */
    while (rung(r)) nanosleep(&pause, NULL);

    asleep();
    moe_help_begin();
    moe_ring(bell); /* the helper does, on its way out */
    moe_help_end();
    CHECK(!rung(r));

    asleep();
    first_half(bell);
    moe_help_begin(); /* it begins in between */
    CHECK(atomic_load(&proxy.helpers)); /* so the second half wakes nobody */
    moe_help_end();
    CHECK(!rung(r));

    moe_help_begin();
    moe_help_begin();
    moe_ring(bell); /* two helpers: the first one that leaves */
    moe_help_end();
    CHECK(!rung(r));
    moe_help_end();

    pthread_mutex_lock(&r->lock); /* the rank's own thread is at work: whoever looks leaves it to the thread */
    moe_help_begin();
    moe_ring(bell);
    moe_help_end();
    CHECK(rung(r));
    pthread_mutex_unlock(&r->lock);
    while (rung(r)) nanosleep(&pause, NULL);

    moe_rank_stop(r);
    moe_rank_free(r);
    puts("ok");
    return 0;
}
