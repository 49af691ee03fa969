/* Links: first contact, loss and farewell are fabric/contact.h's; here is what a link needs beside it. */
#include "verbs_int.h"

/* ---- making and freeing ---------------------------------------------------------------------------- */

static int find_index(fv_dom *d, uint32_t *index) {
    for (uint32_t i = 0; i < d->links_cap; i++)
        if (!d->links[i]) {
            *index = i;
            return 0;
        }
    uint32_t cap = d->links_cap ? d->links_cap * 2 : 64;
    fv_link **p = realloc(d->links, cap * sizeof(fv_link *));
    if (!p) return -ENOMEM;
    memset(p + d->links_cap, 0, (cap - d->links_cap) * sizeof(fv_link *));
    *index = d->links_cap;
    d->links = p;
    d->links_cap = cap;
    return 0;
}

static void link_free(fv_link *l) {
    fv_dom *d = l->dom;
    fv_qp_bury(d, l->w);
    fv_qp_bury(d, l->m);
    fv_list_del(&l->busy);
    if (l->dest) l->dest->refs--;
    d->links[l->index] = NULL;
    d->nlinks--;
    d->w_granted -= l->out ? FV_WCREDITS : l->window;
    free(l->ring);
    free(l->redo);
    free(l);
}

static int link_new(fv_dom *d, bool out, const fv_addr *addr, fv_link **result) {
    uint32_t index = 0, window = out ? FV_WCREDITS : fv_window_grant(d);
    bool full = d->nlinks >= d->most_links || !window || d->w_granted + window + FV_WSPARE > d->wsrq_size;
    if (full && out) fv_count(d, FV_R_FULL, 1); /* inward ones are counted with their datagram */
    int rc = full ? -ENOSPC : find_index(d, &index);
    if (!rc) rc = fv_mrx_grow(d, (d->nlinks + 1) * FV_MRX + d->m_spare);
    fv_link *l = rc ? NULL : calloc(1, sizeof *l);
    if (!l) return rc ? rc : -ENOMEM;
    l->dom = d;
    l->out = out;
    l->index = index;
    l->addr = *addr;
    l->id = l->contact = FAB_CONTACT_NONE;
    l->m_limit = FV_MWINDOW;
    l->mtu = fv_mtu(d);
    fv_node *lists[] = {&l->busy, &l->sends, &l->sent, &l->held};
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++) fv_list_init(lists[i]);
    d->links[index] = l;
    d->nlinks++;
    d->w_granted += window;
    l->window = out ? 0 : window;
    if (fv_wsrq_fill(d)) d->broken = true;
    if (out) {
        l->ring = calloc(d->cfg.depth, sizeof *l->ring);
        l->redo = calloc(d->cfg.depth, sizeof *l->redo);
        l->head = l->tail = (uint32_t)fv_random(); /* a stray completion of a former link will hardly fit */
    }
    l->dest = fv_dest_get(d, addr);
    if (l->dest) l->dest->refs++;
    l->w = fv_qp_new(l, out ? FV_W_OUT : FV_W_IN);
    l->m = fv_qp_new(l, FV_M);
    if (!l->dest || !l->w || !l->m || (out && (!l->ring || !l->redo))) {
        link_free(l);
        return -ENOMEM;
    }
    *result = l;
    return 0;
}

static void hello(const fv_link *l, fv_hello *h) {
    const fv_dom *d = l->dom;
    *h = (fv_hello){.version = FV_WIRE,
                    .w_qpn = l->w->num,
                    .w_psn = l->w->psn,
                    .m_qpn = l->m->num,
                    .m_psn = l->m->psn,
                    .window = l->window,
                    .m_window = FV_MWINDOW,
                    .msgs = FV_MSGS,
                    .mtu = l->mtu,
                    .lid = d->self.lid};
    memcpy(h->gid, d->gid.raw, 16);
}

