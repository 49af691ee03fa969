/* Leases: before the first write into a registration, its owner is asked what its key is to the provider. A wrong or
 * revoked key is thus refused by its owner, by name, where the providers would drop the write in silence and call it done;
 * and the owner knows whom to tell when it revokes: the answer says that no write is under way any more. */
#include "efa_int.h"

static fe_lease **bucket(fe_peer *p, uint64_t token) { return &p->leases[(token ^ token >> 32) % FE_LEASES]; }

static fe_hdr header(const fe_peer *p, uint8_t type, uint64_t token) {
    return (fe_hdr){.magic = FE_MAGIC, .type = type, .session = p->theirs, .link = p->their_link, .a = token};
}

static fe_lease *find(fe_peer *p, uint64_t token) {
    fe_lease *l = *bucket(p, token);
    while (l && l->token != token) l = l->next;
    return l;
}

fe_lease *fe_lease_get(fe_peer *p, uint64_t token) {
    if (p->last && p->last->token == token) return p->last;
    fe_lease *l = find(p, token);
    if (!l) {
        l = calloc(1, sizeof *l);
        if (!l) return NULL;
        l->token = token;
        fe_list_init(&l->waiting);
        fe_hdr h = header(p, FE_T_ASK, token);
        if (fe_tell(p->dom, &p->chan, &h, NULL, 0)) {
            free(l);
            return NULL;
        }
        l->next = *bucket(p, token);
        *bucket(p, token) = l;
    }
    return p->last = l;
}

static void forget(fe_peer *p, fe_lease *l) {
    fe_lease **at = bucket(p, l->token);
    while (*at != l) at = &(*at)->next;
    *at = l->next;
    if (p->last == l) p->last = NULL;
    free(l);
}

/* [REVOKED] and nothing flies: the owner may have its memory back. */
void fe_lease_settle(fe_peer *p, fe_lease *l) {
    fe_hdr h = header(p, FE_T_END, l->token);
    if (p->state == FE_UP) fe_tell(p->dom, &p->chan, &h, NULL, 0);
    forget(p, l);
}

void fe_lease_granted(fe_peer *p, const fe_hdr *h, const fe_grant *g) {
    fe_lease *l = find(p, h->a);
    if (!l || l->state != FE_LEASE_ASKED) return;
    if (h->status >= 0 && g) {
        l->state = FE_LEASE_READY;
        l->key = g->key;
        l->base = g->base;
        l->va = g->va;
        l->len = g->len;
    }
    while (!fe_list_empty(&l->waiting)) {
        fe_op *op = FE_OF(l->waiting.next, fe_op, node);
        if (l->state != FE_LEASE_READY) {
            fe_op_end(op, h->status < 0 ? h->status : -EPROTO);
            continue;
        }
        fe_list_del(&op->node);
        op->state = FE_OP_TODO;
        fe_list_add(&p->todo, &op->node);
    }
    if (l->state != FE_LEASE_READY)
        forget(p, l); /* asked again by the next write: it may be another registration then */
    else if (!fe_list_empty(&p->todo)) fe_peer_busy(p);
}

void fe_lease_revoked(fe_peer *p, uint64_t token) {
    fe_lease *l = find(p, token);
    if (!l) { /* it was never answered, or is over already */
        fe_hdr h = header(p, FE_T_END, token);
        fe_tell(p->dom, &p->chan, &h, NULL, 0);
        return;
    }
    l->state = FE_LEASE_REVOKED;
    while (!fe_list_empty(&l->waiting)) fe_op_end(FE_OF(l->waiting.next, fe_op, node), -EKEYREVOKED);
    for (fe_node *n = p->todo.next, *next; n != &p->todo; n = next) {
        next = n->next;
        fe_op *op = FE_OF(n, fe_op, node);
        if (op->lease == l) fe_op_end(op, -EKEYREVOKED);
    }
    if (!l->flying) fe_lease_settle(p, l);
}

void fe_leases_free(fe_peer *p) {
    p->last = NULL;
    for (uint32_t i = 0; i < FE_LEASES; i++)
        for (fe_lease *l = p->leases[i], *next; l; l = next) {
            next = l->next;
            free(l);
        }
    memset(p->leases, 0, sizeof p->leases);
}
