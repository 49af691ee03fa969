/* Links between two NICs as the engine's peer numbers name them. Addresses are NODE.NIC#INCARNATION in hexadecimal. */
#include "sim.h"

#include <inttypes.h>
#include <stdio.h>

/* An address that is open already: another incarnation lives at it, or did. Only one of the two can be the living one. */
static bool older_gives_way(sim_nic *nic, uint32_t node, uint32_t index, uint32_t inc) {
    for (uint32_t i = 0; i < nic->nlinks; i++) {
        const sim_link *l = &nic->links[i];
        if (l->out == SIM_NONE || l->node != node || l->nic != index) continue;
        if (l->inc >= inc) return false;
        if (l->state == SIM_LINK_CONNECTING || l->state == SIM_LINK_UP) sim_link_down(nic, i, -ESTALE);
        else sim_link_forget(nic, i);
    }
    return true;
}

int sim_link_open(sim_nic *nic, const char *addr, size_t len, uint32_t *peer) {
    sim_world *w = nic->node->world;
    char text[64], *end;
    if (len >= sizeof text) return -EINVAL;
    memcpy(text, addr, len);
    text[len] = 0;
    uint32_t node = (uint32_t)strtoul(text, &end, 16), index = 0, inc = 0; /* NODE.NIC#INCARNATION */
    if (*end == '.') index = (uint32_t)strtoul(end + 1, &end, 16);
    if (*end == '#') inc = (uint32_t)strtoul(end + 1, &end, 16);
    if (*end || !inc || node >= w->nnodes || index >= FAB_MAX_NICS) return -EINVAL;
    if (nic->nlinks == nic->links_cap) {
        nic->links_cap = nic->links_cap ? 2 * nic->links_cap : 16;
        nic->links = realloc(nic->links, nic->links_cap * sizeof *nic->links);
        if (!nic->links) abort();
    }
    uint32_t to = node * FAB_MAX_NICS + index;
    bool first = older_gives_way(nic, node, index, inc);
    int out = first ? fab_contact_open(nic->contact, &to, sizeof to, inc, "qp", 2, w->now) : -ESTALE;
    if (out == -ENOSPC) return out;
    *peer = nic->nlinks++;
    nic->links[*peer] =
        (sim_link){.node = node, .nic = index, .inc = inc, .state = SIM_LINK_CONNECTING, .out = SIM_NONE};
    if (out < 0) sim_link_down(nic, *peer, -ESTALE);
    else nic->links[*peer].out = (uint32_t)out;
    sim_contact_poll(nic);
    return 0;
}

void sim_link_forget(sim_nic *nic, uint32_t link) {
    uint32_t out = nic->links[link].out;
    nic->links[link].out = SIM_NONE;
    if (out != SIM_NONE && nic->contact) fab_contact_close(nic->contact, out, nic->node->world->now);
}

void sim_link_down(sim_nic *nic, uint32_t link, int32_t status) {
    sim_link *l = &nic->links[link];
    l->state = SIM_LINK_DOWN;
    l->told = 0;
    l->status = status;
    sim_link_forget(nic, link);
    nic->node->world->counts.lost_peers++;
    sim_cq_push(nic, &(fab_wc){.kind = FAB_WC_PEER_DOWN, .peer = link, .status = status, .count = 1}, NULL);
    sim_net_cut(nic, link, status);
}

void sim_link_close(sim_nic *nic, uint32_t link) {
    sim_link *l = &nic->links[link];
    if (l->state == SIM_LINK_CLOSED) {
        sim_fail(nic->node->world, "credit", "node %u closes link %u of NIC %u twice", nic->node->index, link,
                 nic->index);
        return;
    }
    int32_t status = l->state == SIM_LINK_DOWN ? l->status : -ECANCELED;
    l->state = SIM_LINK_CLOSED;
    sim_link_forget(nic, link);
    sim_cq_forget_link(nic, link);
    sim_net_cut(nic, link, status);
}
