/* contact.c - the contact as its caller sees it: tables, keys, what every datagram must pass, time. */
#include <stdlib.h>
#include <sys/random.h>

#include "contact_int.h"

#define ANSWERS_PER_S 16384u
#define MAX_TABLE (1u << 20)
#define MAX_NS (1ull << 60) /* so that sums of a few of them fit */
#define MIN_NS 1024u

/* Without a secret this is the key: a MAC then finds corruption and mixed-up labels, and proves nothing. */
static const char NO_SECRET[] = "fabric: no secret";

/* ---- small things ------------------------------------------------------------------------------------------------ */

void fab_ct_random(fab_contact *c, void *out, uint32_t len) {
    uint8_t digest[FAB_SHA256_BYTES];
    fab_hmac m = c->random_key;
    uint64_t n = ++c->random_count;
    fab_hmac_add(&m, &n, sizeof n);
    fab_hmac_end(&m, digest);
    memcpy(out, digest, len);
}

static bool for_responder(uint8_t type) {
    return type == FAB_CONTACT_T_HELLO || type == FAB_CONTACT_T_CONFIRM || type == FAB_CONTACT_T_PING ||
           type == FAB_CONTACT_T_BYE;
}

static void make_mac(const fab_contact *c, const uint8_t *msg, uint32_t len, const fab_cw_addr *other,
                     bool other_initiates, uint8_t mac[FAB_SHA256_BYTES]) {
    if (!c->bound) fab_cw_mac(&c->key, msg, len, NULL, NULL, mac);
    else if (other_initiates) fab_cw_mac(&c->key, msg, len, other, &c->self, mac);
    else fab_cw_mac(&c->key, msg, len, &c->self, other, mac);
}

void fab_ct_send(fab_contact *c, const fab_cw_addr *to, fab_cw_msg *m, bool sign) {
    uint8_t buf[FAB_CW_LONG];
    m->version = FAB_CONTACT_VERSION;
    m->from_inc = c->cfg.incarnation;
    uint32_t len = fab_cw_put(buf, m);
    if (sign) make_mac(c, buf, len, to, !for_responder(m->type), buf + len - FAB_SHA256_BYTES);
    c->st.sent[m->type]++;
    c->st.sent_bytes += len;
    c->cfg.send(c->cfg.ctx, to->b, to->len, buf, len);
}

bool fab_ct_signed(const fab_contact *c, const uint8_t *msg, uint32_t len, const fab_cw_addr *from, bool to_responder) {
    uint8_t mac[FAB_SHA256_BYTES];
    make_mac(c, msg, len, from, to_responder, mac);
    return fab_mac_equal(mac, msg + len - FAB_SHA256_BYTES);
}

/* A bucket of a second's worth of answers. */
bool fab_ct_allow(fab_contact *c, fab_ct_bucket *b, uint64_t now) {
    uint64_t ns = fab_ct_since(now, b->at), rate = c->cfg.answers_per_s;
    uint64_t more = ns >= 1000000000u ? rate : ns * rate / 1000000000u;
    if (more) {
        b->tokens = b->tokens + more > rate ? (uint32_t)rate : b->tokens + (uint32_t)more;
        b->at = now;
    } else if (now < b->at) {
        b->at = now;
    }
    if (b->tokens) return b->tokens--, true;
    c->st.limited++;
    return false;
}

/* ---- life -------------------------------------------------------------------------------------------------------- */

static int make_keys(fab_contact *c) {
    const fab_contact_cfg *f = &c->cfg;
    uint8_t key[FAB_SHA256_BYTES], seed[FAB_SHA256_BYTES];
    fab_hmac m;
    if (f->secret_len) fab_hmac_init(&m, f->secret, f->secret_len);
    else fab_hmac_init(&m, NO_SECRET, sizeof NO_SECRET - 1);
    fab_hmac_add(&m, "fabric contact", 14);
    if (f->label) fab_hmac_add(&m, f->label, strlen(f->label));
    fab_hmac_end(&m, key);
    fab_hmac_init(&c->key, key, sizeof key);
    if (f->seed) {
        fab_hmac_init(&m, "fabric contact seed", 19);
        fab_hmac_add(&m, &f->seed, sizeof f->seed);
        fab_hmac_add(&m, &f->incarnation, sizeof f->incarnation);
        fab_hmac_add(&m, c->self.b, c->self.len);
        fab_hmac_end(&m, seed);
    } else if (getrandom(seed, sizeof seed, 0) != (ssize_t)sizeof seed) {
        return errno ? errno : EIO;
    }
    fab_hmac_init(&c->random_key, seed, sizeof seed);
    fab_ct_random(c, key, sizeof key);
    fab_hmac_init(&c->cookie_key, key, sizeof key);
    explicit_bzero(&m, sizeof m);
    explicit_bzero(key, sizeof key);
    explicit_bzero(seed, sizeof seed);
    return 0;
}

