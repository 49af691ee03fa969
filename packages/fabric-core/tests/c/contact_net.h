/* A seeded network of contacts under virtual time, which loses, repeats, delays, reorders, corrupts and replays
 * datagrams; with a ledger of what each open and each admission came to. Of test_contact.c and test_contact_seeds.c. */
#ifndef FAB_TEST_CONTACT_NET_H
#define FAB_TEST_CONTACT_NET_H
#include <errno.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "check.h"
#include "contact_wire.h"

#define NODES 8u
#define TABLE 24u
#define HEAP 8192u
#define TAPE 256u
#define OPENS 4096u
#define MS 1000000ull
#define INTERVAL (200 * MS)

/* A sanitizer's build takes a tenth of the work. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#    define SLOW 1
#else
#    define SLOW 0
#endif

typedef struct net_msg {
    uint64_t at, order;
    uint32_t from, to, len;
    uint8_t bytes[FAB_CONTACT_MAX];
} net_msg;

typedef struct net_open { /* one fab_contact_open */
    uint32_t node, to, ups, downs, closed, reply_len;
    int32_t status;
    uint64_t inc, at, ended, up_at;
    uint8_t reply[FAB_CONTACT_BODY];
} net_open;

typedef struct net_in { /* one admission */
    uint32_t live, open;
    uint8_t body[FAB_CONTACT_BODY];
} net_in;

struct net;
typedef struct net_node {
    struct net *net;
    fab_contact *c;
    uint32_t id;
    uint64_t inc, wake, crashed_at;
    bool paused, strange; /* strange: another secret */
    uint32_t open_of[TABLE];
    net_in in[TABLE];
    uint32_t accepts, gones;
} net_node;

typedef struct net {
    uint64_t now, order, rng, seed;
    uint32_t n, loss, dup, corrupt, replay, refuse; /* per mille */
    uint64_t delay_min, delay_max;
    bool bound, secret;
    net_node node[NODES];
    net_msg *heap[HEAP];
    uint32_t heap_len;
    net_msg tape[TAPE]; /* what was sent, for replays: also what was lost */
    uint32_t taped;
    uint32_t drop[256]; /* how many of a type are lost from here on, and the last one of those */
    net_msg dropped[FAB_CONTACT_TYPES];
    net_open *opens;
    uint32_t nopens;
    uint64_t delivered, hash; /* hash: of all that was sent */
} net;

static inline uint64_t rnd(net *w) { /* splitmix64 */
    uint64_t z = w->rng += 0x9e3779b97f4a7c15ull;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return z ^ z >> 31;
}
static inline uint64_t below(net *w, uint64_t n) { return n ? rnd(w) % n : 0; }
static inline bool chance(net *w, uint32_t per_mille) { return below(w, 1000) < per_mille; }

/* ---- the network ---- */
static inline bool sooner(const net_msg *a, const net_msg *b) {
    return a->at != b->at ? a->at < b->at : a->order < b->order;
}

static inline void heap_put(net *w, const net_msg *src, uint64_t at) {
    CHECK(w->heap_len < HEAP, "seed %lu: the network is full", w->seed);
    net_msg *m = malloc(sizeof *m);
    *m = *src;
    m->at = at;
    m->order = ++w->order;
    uint32_t i = w->heap_len++;
    for (; i && sooner(m, w->heap[(i - 1) / 2]); i = (i - 1) / 2) w->heap[i] = w->heap[(i - 1) / 2];
    w->heap[i] = m;
}

static inline net_msg *heap_take(net *w) {
    net_msg *top = w->heap[0], *last = w->heap[--w->heap_len];
    uint32_t i = 0;
    for (uint32_t k; (k = 2 * i + 1) < w->heap_len; i = k) {
        if (k + 1 < w->heap_len && sooner(w->heap[k + 1], w->heap[k])) k++;
        if (!sooner(w->heap[k], last)) break;
        w->heap[i] = w->heap[k];
    }
    if (w->heap_len) w->heap[i] = last;
    return top;
}

