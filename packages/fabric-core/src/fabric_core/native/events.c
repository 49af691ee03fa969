/* Events for the callback thread: an intrusive stack, newest first, taken whole and turned round.
 *
 * A node is queued at most once at a time, so there is no capacity and nothing can be dropped. Any thread pushes; one
 * thread takes. The taker sleeps on `events_sleeping` and is woken only if it does. */
#include "engine_internal.h"

void fab_event_push(fab_engine *e, fab_event_node *node, uint32_t kind) {
    node->kind = kind;
    fab_event_node *head = atomic_load_explicit(&e->events, memory_order_relaxed);
    do {
        node->next = head;
        /* seq_cst: the push is ordered before the look at `events_sleeping`; the taker sets that and then looks at
         * the stack, so one of the two sees the other */
    } while (
        !atomic_compare_exchange_weak_explicit(&e->events, &head, node, memory_order_seq_cst, memory_order_relaxed));
    if (atomic_load_explicit(&e->events_sleeping, memory_order_seq_cst) &&
        atomic_exchange_explicit(&e->events_sleeping, 0, memory_order_seq_cst))
        fab_futex_wake_all(&e->events_sleeping);
}

void fab_fault(fab_engine *e, int32_t status) {
    atomic_store_explicit(&e->fault_status, status, memory_order_relaxed);
    if (!atomic_exchange_explicit(&e->fault_queued, 1, memory_order_acq_rel))
        fab_event_push(e, &e->fault, FAB_EV_FAULT);
}

void fab_events_stop(fab_engine *e) {
    atomic_store_explicit(&e->events_stop, 1, memory_order_seq_cst);
    if (atomic_exchange_explicit(&e->events_sleeping, 0, memory_order_seq_cst)) fab_futex_wake_all(&e->events_sleeping);
}

static void take_all(fab_engine *e) {
    /* acquire: pairs with the push, so that what the event is about is visible */
    fab_event_node *stack = atomic_exchange_explicit(&e->events, NULL, memory_order_acquire);
    fab_event_node *in_order = NULL;
    while (stack) {
        fab_event_node *next = stack->next;
        stack->next = in_order;
        in_order = stack;
        stack = next;
    }
    e->drained = in_order;
}

static bool translate(fab_engine *e, fab_event_node *node, fab_event *out) {
    memset(out, 0, sizeof *out);
    out->kind = node->kind;
    switch (node->kind) {
    case FAB_EV_TRANSFER: {
        fab_transfer *t = FAB_CONTAINER(node, fab_transfer, event);
        out->id = fab_transfer_handle(t);
        out->status = t->err;
        return true;
    }
    case FAB_EV_EXPECT: {
        fab_waiter *x = FAB_CONTAINER(node, fab_waiter, event);
        out->id = fab_expect_handle(x);
        out->status = x->err;
        return true;
    }
    case FAB_EV_RECV: {
        fab_recv *r = FAB_CONTAINER(node, fab_recv, event);
        out->id = r->pool;
        out->a = (uint64_t)(uintptr_t)r->data;
        out->b = r->len;
        out->c = (uint64_t)(uintptr_t)r;
        return true; /* also of a closed pool: the callback thread decides what becomes of it */
    }
    case FAB_EV_WATCH: {
        fab_watch *w = FAB_CONTAINER(node, fab_watch, event);
        /* queued is cleared before `latest` is read: a change after the read queues the node again */
        atomic_store_explicit(&w->queued, 0, memory_order_seq_cst);
        out->id = (uint64_t)w->id;
        out->a = atomic_load_explicit(&w->taken, memory_order_relaxed);
        out->b = atomic_load_explicit(&w->latest, memory_order_seq_cst);
        atomic_store_explicit(&w->taken, out->b, memory_order_relaxed);
        return out->a != out->b && !atomic_load_explicit(&w->closed, memory_order_acquire);
    }
    case FAB_EV_PEER_LOST: {
        fab_peer *p = FAB_CONTAINER(node, fab_peer, event);
        atomic_store_explicit(&p->event_queued, 0, memory_order_release);
        out->id = (uint64_t)p->group << 32 | p->number;
        return true;
    }
    case FAB_EV_NIC: { /* the flag is cleared first: a change after the status was read queues the node again */
        fab_nic *nic = FAB_CONTAINER(node, fab_nic, event);
        atomic_store_explicit(&nic->event_queued, 0, memory_order_seq_cst);
        out->id = (uint64_t)nic->group << 32 | nic->index;
        out->a = FAB_PEER_NONE;
        out->status = atomic_load_explicit(&nic->status, memory_order_seq_cst);
        return true;
    }
    case FAB_EV_PATH: {
        fab_peer_nic *path = FAB_CONTAINER(node, fab_peer_nic, event);
        atomic_store_explicit(&path->event_queued, 0, memory_order_seq_cst);
        out->kind = FAB_EV_NIC;
        out->id = (uint64_t)path->peer->group << 32 | (uint32_t)(path - path->peer->nic);
        out->a = path->peer->number;
        out->status = atomic_load_explicit(&path->told, memory_order_seq_cst);
        return true;
    }
    case FAB_EV_FAULT:
        atomic_store_explicit(&e->fault_queued, 0, memory_order_release);
        out->status = atomic_load_explicit(&e->fault_status, memory_order_relaxed);
        return true;
    default: return false;
    }
}

int fab_events_wait(fab_engine *e, fab_event *out, uint32_t cap, uint64_t timeout_ns) {
    uint64_t start = fab_now(), spin_until = start + e->cfg.spin_ns, until = start + timeout_ns;
    for (;;) {
        uint32_t n = 0;
        if (!e->drained) take_all(e);
        while (e->drained && n < cap) {
            fab_event_node *node = e->drained;
            e->drained = node->next; /* before translate: the node may be queued anew at once */
            if (translate(e, node, &out[n])) n++;
        }
        if (n) return (int)n;
        if (e->drained) continue;
        if (atomic_load_explicit(&e->events_stop, memory_order_seq_cst)) return -ESHUTDOWN;
        uint64_t now = fab_now();
        if (now >= until) return 0;
        if (now < spin_until) {
            fab_relax();
            continue;
        }
        atomic_store_explicit(&e->events_sleeping, 1, memory_order_seq_cst);
        if (!atomic_load_explicit(&e->events, memory_order_seq_cst) &&
            !atomic_load_explicit(&e->events_stop, memory_order_seq_cst))
            fab_futex_wait(&e->events_sleeping, 1, until - now);
        atomic_store_explicit(&e->events_sleeping, 0, memory_order_seq_cst);
    }
}