static bool cfg_ok(const fab_contact_cfg *f) {
    return f && f->send && f->up && f->down && f->incarnation && f->max_out <= MAX_TABLE && f->max_in <= MAX_TABLE &&
           (f->gone || !f->max_in) && f->self_len <= FAB_CONTACT_ADDR && (!f->self_len || f->self) &&
           (!f->secret_len || f->secret) && (!f->secret || f->secret_len);
}

fab_contact *fab_contact_new(const fab_contact_cfg *cfg) {
    if (!cfg_ok(cfg)) {
        errno = EINVAL;
        return NULL;
    }
    fab_contact *c = calloc(1, sizeof *c);
    if (!c) return NULL;
    c->cfg = *cfg;
    if (!c->cfg.interval_ns) c->cfg.interval_ns = 1000000000u;
    if (!c->cfg.connect_ns) c->cfg.connect_ns = 2000000000u;
    if (!c->cfg.answers_per_s) c->cfg.answers_per_s = ANSWERS_PER_S;
    if (cfg->self_len) memcpy(c->self.b, cfg->self, cfg->self_len);
    c->self.len = cfg->self_len;
    c->bound = cfg->self_len != 0;
    c->next = UINT64_MAX;
    c->known.tokens = c->strangers.tokens = c->cfg.answers_per_s;
    int err = c->cfg.interval_ns < MIN_NS || c->cfg.interval_ns > MAX_NS || c->cfg.connect_ns < MIN_NS ||
                      c->cfg.connect_ns > MAX_NS
                  ? EINVAL
                  : make_keys(c);
    c->cfg.secret = c->cfg.self = c->cfg.label = NULL; /* the caller's, and not needed again */
    c->out = calloc(cfg->max_out + 1, sizeof *c->out);
    c->in = calloc(cfg->max_in + 1, sizeof *c->in);
    c->in_hash = calloc(cfg->max_in + 1, sizeof *c->in_hash);
    if (!err && (!c->out || !c->in || !c->in_hash)) err = ENOMEM;
    if (err) {
        fab_contact_free(c);
        errno = err;
        return NULL;
    }
    for (uint32_t i = 0; i < cfg->max_out; i++) c->out[i].e.next_free = i + 1;
    for (uint32_t i = 0; i < cfg->max_in; i++) c->in[i].next_free = i + 1;
    return c;
}

void fab_contact_free(fab_contact *c) {
    if (!c) return;
    free(c->out);
    free(c->in);
    free(c->in_hash);
    explicit_bzero(c, sizeof *c);
    free(c);
}

static void out_forget(fab_contact *c, uint32_t out) {
    c->out[out].e.state = FAB_CONTACT_FREE;
    c->out[out].e.next_free = c->free_out;
    c->free_out = out;
    c->st.out_used--;
}

void fab_contact_farewell(fab_contact *c) {
    for (uint32_t i = 0; i < c->cfg.max_out; i++) {
        if (c->out[i].e.state == FAB_CONTACT_FREE) continue;
        fab_ct_out_bye(c, &c->out[i]);
        out_forget(c, i);
    }
    for (uint32_t i = 0; i < c->cfg.max_in; i++) {
        if (c->in[i].state != FAB_CONTACT_UP) continue;
        fab_ct_in_bye(c, i, -ECONNRESET);
        fab_ct_in_forget(c, i);
    }
}

/* ---- opening and closing ----------------------------------------------------------------------------------------- */

