/* Ways to other ports: address handles for datagrams. Making one may wait for the neighbour to answer (RoCE resolves its
 * Ethernet address), a second for a host that is not there. So threads do that, and nothing blocks the worker (C8): one, and
 * more while there is more to make than threads at rest, or a few dead hosts would use up the time that others have for
 * first contact. What failed before comes after what was not tried yet. */
#include "verbs_int.h"

void fv_ah_attr(const fv_dom *d, const uint8_t gid[16], uint16_t lid, struct ibv_ah_attr *out) {
    memset(out, 0, sizeof *out);
    out->dlid = lid;
    out->sl = (uint8_t)d->cfg.sl;
    out->port_num = (uint8_t)d->cfg.port;
    if (d->ethernet || d->cfg.force_grh || memcmp(gid, d->gid.raw, 8) != 0) { /* 8 bytes: the subnet */
        out->is_global = 1;
        memcpy(out->grh.dgid.raw, gid, 16);
        out->grh.sgid_index = (uint8_t)d->cfg.gid_index;
        out->grh.hop_limit = (uint8_t)d->cfg.hop_limit;
        out->grh.traffic_class = (uint8_t)d->cfg.traffic_class;
    }
}

static fv_dest *next_job(fv_dom *d) {
    fv_node *list = fv_list_empty(&d->dest_queue) ? &d->dest_again : &d->dest_queue;
    fv_dest *t = FV_OF(list->next, fv_dest, queue);
    fv_list_del(&t->queue);
    d->ndest_jobs--;
    return t;
}

static void *maker(void *arg) {
    fv_dom *d = arg;
    pthread_setname_np(pthread_self(), "fabric-ah");
    pthread_mutex_lock(&d->dest_mu);
    while (!d->dest_stop) {
        if (!d->ndest_jobs) {
            d->nidle++;
            pthread_cond_wait(&d->dest_cond, &d->dest_mu);
            d->nidle--;
            continue;
        }
        fv_dest *t = next_job(d);
        pthread_mutex_unlock(&d->dest_mu);
        struct ibv_ah_attr a;
        fv_ah_attr(d, t->gid, t->lid, &a);
        struct ibv_ah *ah = fv_ibv.create_ah(d->pd, &a);
        pthread_mutex_lock(&d->dest_mu);
        t->ah = ah;
        fv_list_add(&d->dest_done, &t->queue);
        atomic_store_explicit(&d->dests_done, 1, memory_order_release);
        fv_wake(d);
    }
    pthread_mutex_unlock(&d->dest_mu);
    return NULL;
}

/* [dest_mu, or nobody else is there] */
static int one_more(fv_dom *d) {
    int rc = pthread_create(&d->makers[d->nmakers], NULL, maker, d);
    if (!rc) d->nmakers++;
    return -rc;
}

int fv_dests_start(fv_dom *d) { return one_more(d); }

/* Has the way made, if it was not tried in vain just now. */
void fv_dest_ask(fv_dom *d, fv_dest *t) {
    bool again = t->state == FV_DEST_FAILED;
    if (again && d->now - t->failed < FV_DEST_PAUSE_NS) return;
    t->state = FV_DEST_ASKED;
    pthread_mutex_lock(&d->dest_mu); /* held for moments only */
    fv_list_add(again ? &d->dest_again : &d->dest_queue, &t->queue);
    d->ndest_jobs++;
    if (d->ndest_jobs > d->nidle && d->nmakers < FV_MAKERS) (void)one_more(d); /* else those that are there do it */
    pthread_cond_signal(&d->dest_cond);
    pthread_mutex_unlock(&d->dest_mu);
}

static fv_node *bucket(fv_dom *d, const uint8_t gid[16], uint16_t lid) {
    uint32_t h = 2166136261u ^ lid;
    for (int i = 0; i < 16; i++) h = (h ^ gid[i]) * 16777619u;
    return &d->dests[h >> 24];
}

