/* contact_in.c - the responder: answers strangers without remembering them, admits, and notices when they are gone. */
#include "contact_int.h"

static uint32_t hash_of(const fab_cw_addr *a) {
    uint32_t h = 2166136261u;
    for (uint32_t i = 0; i < a->len; i++) h = (h ^ a->b[i]) * 16777619u;
    return h ? h : 1;
}

static uint32_t find_addr(const fab_contact *c, const fab_cw_addr *a) {
    uint32_t h = hash_of(a);
    for (uint32_t i = 0; i < c->cfg.max_in; i++)
        if (c->in_hash[i] == h && fab_ct_same_addr(&c->in[i].addr, a)) return i;
    return FAB_CONTACT_NONE;
}

static bool is_link(const fab_ct_end *e, const fab_cw_addr *from, const fab_cw_msg *m) {
    return e->state == FAB_CONTACT_UP && e->inc == m->from_inc && fab_ct_same_addr(&e->addr, from) &&
           memcmp(e->nonce_i, m->nonce_i, FAB_CW_NONCE) == 0 && memcmp(e->nonce_r, m->nonce_r, FAB_CW_NONCE) == 0;
}

static fab_cw_msg reply_to(const fab_cw_msg *q, uint8_t type) {
    fab_cw_msg m = {.type = type, .to_inc = q->from_inc, .slot_i = q->slot_i, .slot_r = q->slot_r, .seq = q->seq};
    memcpy(m.nonce_i, q->nonce_i, FAB_CW_NONCE);
    memcpy(m.nonce_r, q->nonce_r, FAB_CW_NONCE);
    return m;
}

/* To somebody who has the secret. The nonces bind it to one handshake or connection. */
static void refuse(fab_contact *c, const fab_cw_addr *to, const fab_cw_msg *q, int32_t status, uint64_t now) {
    if (!fab_ct_allow(c, &c->known, now)) return;
    fab_cw_msg m = reply_to(q, FAB_CONTACT_T_REFUSE);
    m.status = status;
    fab_ct_send(c, to, &m, true);
}

/* The answer to a HELLO that we cannot read or trust; `sign` only if its MAC was right: a signed no must not be had for
 * a stranger's asking. */
void fab_ct_in_turn_away(fab_contact *c, const fab_cw_addr *from, const fab_cw_msg *q, int32_t status, bool sign,
                         uint64_t now) {
    if (!fab_ct_allow(c, sign ? &c->known : &c->strangers, now)) return;
    fab_cw_msg m = reply_to(q, FAB_CONTACT_T_REFUSE);
    memset(m.nonce_r, 0, FAB_CW_NONCE);
    m.status = status;
    m.seq = q->version;
    fab_ct_send(c, from, &m, sign);
}

void fab_ct_in_bye(fab_contact *c, uint32_t in, int32_t status) {
    fab_ct_end *e = &c->in[in];
    fab_cw_msg m = {.type = FAB_CONTACT_T_REFUSE, .status = status, .to_inc = e->inc, .slot_i = e->other, .slot_r = in};
    memcpy(m.nonce_i, e->nonce_i, FAB_CW_NONCE);
    memcpy(m.nonce_r, e->nonce_r, FAB_CW_NONCE);
    fab_ct_send(c, &e->addr, &m, true);
}

static void use_up(fab_contact *c, uint64_t stamp) {
    if (stamp > c->floor) c->floor = stamp;
}

/* Its cookie must never admit again. Instead of remembering each dead cookie we refuse all that are as old: a handshake
 * that this hits is told so (-EAGAIN) and begins anew. */
void fab_ct_in_forget(fab_contact *c, uint32_t in) {
    use_up(c, c->in[in].stamp);
    c->in[in].state = FAB_CONTACT_FREE;
    c->in[in].next_free = c->free_in;
    c->in_hash[in] = 0;
    c->free_in = in;
    c->st.in_used--;
}

static void gone(fab_contact *c, uint32_t in, int32_t status) {
    c->in[in].state = FAB_CONTACT_DOWN; /* the number is still its own during the callback */
    c->st.gones++;
    c->cfg.gone(c->cfg.ctx, in, status);
    fab_ct_in_forget(c, in);
}