static int connect_both(fv_link *l, const void *body, uint32_t len) {
    if (len < sizeof l->theirs) return -EPROTO;
    memcpy(&l->theirs, body, sizeof l->theirs);
    const fv_hello *h = &l->theirs;
    if (h->version != FV_WIRE || h->m_window != FV_MWINDOW || h->msgs != FV_MSGS ||
        memcmp(h->gid, l->addr.gid, 16) != 0 || h->w_qpn > 0xffffff || h->m_qpn > 0xffffff)
        return -EPROTO;
    int rc = fv_qp_connect(l->w, h, h->w_qpn, h->w_psn);
    return rc ? rc : fv_qp_connect(l->m, h, h->m_qpn, h->m_psn);
}

/* ---- what the contact tells --------------------------------------------------------------------------- */

static void cb_send(void *ctx, const void *addr, uint32_t addr_len, const void *msg, uint32_t len) {
    fv_addr to;
    if (addr_len != sizeof to) return;
    memcpy(&to, addr, sizeof to);
    fv_ud_send(ctx, &to, msg, len);
}

/* Our ends are ready before the answer leaves; the peer connects its own when it has the answer. So when it may post, both are. */
static int cb_accept(void *ctx, uint32_t number, const void *addr, uint32_t addr_len, const void *body, uint32_t len,
                     void *reply, uint32_t cap) {
    fv_dom *d = ctx;
    fv_addr from;
    fv_link *l;
    if (addr_len != sizeof from || cap < sizeof(fv_hello)) return -EPROTO;
    memcpy(&from, addr, sizeof from);
    int rc = d->down ? -ENETDOWN : link_new(d, false, &from, &l);
    if (rc) return rc;
    rc = connect_both(l, body, len);
    if (rc) {
        link_free(l);
        return rc;
    }
    l->id = number;
    l->state = FV_UP;
    d->by_in[number] = l;
    fv_hello h;
    hello(l, &h);
    memcpy(reply, &h, sizeof h);
    return (int)sizeof h;
}

static void cb_up(void *ctx, uint32_t out, const void *body, uint32_t len) {
    fv_dom *d = ctx;
    fv_link *l = d->by_out[out];
    if (!l || l->state != FV_OPENING) return;
    int rc = connect_both(l, body, len);
    if (rc) {
        fv_link_lose(l, rc);
        return;
    }
    l->imm_limit = l->theirs.window;
    l->psn = l->w->psn;
    l->state = FV_UP;
    fab_wc_push(&d->wcq, &(fab_wc){.kind = FAB_WC_PEER_UP, .peer = l->id, .count = 1});
}

static void cb_down(void *ctx, uint32_t out, int32_t status) {
    fv_link *l = ((fv_dom *)ctx)->by_out[out];
    if (l) fv_link_lose(l, status);
}

static void cb_gone(void *ctx, uint32_t in, int32_t status) {
    fv_link *l = ((fv_dom *)ctx)->by_in[in];
    if (!l) return;
    l->closing = true; /* the contact has forgotten it */
    fv_link_lose(l, status);
}

int fv_contact_start(fv_dom *d) {
    fab_contact_cfg c = {
        .incarnation = d->cfg.incarnation,
        .interval_ns = d->cfg.heartbeat_ns,
        .connect_ns = d->cfg.connect_ns,
        .secret = d->cfg.key,
        .secret_len = d->cfg.key ? 32 : 0,
        .label = "fabric-ibverbs",
        .self = &d->self,
        .self_len = sizeof d->self,
        .max_out = d->max_links,
        .max_in = d->max_links,
        .ctx = d,
        .send = cb_send,
        .accept = cb_accept,
        .up = cb_up,
        .down = cb_down,
        .gone = cb_gone,
    };
    d->contact = d->capi->create(&c);
    return d->contact ? 0 : -errno;
}

/* ---- ends ----------------------------------------------------------------------------------------------- */

static void lose_in(fv_link *l) {
    fv_dom *d = l->dom;
    if (!l->closing) d->capi->drop(d->contact, l->id, d->now);
    d->by_in[l->id] = NULL;
    fv_in_free(l);
}

static void lose_out(fv_link *l) {
    fv_dom *d = l->dom;
    int32_t status = l->closing ? -ECANCELED : l->status;
    fv_sends_end(l, status);
    d->scq_used -= l->nredo;
    for (uint32_t i = 0; i < l->nredo; i++)
        fab_wc_push(&d->wcq,
                    &(fab_wc){.kind = FAB_WC_OP, .id = l->redo[i].id, .status = status, .peer = l->id, .count = 1});
    l->nredo = 0;
    if (!l->closing)
        fab_wc_push(&d->wcq, &(fab_wc){.kind = FAB_WC_PEER_DOWN, .status = status, .peer = l->id, .count = 1});
}

