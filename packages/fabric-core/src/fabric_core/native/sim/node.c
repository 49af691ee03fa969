/* A node: one incarnation of an engine, stepped by events, looked at by the checkers after every call into it. */
#include "sim.h"

#include <inttypes.h>
#include <stdio.h>
#include <sys/mman.h>

void sim_node_start(sim_node *n) {
    sim_world *w = n->world;
    const sim_options *o = &w->opt;
    n->inc++;
    if (!n->arena) {
        n->arena = mmap(NULL, SIM_ARENA, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (n->arena == MAP_FAILED) abort();
        n->boxes = calloc(o->imm_slots, sizeof *n->boxes);
        n->dirty_boxes = calloc(o->imm_slots, sizeof *n->dirty_boxes);
    }
    sim_regions_reset(n);
    memset(n->boxes, 0, o->imm_slots * sizeof *n->boxes);
    n->ndirty_boxes = 0;
    n->strays = n->ended = n->messages = n->messages_seen = 0;
    n->nheld = n->nops = 0;
    for (uint32_t i = 0; i < n->bound_cap; i++) n->bound[i].op = SIM_NONE; /* a new engine's handles begin anew */
    for (uint32_t i = 0; i < n->xbound_cap; i++) n->xbound[i].op = SIM_NONE;
    n->tick = 0;
    n->path_down = 0;
    n->peer_lost = n->look_all = n->in_vain = n->lost_told = n->paths_changed = 0;
    n->ngone = 0;
    memset(n->view, 0, sizeof n->view);
    fab_engine_cfg cfg = {.imm_slots = (uint32_t)o->imm_slots,
                          .max_inflight = (uint32_t)o->max_inflight,
                          .max_peers = 1024,
                          .timeout_ns = o->timeout_ns,
                          .inline_bytes = o->inline_bytes,
                          .shard_bytes = o->shard_bytes,
                          .clock = &w->now};
    uint64_t ops[FAB_MAX_NICS], ctx[FAB_MAX_NICS], cpus[16] = {0};
    for (uint32_t i = 0; i < n->nnics; i++) {
        sim_nic *nic = &n->nic[i];
        sim_mr *mrs = nic->mrs;
        nic->node = n;
        nic->index = i;
        nic->down = nic->closed = 0;
        nic->stalled_until = nic->sq_used = nic->cq_count = nic->nlinks = nic->nrecvs = 0;
        for (uint32_t k = 0; k < SIM_MRS; k++) mrs[k].live = 0; /* generations go on: old keys stay invalid */
        if (!nic->recvs) nic->recvs = calloc(o->receive_queue, sizeof *nic->recvs);
        nic->links_seen = 0;
        sim_contact_start(nic);
        ops[i] = (uint64_t)(uintptr_t)&sim_ops;
        ctx[i] = (uint64_t)(uintptr_t)nic;
    }
    n->engine = fab_engine_new(&cfg);
    if (!n->engine || fab_group_open(n->engine, n->nnics, ops, ctx, cpus, 0) != 0) abort();
    n->alive = 1;
    n->closing = 0;
    n->step_at = n->paused_until = 0;
    n->awake_since = w->now;
    n->old_memory = 0;
    for (uint32_t i = 0; i < SIM_COMMON; i++) { /* a fresh engine's first: the same at every node */
        int64_t imm = fab_imm_alloc(n->engine);
        if (imm != i) sim_fail(w, "immediates", "a fresh engine's immediate %u is %" PRId64, i, imm);
        n->boxes[i] = (sim_box){.imm = i, .in_use = 1};
    }
    sim_node_register(n);
    if (o->send_percent) fab_recvs_add(n->engine, 0, 1, 1024, (uint32_t)(o->receive_queue + 2));
    sim_at(w, w->now + SIM_TICK_NS, SIM_EV_TICK, n->index, n->inc);
    sim_node_after(n);
}

void sim_node_register(sim_node *n) {
    fab_mr mr = {.addr = (uint64_t)(uintptr_t)n->arena, .len = SIM_ARENA, .access = FAB_ACCESS_REMOTE_WRITE, .fd = -1};
    n->memory = fab_mem_reg(n->engine, 0, &mr, n->keys);
    if (n->memory < 0) sim_fail(n->world, "bounds", "registering memory: %" PRId64, n->memory);
    n->mr_gen++;
}

/* The old registration goes once no transfer of ours uses it. Those of peers that still name it fail (-EKEYREVOKED). */
void sim_node_revoke(sim_node *n) {
    uint64_t memory = (uint64_t)n->old_memory;
    const fab_local *local = fab_pool_at(&n->engine->locals, (uint32_t)memory);
    bool used = atomic_load_explicit(&((fab_local *)local)->users, memory_order_relaxed) != 0;
    int rc = fab_mem_dereg(n->engine, memory, 0);
    if (rc == 0) n->old_memory = 0;
    else if (rc != -EBUSY || !used) /* it may only be refused while it is in use */
        sim_fail(n->world, "bounds", "node %u: revoking a registration that nothing uses: %d", n->index, rc);
    sim_node_after(n);
}

void sim_node_renew(sim_node *n) {
    if (n->old_memory) return;
    n->world->counts.faults[SIM_FAULT_DEREG]++;
    n->old_memory = n->memory;
    sim_node_register(n);
    sim_node_revoke(n);
}

/* What this node knows of another one: as if a descriptor had been handed over. NULL: nothing that could be used. */
sim_view *sim_node_view(sim_node *n, uint32_t other) {
    sim_view *v = &n->view[other];
    const sim_node *to = &n->world->nodes[other];
    if (to->alive && (v->inc != to->inc || v->mr_gen != to->mr_gen)) {
        if (v->inc) fab_remote_drop(n->engine, (uint64_t)v->remote);
        if (v->inc != to->inc) {
            char text[FAB_MAX_NICS][32];
            const char *addrs[FAB_MAX_NICS];
            for (uint32_t i = 0; i < to->nnics; i++) {
                fab_group_address(to->engine, 0, i, text[i], sizeof text[i]);
                addrs[i] = text[i];
            }
            v->peer = fab_peer_add(n->engine, 0, to->nnics, addrs);
            if (v->peer < 0) sim_fail(n->world, "peers", "adding a peer: %" PRId64, v->peer);
        }
        uint64_t keys[FAB_MAX_NICS], bases[FAB_MAX_NICS];
        for (uint32_t i = 0; i < to->nnics; i++) {
            keys[i] = to->keys[i].remote_key;
            bases[i] = to->keys[i].remote_base;
        }
        v->remote =
            fab_remote_add(n->engine, 0, (uint32_t)v->peer, SIM_ARENA, FAB_ACCESS_REMOTE_WRITE, to->nnics, keys, bases);
        if (v->remote < 0) sim_fail(n->world, "bounds", "adding a descriptor: %" PRId64, v->remote);
        v->inc = to->inc;
        v->mr_gen = to->mr_gen;
    }
    return v->inc && v->inc == to->inc ? v : NULL; /* it may have come and gone before a descriptor got here */
}

/* ---- stepping ------------------------------------------------------------------------------------------- */

static void wake_within(sim_node *n, uint64_t ns) {
    sim_world *w = n->world;
    if (!n->alive || (n->step_at && n->step_at <= w->now + ns)) return;
    n->step_at = w->now + 1 + sim_below(&w->net, ns);
    if (n->step_at < n->cpu.until) n->step_at = n->cpu.until; /* still at what it has begun */
    if (n->step_at < n->paused_until) n->step_at = n->paused_until + 1;
    sim_at(w, n->step_at, SIM_EV_STEP, n->index, n->inc);
}

void sim_node_wake(sim_node *n) { wake_within(n, n->world->opt.step_ns); }

void sim_node_step(sim_node *n, uint64_t at) {
    sim_world *w = n->world;
    if (!n->alive || n->step_at != at) return; /* superseded */
    n->step_at = 0;
    if (sim_paused(n)) {
        sim_node_wake(n);
        return;
    }
    w->counts.steps++;
    fab_group *g = n->engine->groups[0];
    if (!fab_group_try(g)) {
        sim_fail(w, "terminal", "node %u: the group's lock was left taken", n->index);
        return;
    }
    fab_step(g, w->now);
    fab_group_unlock(g);
    sim_node_after(n);
}

void sim_node_tick(sim_node *n, uint32_t inc) {
    if (!n->alive || n->inc != inc) return;
    if (!sim_paused(n)) {
        n->look_all = 1; /* an expectation may have ended since the last look in this tick */
        sim_node_after(n);
        sim_check_late(n);
        sim_check_starved(n);
    }
    if (n->old_memory) sim_node_revoke(n);
    if (atomic_load_explicit(&n->engine->groups[0]->ntimers, memory_order_relaxed)) sim_node_wake(n);
    sim_at(n->world, n->world->now + SIM_TICK_NS, SIM_EV_TICK, n->index, inc);
}

/* ---- after every call ------------------------------------------------------------------------------------- */

void sim_op_dirty(sim_node *n, sim_op *op) {
    if (op->dirty || op->state != SIM_OP_LIVE) return;
    op->dirty = 1;
    op->next_dirty = n->dirty_ops;
    n->dirty_ops = op;
}

static void take_events(sim_node *n) {
    fab_engine *e = n->engine;
    while (e->drained || atomic_load_explicit(&e->events, memory_order_relaxed)) {
        fab_event ev[32];
        int count = fab_events_wait(e, ev, 32, 0);
        if (count <= 0) break;
        for (int i = 0; i < count; i++) {
            uint32_t index = (uint32_t)ev[i].id & 0xffffffu;
            switch (ev[i].kind) {
            case FAB_EV_TRANSFER:
                if (index >= n->bound_cap || n->bound[index].handle != ev[i].id || n->bound[index].op == SIM_NONE) {
                    sim_fail(n->world, "terminal", "node %u: an event of a transfer that nobody knows", n->index);
                    return;
                }
                sim_op *op = sim_slab_at(&n->world->ops, n->bound[index].op);
                op->events++;
                sim_op_dirty(n, op);
                break;
            case FAB_EV_EXPECT:
                if (index >= n->xbound_cap || n->xbound[index].handle != ev[i].id || n->xbound[index].op == SIM_NONE) {
                    sim_fail(n->world, "terminal", "node %u: an event of an expectation that nobody knows", n->index);
                    return;
                }
                ((sim_expect *)sim_slab_at(&n->world->expects, n->xbound[index].op))->events++;
                break;
            case FAB_EV_RECV: sim_check_message(n, &ev[i]); break;
            case FAB_EV_PEER_LOST:
                if (!n->path_down)
                    sim_fail(n->world, "peers", "node %u is told that a peer is lost, and no path was", n->index);
                n->peer_lost = n->lost_told = 1;
                break;
            default: break;
            }
        }
    }
}

static void look(sim_node *n, sim_op *op) {
    int32_t phase, err = 0;
    op->err_peer = FAB_PEER_NONE;
    if (op->early_release) { /* nobody can ask any more: its flag tells */
        uint64_t word = op->flag;
        phase = !word ? FAB_PENDING : word >> 32 ? FAB_FAILED : FAB_DONE;
    } else {
        fab_outcome out;
        if (fab_transfer_outcome(n->engine, op->handle, &out)) {
            sim_fail(n->world, "terminal", "node %u: transfer %" PRIu64 " is not known to its engine", n->index,
                     op->serial);
            return;
        }
        phase = (int32_t)out.phase;
        err = out.err;
        op->err_peer = out.peer;
    }
    if (phase != FAB_PENDING) sim_op_ended(n, op, phase, err);
}

static uint64_t engine_ended(const sim_node *n) {
    const fab_counters *s = &n->engine->groups[0]->stats;
    return atomic_load_explicit(&s->done, memory_order_relaxed) +
           atomic_load_explicit(&s->failed, memory_order_relaxed) +
           atomic_load_explicit(&s->cancelled, memory_order_relaxed);
}

void sim_node_after(sim_node *n) {
    sim_world *w = n->world;
    if (w->failed) return;
    take_events(n);
    if (n->messages_seen < n->messages && !n->closing)
        sim_fail(w, "terminal", "node %u: %" PRIu64 " messages came, %" PRIu64 " were told", n->index, n->messages,
                 n->messages_seen);
    sim_check_boxes(n);
    while (n->dirty_ops) {
        sim_op *op = n->dirty_ops;
        n->dirty_ops = op->next_dirty;
        op->dirty = 0;
        if (op->state == SIM_OP_LIVE) look(n, op);
    }
    if (engine_ended(n) != n->ended)
        for (sim_op *op = n->ops, *next; op; op = next) {
            next = op->next;
            look(n, op);
        }
    if (engine_ended(n) != n->ended)
        sim_fail(w, "terminal", "node %u: its engine says that %" PRIu64 " transfers ended, %" PRIu64 " were seen to",
                 n->index, engine_ended(n), n->ended);
    uint64_t tick = w->now / SIM_TICK_NS;
    if (tick != n->tick || n->peer_lost || n->look_all) {
        n->tick = tick;
        n->peer_lost = n->look_all = 0;
        sim_check_expects(n);
    }
    if (n->paths_changed && !n->closing) sim_check_peers(n);
    n->paths_changed = n->lost_told = 0;
    n->ngone = 0;
    fab_group *g = n->engine->groups[0];
    if (n->step_at) return;
    if (fab_ring_ready(&g->ring)) {
        sim_node_wake(n);
    } else if (!fab_list_empty(
                   &g->active)) { /* full, or not all was taken: once more, less often while it is in vain */
        wake_within(n, (w->opt.step_ns + (w->opt.latency_ns + w->opt.jitter_ns) / 4) << n->in_vain);
        if (n->in_vain < 12) n->in_vain++;
    }
}

/* ---- ending ------------------------------------------------------------------------------------------------ */

void sim_node_end(sim_node *n, bool crash) {
    sim_world *w = n->world;
    n->closing = !crash;
    n->step_at = 0;
    if (crash) { /* nobody is left to see how its operations end */
        n->alive = 0;
        for (sim_op *op = n->ops, *next; op; op = next) {
            next = op->next;
            sim_op_dead(op, w);
        }
    }
    fab_engine_close(n->engine, 0);
    if (!crash) {
        n->look_all = 1;
        sim_node_after(n);
        if (n->ops && !w->failed)
            sim_fail(w, "terminal", "node %u: transfer %" PRIu64 " has no end after its engine was closed", n->index,
                     n->ops->serial);
        sim_check_node_quiet(n);
    }
    n->alive = 0;
    for (sim_expect *x = n->expects, *next; x; x = next) {
        next = x->next;
        if (!crash && !w->failed) sim_fail(w, "terminal", "node %u: an expectation has no end after close", n->index);
        sim_expect_ended(n, x, FAB_CANCELLED, -ECANCELED);
    }
    n->dirty_ops = NULL;
    fab_engine_free(n->engine);
    n->engine = NULL;
    n->down_since = w->now;
}

void sim_node_fini(sim_node *n) {
    if (n->engine) {
        fab_engine_close(n->engine, 0);
        fab_engine_free(n->engine);
    }
    for (uint32_t i = 0; i < FAB_MAX_NICS; i++) {
        free(n->nic[i].cq);
        free(n->nic[i].links);
        free(n->nic[i].recvs);
        free(n->nic[i].inbox);
    }
    sim_slab_fini(&n->regions);
    if (n->arena) munmap(n->arena, SIM_ARENA);
    free(n->boxes);
    free(n->dirty_boxes);
    free(n->bound);
    free(n->xbound);
}