static void forget(fv_dom *d, fv_dest *t) {
    fv_list_del(&t->node);
    if (t->ah) fv_ibv.destroy_ah(t->ah);
    free(t);
    d->ndests--;
}

/* Makes room: those that nobody uses, oldest first of each bucket; `all`: also those that were used just now. */
void fv_dests_thin(fv_dom *d, bool all) {
    for (uint32_t i = 0; i < 256; i++)
        for (fv_node *n = d->dests[i].next, *next; n != &d->dests[i]; n = next) {
            next = n->next;
            fv_dest *t = FV_OF(n, fv_dest, node);
            if (!t->refs && t->state != FV_DEST_ASKED && (all || d->now - t->used > 1000000000u)) forget(d, t);
        }
}

/* Our address was taken away: what was made with it leads nowhere, also once we have it back (at another index, perhaps). */
void fv_dests_stale(fv_dom *d) {
    for (uint32_t i = 0; i < 256; i++)
        for (fv_node *n = d->dests[i].next; n != &d->dests[i]; n = n->next) FV_OF(n, fv_dest, node)->stale = true;
}

/* Not while a datagram uses it, or the thread is at it. */
static void renew(fv_dest *t) {
    if (t->flying || t->state == FV_DEST_ASKED) return;
    if (t->ah) fv_ibv.destroy_ah(t->ah);
    t->ah = NULL;
    t->state = FV_DEST_NEW;
    t->stale = false;
}

fv_dest *fv_dest_get(fv_dom *d, const fv_addr *a) {
    fv_node *b = bucket(d, a->gid, a->lid);
    for (fv_node *n = b->next; n != b; n = n->next) {
        fv_dest *t = FV_OF(n, fv_dest, node);
        if (t->lid == a->lid && memcmp(t->gid, a->gid, 16) == 0) {
            t->used = d->now;
            if (t->stale) renew(t);
            return t;
        }
    }
    if (d->ndests >= FV_DESTS) fv_dests_thin(d, false);
    fv_dest *t = d->ndests < FV_DESTS ? calloc(1, sizeof *t) : NULL;
    if (!t) return NULL;
    memcpy(t->gid, a->gid, 16);
    t->lid = a->lid;
    t->used = d->now;
    fv_list_init(&t->queue);
    fv_list_add(b, &t->node);
    d->ndests++;
    return t;
}

/* What the thread has made. */
void fv_dests_look(fv_dom *d) {
    if (!atomic_load_explicit(&d->dests_done, memory_order_acquire)) return;
    fv_node done;
    fv_list_init(&done);
    pthread_mutex_lock(&d->dest_mu); /* held for moments only */
    atomic_store_explicit(&d->dests_done, 0, memory_order_relaxed);
    while (!fv_list_empty(&d->dest_done)) {
        fv_node *n = d->dest_done.next;
        fv_list_del(n);
        fv_list_add(&done, n);
    }
    pthread_mutex_unlock(&d->dest_mu);
    while (!fv_list_empty(&done)) {
        fv_dest *t = FV_OF(done.next, fv_dest, queue);
        fv_list_del(&t->queue);
        t->state = t->ah ? FV_DEST_READY : FV_DEST_FAILED;
        t->failed = d->now;
        if (t->wait_len && t->ah && !t->stale) fv_ud_put(d, t);
        t->wait_len = 0;
    }
}

void fv_dests_stop(fv_dom *d) {
    pthread_mutex_lock(&d->dest_mu);
    d->dest_stop = true;
    pthread_cond_broadcast(&d->dest_cond);
    pthread_mutex_unlock(&d->dest_mu);
    while (d->nmakers) pthread_join(d->makers[--d->nmakers], NULL);
    for (uint32_t i = 0; i < 256; i++) /* NOLINTNEXTLINE(clang-analyzer-unix.Malloc): see fv_list_del */
        while (!fv_list_empty(&d->dests[i])) forget(d, FV_OF(d->dests[i].next, fv_dest, node));
}