uint64_t fab_ct_in_service(fab_contact *c, uint32_t in, uint64_t now, uint64_t late) {
    fab_ct_end *e = &c->in[in];
    if (e->state != FAB_CONTACT_UP) return UINT64_MAX;
    if (late) {
        e->heard = now;
        e->quiet = 0;
        e->due = fab_ct_after(now, e->interval);
    }
    if (now < e->due) return e->due;
    uint64_t silent = fab_ct_since(now, e->heard);
    if (silent < e->interval) return e->due = fab_ct_after(e->heard, e->interval);
    if (silent >= 2 * e->interval && e->quiet) {
        fab_ct_in_bye(c, in, e->seq ? -ETIMEDOUT : -EAGAIN); /* it never pinged: let it try again */
        gone(c, in, -ETIMEDOUT);
        return UINT64_MAX;
    }
    e->quiet++; /* looked once in vain: the next look decides */
    uint64_t limit = fab_ct_after(e->heard, 2 * e->interval);
    return e->due = limit > now ? limit : fab_ct_after(now, e->interval / 4);
}

/* ---- datagrams --------------------------------------------------------------------------------------------------- */

static void make_cookie(const fab_contact *c, const fab_cw_addr *from, const fab_cw_msg *q, uint64_t stamp,
                        uint8_t cookie[FAB_SHA256_BYTES]) {
    fab_hmac m = c->cookie_key;
    fab_hmac_add(&m, &from->len, sizeof from->len);
    fab_hmac_add(&m, from->b, from->len);
    fab_hmac_add(&m, &q->from_inc, sizeof q->from_inc);
    fab_hmac_add(&m, q->nonce_i, FAB_CW_NONCE);
    fab_hmac_add(&m, &stamp, sizeof stamp);
    fab_hmac_end(&m, cookie);
}

/* Our own words from a mirror: without addresses in the MAC it would be good. (With them, it is a contact that opened
 * itself.) */
static bool reflected(const fab_contact *c, const fab_cw_msg *m) {
    if (c->bound || m->slot_i >= c->cfg.max_out) return false;
    const fab_ct_end *e = &c->out[m->slot_i].e;
    return e->state != FAB_CONTACT_FREE && memcmp(e->nonce_i, m->nonce_i, FAB_CW_NONCE) == 0;
}

static int on_hello(fab_contact *c, const fab_cw_addr *from, const fab_cw_msg *q, uint64_t now) {
    if (q->to_inc && q->to_inc != c->cfg.incarnation) {
        c->st.stale++;
        refuse(c, from, q, -ESTALE, now);
        return -ESTALE;
    }
    if (!fab_ct_allow(c, &c->known, now)) return -EAGAIN;
    uint8_t cookie[FAB_SHA256_BYTES];
    fab_cw_msg m = reply_to(q, FAB_CONTACT_T_CHALLENGE);
    m.seq = c->last_stamp = now > c->last_stamp ? now : c->last_stamp + 1;
    make_cookie(c, from, q, m.seq, cookie);
    memcpy(m.nonce_r, cookie, FAB_CW_NONCE);
    fab_ct_send(c, from, &m, true);
    return 0;
}

static void send_accept(fab_contact *c, uint32_t in) {
    fab_ct_end *e = &c->in[in];
    fab_cw_msg m = {
        .type = FAB_CONTACT_T_ACCEPT,
        .to_inc = e->inc,
        .slot_i = e->other,
        .slot_r = in,
        .interval = e->interval,
        .body = e->body,
        .body_len = e->body_len,
    };
    memcpy(m.nonce_i, e->nonce_i, FAB_CW_NONCE);
    memcpy(m.nonce_r, e->nonce_r, FAB_CW_NONCE);
    fab_ct_send(c, &e->addr, &m, true);
}

/* Takes a number and asks the owner. Returns 0 or why not. */
static int admit(fab_contact *c, const fab_cw_addr *from, const fab_cw_msg *q, uint64_t now, uint32_t *number) {
    uint32_t in = c->free_in;
    if (in >= c->cfg.max_in) return c->st.full++, -ENOSPC;
    fab_ct_end *e = &c->in[in];
    c->free_in = e->next_free;
    c->st.in_used++;
    memset(e, 0, sizeof *e);
    e->state = FAB_CONTACT_CONFIRM; /* not to be dropped or found yet */
    e->addr = *from;
    e->version = q->version;
    e->inc = q->from_inc;
    e->stamp = q->seq;
    e->other = q->slot_i;
    uint64_t own = c->cfg.interval_ns, least = own / 64;
    e->interval = q->interval < least ? least : q->interval < own ? q->interval : own;
    e->heard = now;
    e->due = fab_ct_after(now, e->interval);
    memcpy(e->nonce_i, q->nonce_i, FAB_CW_NONCE);
    memcpy(e->nonce_r, q->nonce_r, FAB_CW_NONCE);
    int r = c->cfg.accept
                ? c->cfg.accept(c->cfg.ctx, in, from->b, from->len, q->body, q->body_len, e->body, FAB_CONTACT_BODY)
                : -ECONNREFUSED;
    if (r < 0 || r > (int)FAB_CONTACT_BODY) {
        c->st.refused++;
        fab_ct_in_forget(c, in);
        return r < 0 && r >= -4095 ? r : -EINVAL;
    }
    e->body_len = (uint16_t)r;
    e->state = FAB_CONTACT_UP;
    c->in_hash[in] = hash_of(from);
    c->st.ins++;
    fab_ct_want(c, e->due);
    *number = in;
    return 0;
}