static inline void net_send(void *ctx, const void *addr, uint32_t addr_len, const void *msg, uint32_t len) {
    net_node *s = ctx;
    net *w = s->net;
    net_msg m = {.from = s->id, .len = len};
    CHECK(addr_len == 4 && len <= FAB_CONTACT_MAX, "%u %u", addr_len, len);
    memcpy(&m.to, addr, 4);
    memcpy(m.bytes, msg, len);
    w->tape[w->taped++ % TAPE] = m;
    for (uint32_t i = 0; i < len; i++) w->hash = (w->hash ^ m.bytes[i]) * 0x100000001b3ull;
    if (w->drop[m.bytes[6]]) {
        w->drop[m.bytes[6]]--;
        w->dropped[m.bytes[6]] = m;
        return;
    }
    if (chance(w, w->loss)) return;
    uint64_t span = w->delay_max - w->delay_min + 1, at = w->now + w->delay_min + below(w, span);
    if (chance(w, w->dup)) heap_put(w, &m, w->now + w->delay_min + below(w, span));
    if (chance(w, w->corrupt)) {
        uint32_t bit = (uint32_t)below(w, 8 * len);
        m.bytes[bit / 8] ^= (uint8_t)(1u << bit % 8);
        if (chance(w, 100)) m.len = (uint32_t)below(w, len);
    }
    heap_put(w, &m, at);
    if (chance(w, w->replay)) {
        net_msg old = w->tape[below(w, w->taped < TAPE ? w->taped : TAPE)];
        if (chance(w, 200)) { /* to somebody else, or back to where it came from */
            uint32_t t = old.to;
            old.to = chance(w, 500) ? old.from : (uint32_t)below(w, w->n);
            if (old.to == old.from) old.from = t;
        }
        heap_put(w, &old, w->now + below(w, 2000 * MS));
    }
}

/* ---- MACs, as somebody with the secret makes them ---- */
static inline fab_hmac net_key(const char *secret, const char *label) {
    fab_hmac k;
    uint8_t key[FAB_SHA256_BYTES];
    fab_hmac_init(&k, secret, strlen(secret));
    fab_hmac_add(&k, "fabric contact", 14);
    fab_hmac_add(&k, label, strlen(label));
    fab_hmac_end(&k, key);
    fab_hmac_init(&k, key, sizeof key);
    return k;
}
static inline void net_sign(uint8_t *msg, uint32_t len, uint32_t initiator, uint32_t responder, bool bound) {
    fab_hmac k = net_key("the job's secret", "test");
    fab_cw_addr i = {.len = 4}, r = {.len = 4};
    memcpy(i.b, &initiator, 4);
    memcpy(r.b, &responder, 4);
    fab_cw_mac(&k, msg, len, bound ? &i : NULL, bound ? &r : NULL, msg + len - FAB_SHA256_BYTES);
}

/* ---- bodies: both sides can tell whose they are ---- */
static inline uint32_t fill(uint8_t *b, uint32_t who, uint32_t key) {
    uint32_t x = key * 2654435761u + who + 1, len = 8 + (key * 37 + who) % (FAB_CONTACT_BODY - 7);
    memcpy(b, &who, 4);
    memcpy(b + 4, &key, 4);
    for (uint32_t i = 8; i < len; i++) b[i] = (uint8_t)xorshift(&x);
    return len;
}
static inline bool intact(const uint8_t *b, uint32_t len, uint32_t who, uint32_t *key) {
    uint8_t want[FAB_CONTACT_BODY];
    uint32_t w;
    if (len < 8) return false;
    memcpy(&w, b, 4);
    memcpy(key, b + 4, 4);
    return w == who && fill(want, who, *key) == len && memcmp(want, b, len) == 0;
}