int fab_contact_open(fab_contact *c, const void *addr, uint32_t addr_len, uint64_t incarnation, const void *body,
                     uint32_t len, uint64_t now) {
    if (!addr || !addr_len || addr_len > FAB_CONTACT_ADDR || len > FAB_CONTACT_BODY || (len && !body)) return -EINVAL;
    for (uint32_t i = 0; i < c->cfg.max_out; i++) {
        const fab_ct_end *e = &c->out[i].e;
        if (e->state == FAB_CONTACT_FREE || e->state == FAB_CONTACT_DOWN) continue;
        if (e->addr.len == addr_len && memcmp(e->addr.b, addr, addr_len) == 0 &&
            (!incarnation || !e->inc || incarnation == e->inc))
            return -EEXIST; /* the responder keeps one connection per address: they would end each other */
    }
    uint32_t out = c->free_out;
    if (out >= c->cfg.max_out) return -ENOSPC;
    fab_ct_out *o = &c->out[out];
    c->free_out = o->e.next_free;
    c->st.out_used++;
    memset(o, 0, sizeof *o);
    o->e.state = FAB_CONTACT_HELLO;
    o->e.inc = incarnation;
    o->e.other = FAB_CONTACT_NONE;
    o->e.interval = c->cfg.interval_ns;
    o->e.addr.len = addr_len;
    memcpy(o->e.addr.b, addr, addr_len);
    o->e.body_len = (uint16_t)len;
    if (len) memcpy(o->e.body, body, len);
    o->deadline = fab_ct_after(now, c->cfg.connect_ns);
    o->rto = c->cfg.connect_ns / 64;
    o->e.heard = o->e.due = now;
    fab_ct_random(c, o->e.nonce_i, FAB_CW_NONCE);
    fab_ct_want(c, fab_ct_out_service(c, out, now, 0));
    return (int)out;
}

int fab_contact_close(fab_contact *c, uint32_t out, uint64_t now) {
    (void)now;
    if (out >= c->cfg.max_out || c->out[out].e.state == FAB_CONTACT_FREE) return -EINVAL;
    fab_ct_out_bye(c, &c->out[out]);
    out_forget(c, out);
    return 0;
}

int fab_contact_drop(fab_contact *c, uint32_t in, uint64_t now) {
    (void)now;
    if (in >= c->cfg.max_in || c->in[in].state != FAB_CONTACT_UP) return -EINVAL;
    fab_ct_in_bye(c, in, -ETIMEDOUT); /* this path only: we live, and another one may be good */
    fab_ct_in_forget(c, in);
    return 0;
}

/* ---- datagrams --------------------------------------------------------------------------------------------------- */

static bool no_mac(const uint8_t *msg, uint32_t len) {
    static const uint8_t zero[FAB_SHA256_BYTES];
    return memcmp(msg + len - FAB_SHA256_BYTES, zero, sizeof zero) == 0;
}

/* Another version: only HELLO and REFUSE, which look alike in all of them, mean anything. */
static int other_version(fab_contact *c, const fab_cw_addr *from, const fab_cw_msg *m, const uint8_t *msg, uint32_t len,
                         uint64_t now) {
    c->st.bad_version++;
    bool sign = fab_ct_signed(c, msg, len, from, m->type == FAB_CONTACT_T_HELLO);
    if (m->type == FAB_CONTACT_T_HELLO) fab_ct_in_turn_away(c, from, m, -EPROTO, sign, now);
    else if (m->type == FAB_CONTACT_T_REFUSE && m->status == -EPROTO) {
        if (sign) fab_ct_out_datagram(c, from, m, now);
        else fab_ct_out_claim(c, from, m, -EPROTO);
    }
    return -EPROTO;
}

int fab_contact_datagram(fab_contact *c, const void *from, uint32_t from_len, const void *msg, uint32_t len,
                         uint64_t now) {
    fab_cw_msg m;
    fab_cw_addr a = {.len = from_len};
    if (!from || !from_len || from_len > FAB_CONTACT_ADDR || (len && !msg)) return -EINVAL;
    memcpy(a.b, from, from_len);
    c->st.received_bytes += len;
    switch (fab_cw_get(&m, msg, len)) {
    case FAB_CW_OK: break;
    case FAB_CW_MAGIC: return c->st.bad_magic++, -EBADMSG;
    case FAB_CW_LENGTH: return c->st.bad_length++, -EBADMSG;
    case FAB_CW_TYPE: return c->st.bad_type++, -EBADMSG;
    default: return other_version(c, &a, &m, msg, len, now);
    }
    c->st.received[m.type]++;
    bool inward = for_responder(m.type);
    if (!fab_ct_signed(c, msg, len, &a, inward)) {
        c->st.bad_mac++;
        if (m.type == FAB_CONTACT_T_HELLO) fab_ct_in_turn_away(c, &a, &m, -EACCES, false, now);
        else if (m.type == FAB_CONTACT_T_REFUSE && no_mac(msg, len)) fab_ct_out_claim(c, &a, &m, -EACCES);
        return -EACCES;
    }
    return inward ? fab_ct_in_datagram(c, &a, &m, now) : fab_ct_out_datagram(c, &a, &m, now);
}