static int on_confirm(fab_contact *c, const fab_cw_addr *from, const fab_cw_msg *q, uint64_t now) {
    if (q->to_inc != c->cfg.incarnation) {
        c->st.stale++;
        refuse(c, from, q, -ESTALE, now);
        return -ESTALE;
    }
    uint32_t old = find_addr(c, from), in = 0;
    if (old != FAB_CONTACT_NONE && is_link(&c->in[old], from, q)) {
        c->st.replay++; /* our ACCEPT may have been lost. No sign of life: anybody can repeat what was said */
        send_accept(c, old);
        return -EALREADY;
    }
    uint8_t cookie[FAB_SHA256_BYTES], given[FAB_SHA256_BYTES] = {0};
    make_cookie(c, from, q, q->seq, cookie);
    memset(cookie + FAB_CW_NONCE, 0, sizeof cookie - FAB_CW_NONCE);
    memcpy(given, q->nonce_r, FAB_CW_NONCE);
    bool ours = fab_mac_equal(cookie, given);
    bool over = q->seq <= c->floor || fab_ct_since(now, q->seq) > c->cfg.connect_ns ||
                (old != FAB_CONTACT_NONE && q->seq <= c->in[old].stamp); /* overtaken by a later handshake */
    if (!ours || over) {
        if (ours) c->st.stale++;
        else c->st.bad_cookie++;
        refuse(c, from, q, -EAGAIN, now);
        return -ESTALE;
    }
    if (old != FAB_CONTACT_NONE) gone(c, old, c->in[old].inc == q->from_inc ? -ECONNRESET : -ESTALE);
    int r = admit(c, from, q, now, &in);
    if (r) {
        use_up(c, q->seq); /* one CONFIRM, one verdict */
        refuse(c, from, q, r, now);
        return r == -ENOSPC ? r : -ECONNREFUSED;
    }
    send_accept(c, in);
    return 0;
}

static int on_ping(fab_contact *c, const fab_cw_addr *from, const fab_cw_msg *q, uint64_t now) {
    fab_ct_end *e = q->slot_r < c->cfg.max_in ? &c->in[q->slot_r] : NULL;
    if (!e || !is_link(e, from, q)) { /* an end that it did not hear of, or of our earlier incarnation */
        c->st.stale++;
        refuse(c, from, q, q->to_inc == c->cfg.incarnation ? -ETIMEDOUT : -ESTALE, now); /* we gave it up, and live */
        return -ESTALE;
    }
    if (q->seq <= e->seq) return c->st.replay++, -ESTALE;
    e->seq = q->seq;
    e->heard = now;
    e->quiet = 0;
    fab_cw_msg m = reply_to(q, FAB_CONTACT_T_PONG);
    fab_ct_send(c, from, &m, true);
    return 0;
}

static int on_bye(fab_contact *c, const fab_cw_addr *from, const fab_cw_msg *q) {
    uint32_t in = q->slot_r == FAB_CONTACT_NONE ? find_addr(c, from) : q->slot_r;
    if (in >= c->cfg.max_in || !is_link(&c->in[in], from, q)) return c->st.stale++, -ESTALE;
    gone(c, in, -ECONNRESET);
    return 0;
}

int fab_ct_in_datagram(fab_contact *c, const fab_cw_addr *from, const fab_cw_msg *m, uint64_t now) {
    bool opens = m->type == FAB_CONTACT_T_HELLO || m->type == FAB_CONTACT_T_CONFIRM;
    if (opens && reflected(c, m)) return c->st.reflected++, -ESTALE;
    switch (m->type) {
    case FAB_CONTACT_T_HELLO: return on_hello(c, from, m, now);
    case FAB_CONTACT_T_CONFIRM: return on_confirm(c, from, m, now);
    case FAB_CONTACT_T_PING: return on_ping(c, from, m, now);
    default: return on_bye(c, from, m);
    }
}
