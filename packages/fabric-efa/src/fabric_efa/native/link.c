/* Peers: first contact, loss and farewell are fabric/contact.h's; here is what a link needs beside it. */
#include "efa_int.h"

/* ---- what the contact tells ------------------------------------------------------------------------ */

static void cb_send(void *ctx, const void *addr, uint32_t addr_len, const void *msg, uint32_t len) {
    fe_dom *d = ctx;
    fe_dest *t = fe_dest_get(d, addr, addr_len);
    uint8_t more[FAB_CONTACT_ADDR + FAB_CONTACT_MAX];
    if (!t || len > FAB_CONTACT_MAX) return;
    memcpy(more, d->name, d->name_len);
    memcpy(more + d->name_len, msg, len);
    fe_hdr h = {.magic = FE_MAGIC, .type = FE_T_CONTACT, .from_len = (uint8_t)d->name_len};
    fe_tell(d, &t->chan, &h, more, d->name_len + len);
}

static int cb_accept(void *ctx, uint32_t number, const void *addr, uint32_t addr_len, const void *body, uint32_t len,
                     void *reply, uint32_t cap) {
    fe_dom *d = ctx;
    fe_hello h;
    if (len < sizeof h || cap < sizeof h) return -EPROTO;
    memcpy(&h, body, sizeof h);
    if (h.version != FE_WIRE) return -EPROTO;
    fe_dest *t = fe_dest_get(d, addr, addr_len);
    fe_in *in = t ? calloc(1, sizeof *in) : NULL;
    if (!in) return -ENOMEM;
    if (d->ins[number]) fe_in_free(d, number);
    t->refs++;
    in->dest = t;
    in->theirs = h.session;
    in->their_link = h.link;
    in->mine = fe_random();
    for (uint32_t i = 0; i < FE_MSGS; i++) fe_list_init(&in->msg[i].held);
    d->ins[number] = in;
    fe_hello r = {.version = FE_WIRE,
                  .link = number,
                  .session = in->mine,
                  .msgs = FE_MSGS,
                  .max_send = FE_MAX_SEND,
                  .nic = d->nic};
    memcpy(reply, &r, sizeof r);
    return (int)sizeof r;
}

static void cb_up(void *ctx, uint32_t out, const void *body, uint32_t len) {
    fe_dom *d = ctx;
    fe_peer *p = d->by_out[out];
    fe_hello h;
    if (!p || p->state != FE_OPENING) return;
    if (len < sizeof h) {
        fe_peer_lose(p, -EPROTO);
        return;
    }
    memcpy(&h, body, sizeof h);
    if (h.version != FE_WIRE || h.msgs < FE_MSGS || h.max_send < FE_MAX_SEND) {
        fe_peer_lose(p, -EPROTO);
        return;
    }
    p->theirs = h.session;
    p->their_link = h.link;
    p->state = FE_UP;
    fab_wc_push(&d->wcq, &(fab_wc){.kind = FAB_WC_PEER_UP, .peer = p->id, .count = 1});
}

static void cb_down(void *ctx, uint32_t out, int32_t status) {
    fe_peer *p = ((fe_dom *)ctx)->by_out[out];
    if (p) fe_peer_lose(p, status);
}

static void cb_gone(void *ctx, uint32_t in, int32_t status) {
    (void)status;
    fe_in_free(ctx, in);
}

