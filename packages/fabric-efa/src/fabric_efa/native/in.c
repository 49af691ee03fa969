/* Datagrams that came, each to whom it concerns. Nothing of one is believed before its session was compared (C12). */
#include "efa_int.h"

static void from_initiator(fe_dom *d, const fe_hdr *h, const uint8_t *rest, uint32_t len) {
    fe_in *in = h->link < d->max_peers ? d->ins[h->link] : NULL;
    if (!in || in->mine != h->session) {
        fe_count(d, FE_R_SESSION);
        return;
    }
    d->capi->heard_in(d->contact, h->link, d->now);
    switch (h->type) {
    case FE_T_MSG: fe_in_message(d, h->link, h, rest, len); break;
    case FE_T_WITHDRAW: fe_in_withdraw(d, h->link, h); break;
    case FE_T_ALIVE: fe_in_alive(d, h->link, h); break;
    case FE_T_ASK: fe_mr_asked(d, h->link, h); break;
    default: fe_mr_ended(d, h->link, h->a); break;
    }
}

static void from_responder(fe_dom *d, const fe_hdr *h, const uint8_t *rest, uint32_t len) {
    fe_peer *p = h->link < d->npeers ? d->peers[h->link] : NULL;
    if (!p || p->mine != h->session || p->state != FE_UP) {
        fe_count(d, FE_R_SESSION);
        return;
    }
    d->capi->heard(d->contact, p->out, d->now);
    if (h->type == FE_T_TAKEN) fe_taken(p, h);
    else if (h->type == FE_T_REVOKE) fe_lease_revoked(p, h->a);
    else if (h->type == FE_T_CHECK) {
        fe_hdr a = {.magic = FE_MAGIC, .type = FE_T_ALIVE, .session = p->theirs, .link = p->their_link, .a = h->a};
        fe_tell(d, &p->chan, &a, NULL, 0);
    } else {
        fe_grant g;
        if (len == sizeof g) memcpy(&g, rest, sizeof g);
        fe_lease_granted(p, h, len == sizeof g ? &g : NULL);
    }
}

static void one(fe_dom *d, const uint8_t *data, uint32_t len) {
    fe_hdr h;
    memcpy(&h, data, sizeof h);
    const uint8_t *rest = data + sizeof h;
    len -= (uint32_t)sizeof h;
    if (h.magic != FE_MAGIC || !h.type || h.type >= FE_T_COUNT) {
        fe_count(d, FE_R_MALFORMED);
        return;
    }
    if (h.type == FE_T_CONTACT) {
        if (!h.from_len || h.from_len > FAB_CONTACT_ADDR || h.from_len >= len) fe_count(d, FE_R_MALFORMED);
        else if (d->capi->datagram(d->contact, rest, h.from_len, rest + h.from_len, len - h.from_len, d->now) ==
                 -EACCES)
            fe_count(d, FE_R_AUTH);
        return;
    }
    if (h.type <= FE_T_ALIVE) from_initiator(d, &h, rest, len);
    else from_responder(d, &h, rest, len);
}

void fe_inbox_run(fe_dom *d) {
    while (!fe_list_empty(&d->inbox)) {
        fe_buf *b = FE_OF(d->inbox.next, fe_buf, node);
        fe_list_del(&b->node);
        one(d, b->data, b->len);
        fe_buf_put(b);
    }
}