/* Writes in flight end when their completions come out, which the error state sees to (C7). */
void fv_link_lose(fv_link *l, int32_t status) {
    fv_dom *d = l->dom;
    if (l->state == FV_CUT) return;
    l->state = FV_CUT;
    l->status = status;
    l->since = d->now;
    d->ncut++;
    if (l->w) fv_qp_error(l->w);
    if (l->m) fv_qp_error(l->m);
    if (l->out) lose_out(l);
    else lose_in(l);
    fv_list_del(&l->busy);
}

/* Both ways. */
void fv_links_lose(fv_dom *d, int32_t status) {
    for (uint32_t i = 0; i < d->links_cap; i++)
        if (d->links[i]) fv_link_lose(d->links[i], status);
}

int fv_peer_close(void *ctx, uint32_t id) {
    fv_dom *d = ctx;
    fv_link *l = id < d->npeers ? d->peers[id] : NULL;
    if (!l || l->closing) return -EINVAL;
    d->now = fv_clock();
    l->closing = true;
    fv_link_lose(l, -ECANCELED);
    d->by_out[l->contact] = NULL;
    d->capi->close(d->contact, l->contact, d->now);
    fv_wake(d); /* what it held has to be waited for */
    return 0;
}

/* ---- beginnings -------------------------------------------------------------------------------------------- */

static int find_id(fv_dom *d, uint32_t *id) {
    for (*id = 0; *id < d->npeers && d->peers[*id]; ++*id) {
    }
    if (*id < d->npeers) return 0;
    uint32_t more = d->npeers ? d->npeers * 2 : 16;
    fv_link **p = realloc(d->peers, more * sizeof(fv_link *));
    if (!p) return -ENOMEM;
    memset(p + d->npeers, 0, (more - d->npeers) * sizeof(fv_link *));
    d->peers = p;
    d->npeers = more;
    return 0;
}

int fv_peer_open(void *ctx, const char *addr, size_t len, uint32_t *peer) {
    fv_dom *d = ctx;
    fv_addr to;
    uint64_t inc;
    uint32_t id;
    fv_link *l;
    d->now = fv_clock();
    int rc = d->down || d->closed ? -ENETDOWN : fv_address_parse(addr, len, &to, &inc);
    if (!rc) rc = find_id(d, &id);
    if (!rc) rc = link_new(d, true, &to, &l);
    if (rc) return rc;
    fv_hello h;
    hello(l, &h);
    int out = d->capi->open(d->contact, &to, sizeof to, inc, &h, sizeof h, d->now);
    if (out < 0) {
        link_free(l);
        return out;
    }
    l->id = id;
    l->contact = (uint32_t)out;
    d->peers[id] = l;
    d->by_out[out] = l;
    d->contact_due = 0;
    *peer = id;
    return 0;
}

/* Frees what is over: links that nobody names any more, once they are quiet. */
void fv_links_look(fv_dom *d) {
    for (uint32_t i = 0; i < d->links_cap && d->ncut; i++) {
        fv_link *l = d->links[i];
        if (!l || l->state != FV_CUT) continue;
        if (l->out && l->head != l->tail && d->now - l->since > FV_DRAIN_NS && l->w) { /* quiet by force */
            fv_qp_destroy(d, l->w);
            l->w = NULL;
            fv_ring_end(l, l->status);
        }
        if (!l->out) {
            d->ncut--;
            link_free(l);
        } else if (l->closing && l->head == l->tail) {
            d->peers[l->id] = NULL;
            d->ncut--;
            link_free(l);
        }
    }
}

void fv_links_free(fv_dom *d) {
    for (uint32_t i = 0; i < d->links_cap; i++) {
        fv_link *l = d->links[i];
        if (!l) continue;
        if (!l->out) fv_in_free(l);
        fv_sends_end(l, -ECANCELED);
        link_free(l);
    }
    fv_grave_look(d, true);
    free(d->links);
    free(d->peers);
    free(d->by_out);
    free(d->by_in);
}
