/* Pools of datagrams, registered where the provider wants its local buffers registered (FI_MR_LOCAL). */
#include "efa_int.h"

void fe_pool_init(fe_pool *p, uint32_t size, uint32_t kind) {
    fe_list_init(&p->free);
    p->slabs = NULL;
    p->size = size;
    p->kind = kind;
}

static bool grow(fe_dom *d, fe_pool *p) {
    fe_slab *s = calloc(1, sizeof *s);
    if (!s) return false;
    size_t bytes = (size_t)p->size * FE_SLAB;
    s->memory = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    if (!s->memory || (d->local_mr && fe_mr_raw(d, s->memory, bytes, FI_SEND | FI_RECV, &s->mr))) {
        free(s->memory);
        free(s);
        return false;
    }
    for (uint32_t i = 0; i < FE_SLAB; i++) {
        fe_buf *b = &s->bufs[i];
        b->ctx.kind = p->kind;
        b->pool = p;
        b->data = s->memory + (size_t)i * p->size;
        b->desc = s->mr ? fi_mr_desc(s->mr) : NULL;
        fe_list_add(&p->free, &b->node);
    }
    s->next = p->slabs;
    p->slabs = s;
    return true;
}

fe_buf *fe_buf_get(fe_dom *d, fe_pool *p) {
    if (fe_list_empty(&p->free) && !grow(d, p)) return NULL;
    fe_buf *b = FE_OF(p->free.next, fe_buf, node);
    fe_list_del(&b->node);
    b->chan = NULL;
    b->contact = false;
    b->len = 0;
    return b;
}

void fe_buf_put(fe_buf *b) {
    fe_list_del(&b->node);
    fe_list_add(&b->pool->free, &b->node);
}

void fe_pool_free(fe_pool *p) {
    while (p->slabs) {
        fe_slab *s = p->slabs;
        p->slabs = s->next;
        if (s->mr) fi_close(&s->mr->fid);
        free(s->memory);
        free(s);
    }
    fe_list_init(&p->free);
}

/* Datagrams are copied out at the next poll, so these are never all in use for long; a sender that finds none waits. */
void fe_rx_fill(fe_dom *d) {
    while (d->rx_posted < d->rx_limit && !d->closed) {
        fe_buf *b = fe_buf_get(d, &d->rx);
        if (!b) return;
        ssize_t rc = fi_recv(d->ep, b->data, FE_BIG, b->desc, FI_ADDR_UNSPEC, &b->ctx);
        if (rc) {
            fe_buf_put(b);
            return; /* -FI_EAGAIN: at the next poll */
        }
        d->rx_posted++;
    }
}