/* ---- callbacks ---- */
static inline int net_accept(void *ctx, uint32_t in, const void *addr, uint32_t addr_len, const void *body,
                             uint32_t len, void *reply, uint32_t cap) {
    net_node *s = ctx;
    net *w = s->net;
    uint32_t from, open;
    fab_contact_info info;
    memcpy(&from, addr, 4);
    CHECK(in < TABLE && !s->in[in].live && addr_len == 4 && cap == FAB_CONTACT_BODY, "seed %lu", w->seed);
    CHECK(fab_contact_in_info(s->c, in, &info) == 0 && info.incarnation, "seed %lu", w->seed);
    CHECK(intact(body, len, from, &open), "seed %lu: the body of %u came otherwise", w->seed, from);
    CHECK(open < w->nopens && w->opens[open].to == s->id, "seed %lu: misdirected", w->seed);
    CHECK(!s->strange && !w->node[from].strange, "seed %lu: S1, %u let %u in", w->seed, s->id, from);
    for (uint32_t i = 0; i < TABLE; i++) {
        uint32_t key;
        if (s->in[i].live)
            CHECK(!intact(s->in[i].body, len, from, &key), "seed %lu: a second inbound of %u", w->seed, from);
        if (s->in[i].live)
            CHECK(w->opens[s->in[i].open].node != from, "seed %lu: a second inbound of %u", w->seed, from);
    }
    if (chance(w, w->refuse)) return -EDQUOT;
    s->accepts++;
    s->in[in] = (net_in){.live = 1, .open = open};
    memcpy(s->in[in].body, body, len);
    net_open *o = &w->opens[open];
    o->reply_len = fill(o->reply, s->id, s->accepts); /* what the initiator must get if it comes up by this one */
    memcpy(reply, o->reply, o->reply_len);
    return (int)o->reply_len;
}

static inline net_open *open_of(net_node *s, uint32_t out) {
    CHECK(out < TABLE && s->open_of[out] < s->net->nopens, "seed %lu", s->net->seed);
    return &s->net->opens[s->open_of[out]];
}

static inline void net_up(void *ctx, uint32_t out, const void *body, uint32_t len) {
    net_node *s = ctx;
    net_open *o = open_of(s, out);
    uint64_t seed = s->net->seed;
    CHECK(!o->ups && !o->downs && !o->closed, "seed %lu: C1, up twice", seed);
    CHECK(len == o->reply_len && memcmp(body, o->reply, len) == 0, "seed %lu: up without what accept said", seed);
    o->ups++;
    o->up_at = s->net->now;
}

static inline void net_down(void *ctx, uint32_t out, int32_t status) {
    net_node *s = ctx;
    net_open *o = open_of(s, out);
    CHECK(!o->downs && !o->closed && status < 0, "seed %lu: C1, down twice", s->net->seed);
    o->downs++;
    o->status = status;
    o->ended = s->net->now;
}

static inline void net_gone(void *ctx, uint32_t in, int32_t status) {
    net_node *s = ctx;
    CHECK(in < TABLE && s->in[in].live, "seed %lu: gone twice", s->net->seed);
    CHECK(status == -ECONNRESET || status == -ESTALE || status == -ETIMEDOUT, "%d", status);
    s->in[in].live = 0;
    s->gones++;
}

/* ---- nodes ---- */
static inline void node_start(net *w, uint32_t id) {
    net_node *s = &w->node[id];
    bool strange = s->strange;
    *s = (net_node){.net = w, .id = id, .strange = strange, .inc = rnd(w) | 1, .wake = UINT64_MAX};
    memset(s->open_of, 0xff, sizeof s->open_of);
    fab_contact_cfg cfg = {
        .incarnation = s->inc,
        .interval_ns = INTERVAL,
        .connect_ns = 1000 * MS,
        .seed = rnd(w) | 1,
        .secret = w->secret ? strange ? "another secret" : "the job's secret" : NULL,
        .secret_len = w->secret ? strange ? 14 : 16 : 0,
        .label = "test",
        .self = w->bound ? &id : NULL,
        .self_len = w->bound ? 4 : 0,
        .max_out = TABLE,
        .max_in = TABLE,
        .ctx = s,
        .send = net_send,
        .accept = net_accept,
        .up = net_up,
        .down = net_down,
        .gone = net_gone,
    };
    s->c = fab_contact_new(&cfg);
    CHECK(s->c, "%s", strerror(errno));
}

