/* Checker "peers": a loss is told in time, to whoever it concerns and at once (C11, R5). Checker "starved": what has a path
 * with room leaves by it (C8, R8). */
#include "sim.h"

#include <inttypes.h>

/* Whether the engine has reason to believe in this link: it is open, or nobody told it otherwise yet. */
static bool believed(const sim_nic *nic, const sim_link *link) {
    if (nic->down && nic->down_told) return false;
    if (nic->down || link->state == SIM_LINK_CONNECTING || link->state == SIM_LINK_UP) return true;
    return link->state == SIM_LINK_DOWN && !link->told;
}

bool sim_any_path(const sim_node *n, uint32_t node, uint32_t inc) {
    for (uint32_t k = 0; k < n->nnics; k++)
        for (uint32_t l = 0; l < n->nic[k].nlinks; l++) {
            const sim_link *link = &n->nic[k].links[l];
            if (link->node == node && link->inc == inc && believed(&n->nic[k], link)) return true;
        }
    return false;
}

/* One that is open, and that the engine has been told of. */
bool sim_sure_path(const sim_node *n, uint32_t node, uint32_t inc) {
    for (uint32_t k = 0; k < n->nnics; k++)
        for (uint32_t l = 0; l < n->nic[k].nlinks && !n->nic[k].down; l++) {
            const sim_link *link = &n->nic[k].links[l];
            if (link->node == node && link->inc == inc && link->state == SIM_LINK_UP && link->told) return true;
        }
    return false;
}

/* After a call in which a link or a NIC was told to be lost: what waits for a peer without a path has ended. */
void sim_check_peers(sim_node *n) {
    sim_world *w = n->world;
    if (fab_ring_ready(&n->engine->groups[0]->ring)) return; /* what is in the ring has not begun */
    for (const sim_op *op = n->ops; op; op = op->next)
        if (!op->at_nic && op->nplaces == 1 && !sim_any_path(n, op->place[0].node, op->place[0].inc))
            sim_fail(w, "peers", "node %u: node %u is lost, and transfer %" PRIu64 " waits for it", n->index,
                     op->place[0].node, op->serial);
    for (const sim_expect *x = n->expects; x; x = x->next)
        if (x->with_peers && x->made < w->now && !sim_any_path(n, x->peer_node, x->peer_inc))
            sim_fail(w, "peers", "node %u: node %u is lost, and an expectation that names it waits", n->index,
                     x->peer_node);
    if (n->ngone && !n->lost_told)
        sim_fail(w, "peers", "node %u: node %u is gone, and no event says so", n->index, n->gone[0].node);
}

/* First contact waits for every path to be up or lost: while one is tried, there is nothing to say. */
static bool room(const sim_node *n, uint32_t node, uint32_t inc) {
    bool found = false;
    for (uint32_t k = 0; k < n->nnics; k++) {
        const sim_nic *nic = &n->nic[k];
        for (uint32_t l = 0; l < nic->nlinks; l++) {
            const sim_link *link = &nic->links[l];
            if (link->node != node || link->inc != inc) continue;
            if (link->state == SIM_LINK_CONNECTING) return false;
            if (link->state != SIM_LINK_UP || !link->told || nic->down) continue;
            if (nic->sq_used >= n->world->opt.send_queue) return false; /* it may be this one's share that waits */
            found = true;
        }
    }
    return found;
}

#define STARVED 40u /* ticks */

void sim_check_starved(sim_node *n) {
    for (sim_op *op = n->ops; op; op = op->next) {
        bool waits = !op->at_nic && op->pin < 0 && op->nplaces == 1 && n->nops < 60 &&
                     room(n, op->place[0].node, op->place[0].inc) && n->world->now > n->awake_since + SIM_TICK_NS;
        op->starved = waits && op->wrs_seen == op->posted ? op->starved + 1 : 0;
        op->wrs_seen = op->posted;
        if (op->starved > STARVED)
            sim_fail(n->world, "starved", "node %u: transfer %" PRIu64 " has a path with room, and is not posted",
                     n->index, op->serial);
    }
}

/* A node that ended is known to be gone after two intervals, at each living NIC that had a link to it. */
void sim_check_lost(sim_world *w) {
    for (uint32_t i = 0; i < w->nnodes; i++) {
        const sim_node *n = &w->nodes[i];
        if (!n->alive || sim_paused(n)) continue;
        for (uint32_t k = 0; k < n->nnics; k++) {
            const sim_nic *nic = &n->nic[k];
            for (uint32_t l = 0; l < nic->nlinks && !nic->down; l++) {
                const sim_link *link = &nic->links[l];
                if (link->state != SIM_LINK_UP) continue;
                const sim_node *to = &w->nodes[link->node];
                if (to->alive && to->inc == link->inc) continue;
                uint64_t since = to->down_since;
                if (since < n->awake_since) since = n->awake_since;
                if (since < nic->stalled_until) since = nic->stalled_until;
                /* a NIC that stalls again and again is forgiven its silence each time: an interval more */
                uint64_t slack =
                    3 * SIM_TICK_NS + 4 * w->opt.step_ns + w->opt.heartbeat_ns / (w->opt.stall_every_ns ? 1 : 4);
                if (w->now > since + 2 * w->opt.heartbeat_ns + slack)
                    sim_fail(w, "peers", "node %u, NIC %u: node %u is gone since %.9f s, and its loss was not told", i,
                             k, link->node, (double)to->down_since / 1e9);
            }
        }
    }
}
