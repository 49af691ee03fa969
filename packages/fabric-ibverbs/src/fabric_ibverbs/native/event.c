/* Asynchronous events of the device: ports and queue pairs that die or come back. */
#include "verbs_int.h"

#define LOOK_NS 100000000ull

static void port_down(fv_dom *d) {
    if (d->down) return;
    d->down = true;
    fab_wc_push(&d->wcq, &(fab_wc){.kind = FAB_WC_NIC_DOWN, .status = -ENETDOWN, .count = 1, .peer = FAB_PEER_NONE});
    for (; d->recv_head != d->recv_tail; d->recv_head++) {
        uint64_t id = d->recvs[d->recv_head & (FV_RECVS - 1)].id;
        fab_wc_push(&d->wcq,
                    &(fab_wc){.kind = FAB_WC_RECV, .id = id, .status = -ENETDOWN, .count = 1, .peer = FAB_PEER_NONE});
    }
}

/* Up: with the address it had, or peers could not find it. */
static void port_look(fv_dom *d) {
    struct ibv_port_attr p;
    if (fv_query_port(d->ctx, (uint8_t)d->cfg.port, &p)) return;
    bool ours = (d->ethernet || p.lid == d->port.lid || p.state != IBV_PORT_ACTIVE) && fv_gid_there(d);
    bool up = ours && p.state == IBV_PORT_ACTIVE;
    if (!up) port_down(d);
    if (!ours) { /* what was made with the address goes with it: the table keeps its place until then */
        fv_links_lose(d, -ENETDOWN);
        fv_dests_thin(d, true);
        fv_dests_stale(d);
    }
    if (!up || !d->down) return;
    d->port = p;
    d->down = false;
    fab_wc_push(&d->wcq, &(fab_wc){.kind = FAB_WC_NIC_UP, .count = 1, .peer = FAB_PEER_NONE});
}

static void queue_pair(fv_dom *d, const struct ibv_async_event *e) {
    fv_qp *q = fv_qp_find(d, e->element.qp->qp_num);
    if (e->element.qp == d->ud) fv_ud_broke(d);
    if (!q || !q->link) return;
    /* A write that we refused breaks the receiving end too: its writer will ask for a new one. The writing end learns
     * of its own errors from completions, which say more. */
    if (e->event_type == IBV_EVENT_QP_FATAL || q->role == FV_M) fv_link_lose(q->link, -ENETDOWN);
}

void fv_events(fv_dom *d) {
    struct ibv_async_event e;
    while (!fv_ibv.get_async_event(d->ctx, &e)) {
        fv_count(d, FV_R_EVENTS, 1);
        switch (e.event_type) {
        case IBV_EVENT_PORT_ERR:
        case IBV_EVENT_PORT_ACTIVE:
        case IBV_EVENT_GID_CHANGE:
        case IBV_EVENT_LID_CHANGE:
            if (e.element.port_num == (int)d->cfg.port) port_look(d);
            break;
        case IBV_EVENT_QP_FATAL:
        case IBV_EVENT_QP_REQ_ERR:
        case IBV_EVENT_QP_ACCESS_ERR: queue_pair(d, &e); break;
        case IBV_EVENT_SRQ_LIMIT_REACHED: fv_srq_low(d, e.element.srq); break;
        case IBV_EVENT_CQ_ERR:
        case IBV_EVENT_SRQ_ERR:
        case IBV_EVENT_DEVICE_FATAL: d->broken = true; break;
        default: break;
        }
        fv_ibv.ack_async_event(&e);
    }
    if (d->down && d->now / LOOK_NS != (d->now - FV_EVENTS_NS) / LOOK_NS)
        port_look(d); /* an event may have been missed */
}
