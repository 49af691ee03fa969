/* What goes wrong, and when: each kind of fault comes at random times of its own. */
#include "sim.h"

#include "cdef_sim.h"

static const char *const names[] = {
    [SIM_FAULT_STALL] = "stalls",
    [SIM_FAULT_LINK] = "links cut",
    [SIM_FAULT_NIC] = "NICs lost",
    [SIM_FAULT_CRASH] = "crashes",
    [SIM_FAULT_CLOSE] = "closes",
    [SIM_FAULT_PAUSE] = "pauses",
    [SIM_FAULT_CLOCK] = "clock jumps",
    [SIM_FAULT_CANCEL] = "cancels",
    [SIM_FAULT_DEADLINE] = "deadlines",
    [SIM_FAULT_XCANCEL] = "expectations cancelled",
    [SIM_FAULT_XDEADLINE] = "expectations with a deadline",
    [SIM_FAULT_DEREG] = "registrations renewed",
};

const char *fab_sim_fault_name(uint32_t index) { return index < SIM_FAULTS ? names[index] : NULL; }

static uint64_t every(const sim_options *o, uint32_t which) {
    switch (which) {
    case SIM_FAULT_STALL: return o->stall_every_ns;
    case SIM_FAULT_LINK: return o->link_every_ns;
    case SIM_FAULT_NIC: return o->nic_every_ns;
    case SIM_FAULT_CRASH: return o->crash_every_ns;
    case SIM_FAULT_PAUSE: return o->pause_every_ns;
    case SIM_FAULT_CLOCK: return o->clock_every_ns;
    default: return 0;
    }
}

static void next(sim_world *w, uint32_t which) {
    uint64_t mean = every(&w->opt, which);
    bool enough =
        w->counts.faults[which] > 20 + 2 * w->counts.transfers; /* else a run that waits would only see faults */
    if (enough) mean *= 100;
    if (mean) sim_at(w, w->now + 1 + sim_below(&w->faults, 2 * mean), SIM_EV_FAULT, which, 0);
}

void sim_faults_start(sim_world *w) {
    for (uint32_t i = 0; i < SIM_FAULTS; i++) next(w, i);
}

static sim_node *some_node(sim_world *w) {
    sim_node *n = &w->nodes[sim_below(&w->faults, w->nnodes)];
    return n->alive ? n : NULL;
}

static sim_nic *some_nic(sim_world *w) {
    sim_node *n = some_node(w);
    if (!n) return NULL;
    sim_nic *nic = &n->nic[sim_below(&w->faults, n->nnics)];
    return nic->down || nic->closed ? NULL : nic;
}

static void heal_at(sim_world *w, uint64_t within, uint32_t which, uint32_t whom) {
    sim_at(w, w->now + 1 + sim_below(&w->faults, within), SIM_EV_HEAL, which, whom);
}

static void cut(sim_world *w, sim_nic *nic) {
    uint32_t first = nic->nlinks ? (uint32_t)sim_below(&w->faults, nic->nlinks) : 0;
    for (uint32_t i = 0; i < nic->nlinks; i++) {
        uint32_t at = (first + i) % nic->nlinks;
        const sim_link l = nic->links[at];
        if (l.state != SIM_LINK_UP) continue;
        uint64_t until = w->now + 1 + sim_below(&w->faults, w->opt.down_ns);
        w->cut_until[nic->node->index][nic->index][l.node][l.nic] = until;
        w->cut_until[l.node][l.nic][nic->node->index][nic->index] = until;
        static const int32_t status[] = {-ENETDOWN, -ETIMEDOUT, -EHOSTUNREACH};
        sim_link_down(nic, at, status[sim_below(&w->faults, 3)]);
        w->counts.faults[SIM_FAULT_LINK]++;
        return;
    }
}

/* The NIC is gone: what it held ends, posted receives come back, whoever was linked to it will notice. */
static void lose_nic(sim_world *w, sim_nic *nic) {
    nic->down = 1;
    nic->down_told = 0;
    for (uint32_t i = 0; i < nic->nlinks; i++) {
        if (nic->links[i].state == SIM_LINK_CLOSED) continue;
        nic->links[i].state = SIM_LINK_DOWN;
        nic->links[i].status = -ENETDOWN;
        nic->links[i].out = SIM_NONE;
        sim_cq_forget_link(nic, i);
    }
    sim_contact_stop(nic, false);
    sim_cq_push(nic, &(fab_wc){.kind = FAB_WC_NIC_DOWN, .status = -ENETDOWN, .peer = FAB_PEER_NONE, .count = 1}, NULL);
    sim_net_cut(nic, SIM_NONE, -ENETDOWN);
    for (uint32_t i = 0; i < nic->nrecvs; i++)
        sim_cq_push(
            nic,
            &(fab_wc){
                .kind = FAB_WC_RECV, .id = nic->recvs[i].id, .status = -ENETDOWN, .peer = FAB_PEER_NONE, .count = 1},
            NULL);
    nic->nrecvs = 0;
    if (sim_percent(&w->faults, w->opt.nic_back_percent))
        heal_at(w, w->opt.down_ns, SIM_FAULT_NIC, nic->node->inc << 8 | sim_nic_number(nic));
    w->counts.faults[SIM_FAULT_NIC]++;
}