int fe_contact_start(fe_dom *d, const fab_efa_cfg *cfg) {
    fab_contact_cfg c = {
        .incarnation = cfg->incarnation,
        .interval_ns = cfg->heartbeat_ns,
        .connect_ns = cfg->connect_ns,
        .secret = cfg->key,
        .secret_len = cfg->key ? 32 : 0,
        .label = "fabric-efa",
        .self = d->name,
        .self_len = d->name_len,
        .max_out = d->max_peers,
        .max_in = d->max_peers,
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

/* ---- ends -------------------------------------------------------------------------------------------- */

/* Closing an endpoint makes the provider drop what it holds of it, without a word (fi_endpoint(3)): what the CQ has is
 * taken first, and once more after, since a completion may be there that was on its way. */
static void close_ep(fe_peer *p) {
    fe_dom *d = p->dom;
    if (!p->ep) return;
    fe_cq_drain(d);
    fi_close(&p->ep->fid);
    d->blind = d->blind || d->rxm;
    fe_cq_drain(d);
    fe_chan_drop(d, &p->chan, &p->lost);
}

static void end_ops(fe_peer *p, int32_t status) {
    bool cut = p->ep != NULL;
    close_ep(p);
    for (uint32_t i = 0; i < FE_OPS && p->used; i++) {
        fe_op *op = &p->ops[i];
        if (op->state == FE_OP_FREE) continue;
        if (op->state != FE_OP_FLYING) fe_op_end(op, status);
        else if (cut) fe_op_flown(op, status); /* else they end by themselves: the NIC's time-outs are bounded (EFA) */
    }
    for (uint32_t i = 0; i < FE_MSGS; i++) p->msg[i].op = NULL;
    p->msgs_free = UINT32_MAX;
    if (!cut) fe_chan_drop(p->dom, &p->chan, &p->lost);
    p->ep = NULL;
    fe_list_del(&p->busy);
}

void fe_peer_lose(fe_peer *p, int32_t status) {
    if (p->state == FE_DEAD) return;
    p->state = FE_DEAD;
    p->fail = status;
    if (p->retry) {
        p->retry = false;
        p->dom->retrying--;
    }
    end_ops(p, status);
    if (!p->closing)
        fab_wc_push(&p->dom->wcq, &(fab_wc){.kind = FAB_WC_PEER_DOWN, .status = status, .peer = p->id, .count = 1});
}

/* Its memory outlives its endpoint for a while: a provider may still name it. */
static void bury(fe_peer *p) {
    fe_dom *d = p->dom;
    d->peers[p->id] = NULL;
    p->dest->refs--;
    p->died = d->now;
    p->next_dead = d->dead;
    d->dead = p;
}

static void peer_free(fe_peer *p) {
    while (!fe_list_empty(&p->lost)) fe_buf_put(FE_OF(p->lost.next, fe_buf, node));
    fe_leases_free(p);
    free(p->ops);
    free(p);
}

static int begin(fe_peer *p) {
    fe_dom *d = p->dom;
    fe_hello h = {.version = FE_WIRE, .link = p->id, .session = p->mine, .nic = d->nic};
    int out = d->capi->open(d->contact, p->dest->name, p->dest->len, p->want_inc, &h, sizeof h, d->now);
    if (out < 0) return out;
    p->out = (uint32_t)out;
    d->by_out[out] = p;
    d->contact_due = 0;
    return 0;
}

int fe_peer_close(void *ctx, uint32_t id) {
    fe_dom *d = ctx;
    fe_lock_politely(d);
    fe_peer *p = id < d->npeers ? d->peers[id] : NULL;
    if (!p || p->closing) {
        pthread_mutex_unlock(&d->mu);
        return -EINVAL;
    }
    d->now = fe_clock();
    p->closing = true;
    fe_peer_lose(p, -ECANCELED);
    if (p->out != FAB_CONTACT_NONE) {
        d->by_out[p->out] = NULL;
        d->capi->close(d->contact, p->out, d->now);
    }
    if (!p->used) bury(p);
    else d->retrying++; /* looked at until its last request has ended */
    if (fab_wc_ready(&d->wcq)) fe_wake(d);
    pthread_mutex_unlock(&d->mu);
    return 0;
}

/* ---- beginnings ------------------------------------------------------------------------------------------ */

static int find_id(fe_dom *d, uint32_t *id) {
    for (*id = 0; *id < d->npeers && d->peers[*id]; ++*id) {
    }
    if (*id < d->npeers) return 0;
    if (d->npeers >= d->max_peers) return -EUSERS;
    uint32_t more = d->npeers ? d->npeers * 2 : 16;
    if (more > d->max_peers) more = d->max_peers;
    fe_peer **p = realloc(d->peers, more * sizeof *p);
    if (!p) return -ENOMEM;
    memset(p + d->npeers, 0, (more - d->npeers) * sizeof *p);
    d->peers = p;
    d->npeers = more;
    return 0;
}

static fe_peer *peer_new(fe_dom *d) {
    fe_peer *p = calloc(1, sizeof *p);
    if (!p) return NULL;
    p->ops = calloc(FE_OPS, sizeof *p->ops);
    if (!p->ops) {
        free(p);
        return NULL;
    }
    for (uint32_t i = 0; i < FE_OPS; i++) {
        p->ops[i].ctx.kind = FE_CTX_OP;
        p->ops[i].peer = p;
        fe_list_init(&p->ops[i].node);
        p->ops[i].next_free = i + 1 < FE_OPS ? &p->ops[i + 1] : NULL;
    }
    p->free = p->ops;
    p->dom = d;
    p->out = FAB_CONTACT_NONE;
    p->msgs_free = UINT32_MAX;
    p->mine = fe_random();
    fe_list_init(&p->todo);
    fe_list_init(&p->sends);
    fe_list_init(&p->busy);
    fe_list_init(&p->lost);
    return p;
}

static int open_locked(fe_dom *d, const char *addr, size_t len, uint32_t *peer) {
    uint8_t name[FAB_CONTACT_ADDR] = {0};
    uint32_t name_len = 0, id;
    uint64_t inc;
    int rc = fe_address_parse(d, addr, len, name, &name_len, &inc);
    if (rc) fe_address_explain(d, addr, len, rc);
    if (!rc && d->apart) rc = fe_address_apart(d, addr, len, name, name_len);
    if (!rc) rc = find_id(d, &id);
    if (rc) return rc;
    fe_peer *p = peer_new(d);
    if (!p) return -ENOMEM;
    p->dest = fe_dest_get(d, name, name_len);
    rc = !p->dest ? -EHOSTUNREACH : d->own_ep ? fe_ep_open(d, &p->ep) : 0;
    if (rc) {
        peer_free(p);
        return rc < 0 ? fe_errno(rc) : -EIO;
    }
    p->dest->refs++;
    p->id = id;
    p->want_inc = inc;
    p->since = d->now;
    fe_chan_init(&p->chan, p->ep ? p->ep : d->ep, p->dest->chan.to);
    p->chan.peer = p;
    d->peers[id] = p;
    rc = begin(p);
    if (rc == -EEXIST) { /* the same address is open: one that is closing, or another incarnation's */
        p->retry = true;
        d->retrying++;
    } else if (rc) {
        p->closing = true;
        fe_peer_lose(p, rc);
        bury(p);
        return rc;
    }
    *peer = id;
    return 0;
}

int fe_peer_open(void *ctx, const char *addr, size_t len, uint32_t *peer) {
    fe_dom *d = ctx;
    fe_lock_politely(d);
    d->now = fe_clock();
    int rc = d->closed ? -ENETDOWN : open_locked(d, addr, len, peer);
    pthread_mutex_unlock(&d->mu);
    return rc;
}

/* What cannot be done inside a callback, and what waits for something. */
void fe_peers_look(fe_dom *d) {
    d->failing = false;
    for (uint32_t i = 0; i < d->npeers; i++) {
        fe_peer *p = d->peers[i];
        if (!p) continue;
        if (p->fail && p->state != FE_DEAD) fe_peer_lose(p, p->fail);
        if (p->retry) {
            int rc = begin(p);
            if (rc == -EEXIST && d->now > p->since + d->connect_ns) rc = -ETIMEDOUT;
            if (rc == -EEXIST) continue;
            p->retry = false;
            d->retrying--;
            if (rc) fe_peer_lose(p, rc);
        }
        if (p->closing && !p->used) {
            d->retrying--;
            bury(p);
        }
    }
    for (fe_peer **at = &d->dead; *at;) {
        fe_peer *p = *at;
        if (d->now < p->died + FE_GRAVE_NS) {
            at = &p->next_dead;
            continue;
        }
        *at = p->next_dead;
        peer_free(p);
    }
}

/* After every endpoint was closed. */
void fe_peers_free(fe_dom *d) {
    for (uint32_t i = 0; i < d->npeers; i++)
        if (d->peers[i]) {
            fe_peer *p = d->peers[i];
            fe_chan_drop(d, &p->chan, &p->lost);
            peer_free(p);
        }
    while (d->dead) {
        fe_peer *p = d->dead;
        d->dead = p->next_dead;
        peer_free(p);
    }
    free(d->peers);
    free(d->by_out);
    d->peers = d->by_out = NULL;
    d->npeers = 0;
}
