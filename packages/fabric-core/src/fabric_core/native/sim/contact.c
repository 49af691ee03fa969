/* First contact, heartbeat and farewell of a NIC: the engine's own protocol (fabric/contact.h), over datagrams that are lost,
 * doubled, spoilt, late and replayed. It runs where a backend runs it, in poll: a process that stands still is silent. */
#include "sim.h"

static const char secret[] = "the simulator's own secret, known to all of its nodes";

static sim_link *link_of(sim_nic *nic, uint32_t out, uint32_t *number) {
    for (uint32_t i = nic->nlinks; i-- > 0;)
        if (nic->links[i].out == out) {
            *number = i;
            return &nic->links[i];
        }
    return NULL;
}

static void send_datagram(void *ctx, const void *addr, uint32_t addr_len, const void *msg, uint32_t len) {
    const sim_nic *nic = ctx;
    sim_world *w = nic->node->world;
    const sim_options *o = &w->opt;
    uint32_t copies = 1 + sim_permille(&w->net, w->settling ? 0 : o->datagram_twice_permille);
    bool replayed = !w->settling && sim_permille(&w->net, o->datagram_replay_permille);
    if (!w->settling && sim_permille(&w->net, o->datagram_loss_permille)) copies = 0;
    for (uint32_t i = 0; i < copies + replayed; i++) {
        sim_datagram *d = sim_slab_take(&w->datagrams);
        d->from = sim_nic_number(nic);
        memcpy(&d->to, addr, addr_len < sizeof d->to ? addr_len : sizeof d->to);
        d->len = len;
        memcpy(d->bytes, msg, len);
        if (!w->settling && sim_permille(&w->net, o->datagram_flip_permille))
            d->bytes[sim_below(&w->net, len)] ^= (uint8_t)(1u << sim_below(&w->net, 8));
        uint64_t at = w->now + 1 + sim_below(&w->net, o->datagram_ns);
        if (i == copies) at += sim_below(&w->net, 4 * o->heartbeat_ns);
        sim_at(w, at, SIM_EV_DATAGRAM, d->slot.index, d->slot.gen);
    }
}

static int accept_peer(void *ctx, uint32_t in, const void *addr, uint32_t addr_len, const void *body, uint32_t len,
                       void *reply, uint32_t cap) {
    sim_nic *nic = ctx;
    (void)in, (void)addr, (void)addr_len;
    if (len != 2 || memcmp(body, "qp", 2) != 0 || cap < 2)
        sim_fail(nic->node->world, "peers", "node %u: first contact with a spoilt body", nic->node->index);
    memcpy(reply, "ok", 2);
    return 2;
}

static void up(void *ctx, uint32_t out, const void *body, uint32_t len) {
    sim_nic *nic = ctx;
    uint32_t number;
    sim_link *l = link_of(nic, out, &number);
    if (!l || l->state != SIM_LINK_CONNECTING || len != 2 || memcmp(body, "ok", 2) != 0) {
        sim_fail(nic->node->world, "peers", "node %u: NIC %u has contact to nobody", nic->node->index, nic->index);
        return;
    }
    l->state = SIM_LINK_UP;
    l->told = 0;
    sim_cq_push(nic, &(fab_wc){.kind = FAB_WC_PEER_UP, .peer = number, .count = 1}, NULL);
}

static void down(void *ctx, uint32_t out, int32_t status) {
    sim_nic *nic = ctx;
    uint32_t number;
    const sim_link *l = link_of(nic, out, &number);
    if (!l || (l->state != SIM_LINK_CONNECTING && l->state != SIM_LINK_UP))
        sim_fail(nic->node->world, "peers", "node %u: NIC %u lost nobody", nic->node->index, nic->index);
    else sim_link_down(nic, number, status);
}

static void gone(void *ctx, uint32_t in, int32_t status) { (void)ctx, (void)in, (void)status; }

void sim_contact_start(sim_nic *nic) {
    sim_world *w = nic->node->world;
    uint32_t self = sim_nic_number(nic);
    uint64_t seed = sim_mix(w->seed ^ sim_mix((uint64_t)self << 32 | ++nic->contacts));
    fab_contact_cfg cfg = {.incarnation = nic->node->inc,
                           .interval_ns = w->opt.heartbeat_ns,
                           .connect_ns = w->opt.connect_ns,
                           .seed = seed ? seed : 1,
                           .secret = secret,
                           .secret_len = sizeof secret - 1,
                           .self = &self,
                           .self_len = sizeof self,
                           .max_out = 128,
                           .max_in = 128,
                           .ctx = nic,
                           .send = send_datagram,
                           .accept = accept_peer,
                           .up = up,
                           .down = down,
                           .gone = gone};
    nic->contact = fab_contact_new(&cfg);
    if (!nic->contact) abort();
    nic->contact_at = 0;
}

void sim_contact_stop(sim_nic *nic, bool farewell) {
    sim_world *w = nic->node->world;
    if (!nic->contact) return;
    if (farewell) fab_contact_farewell(nic->contact);
    fab_contact_free(nic->contact);
    nic->contact = NULL;
    while (nic->ninbox) sim_slab_give(&w->datagrams, sim_slab_at(&w->datagrams, nic->inbox[--nic->ninbox]));
}

void sim_contact_poll(sim_nic *nic) {
    sim_world *w = nic->node->world;
    if (!nic->contact) return;
    uint32_t n = nic->ninbox;
    if (!n && nic->contact_at > w->now && nic->links_seen == nic->nlinks) return; /* nothing came, nothing is due */
    nic->links_seen = nic->nlinks;
    for (uint32_t i = 0; i < n; i++) {
        sim_datagram *d = sim_slab_at(&w->datagrams, nic->inbox[i]);
        fab_contact_datagram(nic->contact, &d->from, sizeof d->from, d->bytes, d->len, w->now);
        sim_slab_give(&w->datagrams, d);
    }
    nic->ninbox = 0;
    uint64_t at = fab_contact_run(nic->contact, w->now);
    if (at == nic->contact_at) return;
    nic->contact_at = at;
    if (at != UINT64_MAX) sim_at(w, at > w->now ? at : w->now + 1, SIM_EV_CONTACT, sim_nic_number(nic), nic->node->inc);
}

void sim_contact_due(sim_world *w, uint32_t number, uint32_t inc) {
    const sim_nic *nic = sim_nic_at(w, number);
    if (nic->node->alive && nic->node->inc == inc && nic->contact && nic->contact_at <= w->now)
        sim_node_wake(nic->node);
}

void sim_datagram_event(sim_world *w, uint32_t index, uint32_t gen) {
    sim_datagram *d = sim_slab_get(&w->datagrams, index, gen);
    if (!d) return;
    sim_nic *to = sim_nic_at(w, d->to);
    const sim_nic *from = sim_nic_at(w, d->from);
    bool cut =
        w->cut_until[d->from / FAB_MAX_NICS][d->from % FAB_MAX_NICS][d->to / FAB_MAX_NICS][d->to % FAB_MAX_NICS] >
        w->now;
    if (cut || !to->contact || !to->node->alive || to->down || from->down || to->ninbox >= 256) { /* lost */
        sim_slab_give(&w->datagrams, d);
        return;
    }
    if (to->ninbox == to->inbox_cap) {
        to->inbox_cap = to->inbox_cap ? 2 * to->inbox_cap : 16;
        to->inbox = realloc(to->inbox, to->inbox_cap * sizeof *to->inbox);
        if (!to->inbox) abort();
    }
    to->inbox[to->ninbox++] = index;
    sim_node_wake(to->node);
}
