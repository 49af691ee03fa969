/* Datagrams on their way: what a provider has no room for waits here, in order, and is tried again at each poll. A
 * destination that takes nothing holds up no other (C8). */
#include "efa_int.h"

void fe_chan_init(fe_chan *c, struct fid_ep *ep, fi_addr_t to) {
    memset(c, 0, sizeof *c);
    c->ep = ep;
    c->to = to;
    fe_list_init(&c->waiting);
    fe_list_init(&c->flying);
    fe_list_init(&c->stuck);
}

static ssize_t try_send(fe_dom *d, fe_chan *c, fe_buf *b) {
    (void)d;
    if (c->nflying >= FE_CHAN) return -FI_EAGAIN;
    ssize_t rc = fi_send(c->ep, b->data, b->len, b->desc, c->to, &b->ctx);
    if (rc) return rc;
    fe_list_add(&c->flying, &b->node);
    c->nflying++;
    return 0;
}

static void failed(fe_dom *d, fe_chan *c, ssize_t rc) {
    if (!c->peer || c->peer->fail) return;
    c->peer->fail = fe_lost(fe_errno((int)rc));
    d->failing = true;
}

void fe_chan_send(fe_dom *d, fe_chan *c, fe_buf *b) {
    b->chan = c;
    b->since = d->now;
    ssize_t rc = fe_list_empty(&c->waiting) ? try_send(d, c, b) : -FI_EAGAIN;
    if (!rc) return;
    if (rc != -FI_EAGAIN || (b->contact && c->nwaiting >= FE_CONTACTS)) {
        fe_buf_put(b);
        if (rc != -FI_EAGAIN) failed(d, c, rc);
        return;
    }
    fe_list_add(&c->waiting, &b->node);
    c->nwaiting++;
    if (fe_list_empty(&c->stuck)) fe_list_add(&d->stuck, &c->stuck);
}

static void flush(fe_dom *d, fe_chan *c) {
    while (!fe_list_empty(&c->waiting)) {
        fe_buf *b = FE_OF(c->waiting.next, fe_buf, node);
        bool old = b->contact && d->now > b->since + d->heartbeat_ns; /* what it says is no news any more */
        fe_list_del(&b->node);
        ssize_t rc = old ? 0 : try_send(d, c, b);
        if (rc == -FI_EAGAIN) { /* back to the front */
            fe_list_add(c->waiting.next, &b->node);
            return;
        }
        c->nwaiting--;
        if (!rc && !old) continue;
        fe_buf_put(b);
        if (rc) failed(d, c, rc);
    }
    fe_list_del(&c->stuck);
}

void fe_chan_flush(fe_dom *d) {
    for (fe_node *n = d->stuck.next, *next; n != &d->stuck; n = next) {
        next = n->next;
        flush(d, FE_OF(n, fe_chan, stuck));
    }
}

void fe_chan_flown(fe_dom *d, fe_buf *b) {
    (void)d;
    if (b->chan) b->chan->nflying--;
    fe_buf_put(b);
}

/* The endpoint of this way is closed: what it had is kept where nobody uses it, for as long as the provider may name it. */
void fe_chan_drop(fe_dom *d, fe_chan *c, fe_node *lost) {
    (void)d;
    while (!fe_list_empty(&c->waiting)) fe_buf_put(FE_OF(c->waiting.next, fe_buf, node));
    while (!fe_list_empty(&c->flying)) {
        fe_buf *b = FE_OF(c->flying.next, fe_buf, node);
        fe_list_del(&b->node);
        b->chan = NULL;
        fe_list_add(lost, &b->node);
    }
    fe_list_del(&c->stuck);
    c->nflying = c->nwaiting = 0;
}

/* ---- destinations -------------------------------------------------------------------------------- */

static uint32_t hash(const uint8_t *p, uint32_t n) {
    uint32_t h = 2166136261u;
    for (uint32_t i = 0; i < n; i++) h = (h ^ p[i]) * 16777619u;
    return h & 255;
}

static void dest_free(fe_dom *d, fe_dest *t) {
    fe_list_del(&t->node);
    fe_node lost;
    fe_list_init(&lost);
    fe_chan_drop(d, &t->chan, &lost);
    while (!fe_list_empty(&lost)) fe_buf_put(FE_OF(lost.next, fe_buf, node));
    fi_av_remove(d->av, &t->chan.to, 1, 0);
    d->ndests--;
    free(t);
}

/* Strangers must not make us know ever more addresses: the one that was used longest ago goes. */
static void evict(fe_dom *d) {
    fe_dest *oldest = NULL;
    for (uint32_t i = 0; i < 256; i++)
        for (fe_node *n = d->dests[i].next; n != &d->dests[i]; n = n->next) {
            fe_dest *t = FE_OF(n, fe_dest, node);
            if (!t->refs && !t->chan.nflying && (!oldest || t->used < oldest->used)) oldest = t;
        }
    if (oldest) dest_free(d, oldest);
}

fe_dest *fe_dest_get(fe_dom *d, const void *name, uint32_t len) {
    fe_node *bucket = &d->dests[hash(name, len)];
    for (fe_node *n = bucket->next; n != bucket; n = n->next) {
        fe_dest *t = FE_OF(n, fe_dest, node);
        if (t->len == len && memcmp(t->name, name, len) == 0) {
            t->used = d->now;
            return t;
        }
    }
    if (d->ndests >= FE_DESTS) evict(d);
    if (d->ndests >= FE_DESTS || len > FAB_CONTACT_ADDR) return NULL;
    fe_dest *t = calloc(1, sizeof *t);
    if (!t) return NULL;
    memcpy(t->name, name, len);
    t->len = len;
    t->used = d->now;
    uint8_t padded[2 * FAB_CONTACT_ADDR] = {0}; /* a provider may read as many bytes as its addresses have */
    memcpy(padded, name, len);
    fi_addr_t to = FI_ADDR_UNSPEC;
    if (fi_av_insert(d->av, padded, 1, &to, 0, NULL) != 1) {
        free(t);
        return NULL;
    }
    fe_chan_init(&t->chan, d->ep, to);
    t->chan.dest = t;
    fe_list_add(bucket, &t->node);
    d->ndests++;
    return t;
}

void fe_dest_free_all(fe_dom *d) {
    for (uint32_t i = 0; i < 256; i++)
        for (fe_node *n = d->dests[i].next, *next; n != &d->dests[i]; n = next) {
            next = n->next;
            dest_free(d, FE_OF(n, fe_dest, node));
        }
}

int fe_tell(fe_dom *d, fe_chan *c, const fe_hdr *h, const void *more, uint32_t len) {
    fe_buf *b = fe_buf_get(d, sizeof *h + len <= FE_SMALL ? &d->small : &d->big);
    if (!b) return -ENOMEM;
    memcpy(b->data, h, sizeof *h);
    if (len) memcpy(b->data + sizeof *h, more, len);
    b->len = (uint32_t)sizeof *h + len;
    b->contact = h->type == FE_T_CONTACT;
    fe_chan_send(d, c, b);
    return 0;
}