static inline int node_open(net *w, uint32_t id, uint32_t to, uint64_t inc) {
    net_node *s = &w->node[id];
    uint8_t body[FAB_CONTACT_BODY];
    CHECK(w->nopens < OPENS, "too many opens");
    uint32_t number = w->nopens++, len = fill(body, id, number);
    w->opens[number] = (net_open){.node = id, .to = to, .inc = inc, .at = w->now};
    int out = fab_contact_open(s->c, &to, 4, inc, body, len, w->now);
    if (out < 0) return w->nopens--, out;
    s->open_of[out] = number;
    s->wake = fab_contact_run(s->c, w->now);
    return out;
}

static inline void node_close(net *w, uint32_t id, uint32_t out) {
    net_node *s = &w->node[id];
    net_open *o = open_of(s, out);
    o->closed = 1;
    if (!o->ended) o->ended = w->now;
    CHECK(fab_contact_close(s->c, out, w->now) == 0, "close");
    s->open_of[out] = UINT32_MAX;
}

static inline void node_crash(net *w, uint32_t id) { /* its opens end with it */
    net_node *s = &w->node[id];
    for (uint32_t i = 0; i < TABLE; i++)
        if (s->open_of[i] != UINT32_MAX) w->opens[s->open_of[i]].closed = 1, w->opens[s->open_of[i]].ended = w->now;
    fab_contact_free(s->c);
    s->c = NULL;
    s->crashed_at = w->now;
}

/* Runs until `until`: datagrams and wake-ups in the order of time. A paused node gets what came when it returns. */
static inline void net_run(net *w, uint64_t until) {
    for (;;) {
        uint64_t next = w->heap_len ? w->heap[0]->at : UINT64_MAX;
        net_node *due = NULL;
        for (uint32_t i = 0; i < w->n; i++) {
            net_node *s = &w->node[i];
            if (s->c && !s->paused && s->wake < next) next = s->wake, due = s;
        }
        if (next > until) break;
        if (next > w->now) w->now = next;
        if (due) {
            due->wake = fab_contact_run(due->c, w->now);
            CHECK(due->wake > w->now, "seed %lu: run wants to be called again at once", w->seed);
            continue;
        }
        net_msg *m = heap_take(w);
        net_node *s = &w->node[m->to];
        if (s->c && s->paused) heap_put(w, m, w->now + 50 * MS);
        else if (s->c) {
            w->delivered++;
            fab_contact_datagram(s->c, &m->from, 4, m->bytes, m->len, w->now);
            s->wake = fab_contact_run(s->c, w->now);
        }
        free(m);
    }
    if (until > w->now) w->now = until;
}

static inline net *net_new(uint64_t seed, uint32_t n) {
    net *w = calloc(1, sizeof *w);
    *w = (net){.rng = seed, .seed = seed, .n = n, .now = 1000 * MS, .delay_min = 10000, .delay_max = 2 * MS};
    w->secret = w->bound = true;
    w->opens = calloc(OPENS, sizeof *w->opens);
    return w;
}
static inline void net_start(net *w) {
    for (uint32_t i = 0; i < w->n; i++) node_start(w, i);
}
static inline void net_free(net *w) {
    for (uint32_t i = 0; i < w->n; i++) fab_contact_free(w->node[i].c);
    while (w->heap_len) free(heap_take(w));
    free(w->opens);
    free(w);
}
static inline fab_contact_stats stats_of(net *w, uint32_t id) {
    fab_contact_stats s;
    fab_contact_stats_get(w->node[id].c, &s);
    return s;
}
#endif
