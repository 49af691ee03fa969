/* Deadlines: a wheel of lists. Adding and removing is a few pointer writes; an entry further away than one turn stays
 * in its list and is looked at once per turn. Deadlines are met to within a tick (4 ms) of the worker's look. */
#include "engine_internal.h"

void fab_timers_init(fab_group *g, uint64_t now) {
    for (uint32_t i = 0; i < FAB_WHEEL; i++) fab_list_init(&g->wheel[i]);
    g->tick = now / FAB_TICK_NS;
}

void fab_timer_add(fab_group *g, fab_timer *timer, uint32_t kind, uint64_t deadline) {
    uint64_t tick = deadline / FAB_TICK_NS + 1; /* rounded up: never early */
    if (tick <= g->tick) tick = g->tick + 1;
    timer->kind = kind;
    timer->deadline = deadline;
    fab_list_append(&g->wheel[tick % FAB_WHEEL], &timer->link);
    atomic_fetch_add_explicit(&g->ntimers, 1, memory_order_seq_cst);
}

void fab_timer_remove(fab_group *g, fab_timer *timer) {
    if (!fab_linked(&timer->link)) return;
    fab_list_remove(&timer->link);
    atomic_fetch_sub_explicit(&g->ntimers, 1, memory_order_relaxed);
}

static void expire(fab_group *g, fab_timer *timer, uint64_t now) {
    if (timer->kind == FAB_TIMER_TRANSFER) fab_transfer_expire(g, FAB_CONTAINER(timer, fab_transfer, timer), now);
    else fab_expect_expire(g->engine, FAB_CONTAINER(timer, fab_waiter, timer));
}

uint32_t fab_timers_run(fab_group *g, uint64_t now) {
    uint64_t target = now / FAB_TICK_NS;
    uint32_t fired = 0;
    if (target - g->tick > FAB_WHEEL && target > g->tick) g->tick = target - FAB_WHEEL; /* one turn sees every list */
    while (g->tick < target) {
        g->tick++;
        fab_link *head = &g->wheel[g->tick % FAB_WHEEL];
        if (fab_list_empty(head)) continue;
        /* Taken off as a whole, then one by one from the front: an expiry may end other transfers, and so take any other
         * timer out of either list. */
        fab_link batch = *head;
        batch.next->prev = batch.prev->next = &batch;
        fab_list_init(head);
        while (!fab_list_empty(&batch)) {
            fab_timer *timer = FAB_CONTAINER(batch.next, fab_timer, link);
            if (timer->deadline > now) { /* a later turn of the wheel */
                fab_list_remove(&timer->link);
                fab_list_append(head, &timer->link);
                continue;
            }
            fab_timer_remove(g, timer);
            expire(g, timer, now);
            fired++;
        }
    }
    return fired;
}