static void pause_node(sim_world *w, sim_node *n) {
    uint64_t until = w->now + 1 + sim_below(&w->faults, w->opt.pause_ns);
    if (until > n->paused_until) n->paused_until = until;
    n->awake_since = n->paused_until;
    w->counts.faults[SIM_FAULT_PAUSE]++;
}

void sim_fault_event(sim_world *w, uint32_t which) {
    if (w->settling) return;
    sim_nic *nic = some_nic(w);
    sim_node *n = some_node(w);
    sim_note(w, SIM_EV_FAULT, n ? n->index : SIM_NODES, which, nic ? sim_nic_number(nic) : 0);
    switch (which) {
    case SIM_FAULT_STALL:
        if (!nic) break;
        nic->stalled_until = w->now + 1 + sim_below(&w->faults, w->opt.stall_ns);
        sim_at(w, nic->stalled_until, SIM_EV_HEAL, SIM_FAULT_STALL, sim_nic_number(nic));
        w->counts.faults[SIM_FAULT_STALL]++;
        break;
    case SIM_FAULT_LINK:
        if (nic) cut(w, nic);
        break;
    case SIM_FAULT_NIC:
        if (nic) lose_nic(w, nic);
        break;
    case SIM_FAULT_CRASH:
        if (!n || n->paused_until > w->now) break;
        bool crash = !sim_percent(&w->faults, w->opt.close_percent);
        w->counts.faults[crash ? SIM_FAULT_CRASH : SIM_FAULT_CLOSE]++;
        sim_node_end(n, crash);
        heal_at(w, w->opt.down_ns, SIM_FAULT_CRASH, n->index);
        break;
    case SIM_FAULT_PAUSE:
        if (n) pause_node(w, n);
        break;
    case SIM_FAULT_CLOCK:
        w->now += sim_below(&w->faults, w->opt.clock_ns);
        for (uint32_t i = 0; i < w->nnodes; i++)
            if (w->nodes[i].awake_since < w->now) w->nodes[i].awake_since = w->now;
        w->counts.faults[SIM_FAULT_CLOCK]++;
        break;
    default: break;
    }
    next(w, which);
}

void sim_heal_event(sim_world *w, uint32_t which, uint32_t whom) {
    sim_nic *nic;
    switch (which) {
    case SIM_FAULT_STALL:
        nic = sim_nic_at(w, whom);
        if (nic->node->alive) sim_node_wake(nic->node); /* completions and its contact have waited */
        break;
    case SIM_FAULT_NIC:
        nic = sim_nic_at(w, whom & 0xff);
        if (!nic->node->alive || nic->node->inc << 8 != (whom & ~0xffu) || !nic->down || nic->closed) break;
        if (!nic->down_told) { /* the engine learns of the one before the other */
            heal_at(w, w->opt.down_ns, which, whom);
            break;
        }
        nic->down = 0;
        sim_contact_start(nic);
        sim_cq_push(nic, &(fab_wc){.kind = FAB_WC_NIC_UP, .peer = FAB_PEER_NONE, .count = 1}, NULL);
        break;
    case SIM_FAULT_CRASH:
        if (!w->nodes[whom].alive) sim_node_start(&w->nodes[whom]);
        break;
    default: break;
    }
}

/* Calm from now on: what is away comes back in its time, and nothing more goes wrong. */
void sim_faults_stop(sim_world *w) {
    memset(w->cut_until, 0, sizeof w->cut_until);
    for (uint32_t i = 0; i < w->nnodes; i++) {
        sim_node *n = &w->nodes[i];
        if (n->paused_until > w->now + 1000000) n->paused_until = n->awake_since = w->now + 1000000;
        if (!n->alive) continue;
        n->step_at = 0; /* it may have been put off until the end of the pause */
        sim_node_wake(n);
    }
}