/* ---- time -------------------------------------------------------------------------------------------------------- */

uint64_t fab_contact_run(fab_contact *c, uint64_t now) {
    if (now < c->next) return c->next;
    /* If it was us who stood still (stopped, starved), what we did not hear says nothing about the peers. Not twice in
     * a row: a caller that is always late would never find a loss. */
    uint64_t late = fab_ct_since(now, c->next);
    bool stalled = late > c->cfg.interval_ns / 2;
    if (stalled) c->st.stalls++;
    if (!stalled || c->was_late) late = 0;
    c->was_late = stalled;
    c->next = UINT64_MAX; /* callbacks may open, which lowers it */
    for (uint32_t i = 0; i < c->cfg.max_out; i++) fab_ct_want(c, fab_ct_out_service(c, i, now, late));
    for (uint32_t i = 0; i < c->cfg.max_in; i++) fab_ct_want(c, fab_ct_in_service(c, i, now, late));
    return c->next;
}

void fab_contact_heard(fab_contact *c, uint32_t out, uint64_t now) {
    if (out >= c->cfg.max_out || c->out[out].e.state != FAB_CONTACT_UP) return;
    fab_ct_out *o = &c->out[out];
    o->e.heard = now;
    o->e.quiet = 0;
    /* The responder still wants to hear from us once in an interval. An unanswered ping stays urgent for its sake. */
    uint64_t due = fab_ct_after(o->ping_at[o->e.seq % FAB_CT_PINGS], o->e.interval);
    if (o->acked == o->e.seq && due > o->e.due) o->e.due = due;
}

void fab_contact_heard_in(fab_contact *c, uint32_t in, uint64_t now) {
    if (in >= c->cfg.max_in || c->in[in].state != FAB_CONTACT_UP) return;
    c->in[in].heard = now;
    c->in[in].quiet = 0;
}

/* ---- looking ----------------------------------------------------------------------------------------------------- */

static void info_of(const fab_ct_end *e, fab_contact_info *info) {
    *info = (fab_contact_info){
        .state = e->state,
        .version = e->version,
        .incarnation = e->inc,
        .interval_ns = e->interval,
        .heard_ns = e->heard,
        .addr_len = e->addr.len,
    };
    memcpy(info->addr, e->addr.b, e->addr.len);
}

int fab_contact_out_info(const fab_contact *c, uint32_t out, fab_contact_info *info) {
    if (out >= c->cfg.max_out || c->out[out].e.state == FAB_CONTACT_FREE) return -EINVAL;
    info_of(&c->out[out].e, info);
    info->rtt_ns = c->out[out].rtt;
    return 0;
}

int fab_contact_in_info(const fab_contact *c, uint32_t in, fab_contact_info *info) {
    if (in >= c->cfg.max_in || c->in[in].state == FAB_CONTACT_FREE) return -EINVAL;
    info_of(&c->in[in], info);
    return 0;
}

void fab_contact_stats_get(const fab_contact *c, fab_contact_stats *stats) { *stats = c->st; }

const fab_contact_api *fab_contact_api_get(void) {
    static const fab_contact_api api = {
        .version = 1,
        .struct_size = sizeof api,
        .create = fab_contact_new,
        .destroy = fab_contact_free,
        .farewell = fab_contact_farewell,
        .open = fab_contact_open,
        .close = fab_contact_close,
        .drop = fab_contact_drop,
        .datagram = fab_contact_datagram,
        .run = fab_contact_run,
        .heard = fab_contact_heard,
        .heard_in = fab_contact_heard_in,
        .out_info = fab_contact_out_info,
        .in_info = fab_contact_in_info,
        .stats_get = fab_contact_stats_get,
    };
    return &api;
}
