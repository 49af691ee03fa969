/* contact_out.c - the initiator: opens, retransmits, pings, and finds that the other side is lost. */
#include "contact_int.h"

static fab_cw_msg message(const fab_contact *c, const fab_ct_out *o, uint8_t type) {
    fab_cw_msg m = {
        .type = type,
        .to_inc = o->e.inc,
        .slot_i = (uint32_t)(o - c->out),
        .slot_r = o->e.other,
    };
    memcpy(m.nonce_i, o->e.nonce_i, FAB_CW_NONCE);
    memcpy(m.nonce_r, o->e.nonce_r, FAB_CW_NONCE);
    return m;
}

void fab_ct_out_bye(fab_contact *c, const fab_ct_out *o) {
    /* From CONFIRM on the responder may hold us; it finds us by our address while we do not know its number. */
    if (o->e.state != FAB_CONTACT_CONFIRM && o->e.state != FAB_CONTACT_UP) return;
    fab_cw_msg m = message(c, o, FAB_CONTACT_T_BYE);
    fab_ct_send(c, &o->e.addr, &m, true);
}

/* The callback is the last thing done: it may close and open. */
static void fail(fab_contact *c, fab_ct_out *o, int32_t status) {
    o->e.state = FAB_CONTACT_DOWN;
    c->st.downs++;
    c->cfg.down(c->cfg.ctx, (uint32_t)(o - c->out), status);
}

/* A handshake's HELLO or CONFIRM, again and again, with longer and longer pauses. */
static void knock(fab_contact *c, fab_ct_out *o, uint64_t now) {
    fab_cw_msg m = message(c, o, o->e.state == FAB_CONTACT_HELLO ? FAB_CONTACT_T_HELLO : FAB_CONTACT_T_CONFIRM);
    if (o->e.state == FAB_CONTACT_CONFIRM) {
        m.seq = o->e.stamp;
        m.interval = c->cfg.interval_ns;
        m.body = o->e.body;
        m.body_len = o->e.body_len;
    }
    uint64_t jitter, cap = c->cfg.connect_ns / 8;
    fab_ct_random(c, &jitter, sizeof jitter);
    o->e.due = fab_ct_after(now, o->rto - o->rto / 4 + jitter % (o->rto / 2));
    o->rto = 2 * o->rto < cap ? 2 * o->rto : cap;
    if (o->knocked) c->st.resent++;
    o->knocked = true;
    fab_ct_send(c, &o->e.addr, &m, true);
}

static void ping(fab_contact *c, fab_ct_out *o, uint64_t now) {
    fab_cw_msg m = message(c, o, FAB_CONTACT_T_PING);
    m.seq = ++o->e.seq;
    o->ping_at[m.seq % FAB_CT_PINGS] = now;
    o->e.quiet++;
    /* Unanswered, it is repeated soon; but the verdict does not wait for that. */
    uint64_t next = fab_ct_after(now, o->e.interval / 4), limit = fab_ct_after(o->e.heard, 2 * o->e.interval);
    o->e.due = limit > now && limit < next ? limit : next;
    fab_ct_send(c, &o->e.addr, &m, true);
}

uint64_t fab_ct_out_service(fab_contact *c, uint32_t out, uint64_t now, uint64_t late) {
    fab_ct_out *o = &c->out[out];
    fab_ct_end *e = &o->e;
    if (e->state == FAB_CONTACT_FREE || e->state == FAB_CONTACT_DOWN) return UINT64_MAX;
    if (e->state == FAB_CONTACT_UP) {
        if (late) {
            e->heard = e->due = now;
            e->quiet = 0;
        }
        if (now < e->due) return e->due;
        /* Silence counts only where we asked at least twice and gave time to answer. */
        if (fab_ct_since(now, e->heard) >= 2 * e->interval && e->quiet >= 2) {
            fab_ct_out_bye(c, o);
            fail(c, o, -ETIMEDOUT);
            return UINT64_MAX;
        }
        ping(c, o, now);
        return e->due;
    }
    o->deadline = fab_ct_after(o->deadline, late);
    if (now >= o->deadline) {
        fab_ct_out_bye(c, o);
        fail(c, o, o->hint ? o->hint : -ETIMEDOUT);
        return UINT64_MAX;
    }
    if (now >= e->due) knock(c, o, now);
    return e->due < o->deadline ? e->due : o->deadline;
}

/* ---- datagrams --------------------------------------------------------------------------------------------------- */

static fab_ct_out *find(fab_contact *c, const fab_cw_addr *from, const fab_cw_msg *m) {
    if (m->slot_i >= c->cfg.max_out) return NULL;
    fab_ct_out *o = &c->out[m->slot_i];
    bool lives = o->e.state != FAB_CONTACT_FREE && o->e.state != FAB_CONTACT_DOWN;
    return lives && memcmp(o->e.nonce_i, m->nonce_i, FAB_CW_NONCE) == 0 && fab_ct_same_addr(&o->e.addr, from) ? o
                                                                                                              : NULL;
}

static int stale(fab_contact *c) { return c->st.stale++, -ESTALE; }

static int on_challenge(fab_contact *c, fab_ct_out *o, const fab_cw_msg *m, uint64_t now) {
    if (o->e.state != FAB_CONTACT_HELLO) return stale(c); /* the first one is kept */
    if (o->e.inc && o->e.inc != m->from_inc) {
        o->e.version = m->version;
        fail(c, o, -ESTALE);
        return 0;
    }
    o->hint = 0;
    o->e.version = m->version;
    o->e.inc = m->from_inc;
    o->e.stamp = m->seq;
    memcpy(o->e.nonce_r, m->nonce_r, FAB_CW_NONCE);
    o->e.state = FAB_CONTACT_CONFIRM;
    o->rto = c->cfg.connect_ns / 64;
    o->knocked = false;
    knock(c, o, now);
    fab_ct_want(c, o->e.due);
    return 0;
}

static int on_accept(fab_contact *c, fab_ct_out *o, const fab_cw_msg *m, uint64_t now) {
    if (o->e.state != FAB_CONTACT_CONFIRM) return stale(c);
    uint64_t own = c->cfg.interval_ns, least = own / 64; /* a bound on what a peer can make us send */
    o->hint = 0;
    o->e.interval = m->interval < least ? least : m->interval < own ? m->interval : own;
    o->e.state = FAB_CONTACT_UP;
    o->e.other = m->slot_r;
    o->e.heard = now;
    o->e.quiet = 0;
    o->e.seq = o->acked = 0;
    ping(c, o, now); /* so that the responder knows at once that its ACCEPT arrived */
    fab_ct_want(c, o->e.due);
    c->st.ups++;
    c->cfg.up(c->cfg.ctx, m->slot_i, m->body, m->body_len);
    return 0;
}

static int on_pong(fab_contact *c, fab_ct_out *o, const fab_cw_msg *m, uint64_t now) {
    if (o->e.state != FAB_CONTACT_UP) return stale(c);
    if (m->seq <= o->acked || m->seq > o->e.seq || o->e.seq - m->seq >= FAB_CT_PINGS) return c->st.replay++, -ESTALE;
    /* An answer proves life at the time of its question, however long it was on the way or held back. */
    uint64_t asked = o->ping_at[m->seq % FAB_CT_PINGS];
    o->acked = m->seq;
    o->rtt = fab_ct_since(now, asked);
    if (asked > o->e.heard) o->e.heard = asked;
    o->e.quiet = (uint32_t)(o->e.seq - m->seq);
    if (o->e.quiet) return 0; /* a later ping is on its way: it stays as urgent as it is */
    /* On a grid, so that the pings of many peers fall together and run() is called rarely. */
    uint64_t due = fab_ct_after(now, o->e.interval / 2), grid = o->e.interval / 16;
    o->e.due = grid ? fab_ct_after(due, grid - due % grid) : due;
    fab_ct_want(c, o->e.due);
    return 0;
}

static int on_refuse(fab_contact *c, fab_ct_out *o, const fab_cw_msg *m, uint64_t now) {
    o->e.version = m->version;
    bool final = m->status < 0 && m->status >= -4095;
    if (o->e.state == FAB_CONTACT_UP) {
        fail(c, o, final && m->status != -EAGAIN ? m->status : -ETIMEDOUT);
        return 0;
    }
    o->hint = 0;
    if (m->status != -EAGAIN) {
        fail(c, o, final ? m->status : -EPROTO);
        return 0;
    }
    /* This handshake is too old for the responder: another one, with a nonce that no replay can know. */
    fab_ct_random(c, o->e.nonce_i, FAB_CW_NONCE);
    memset(o->e.nonce_r, 0, FAB_CW_NONCE);
    o->e.state = FAB_CONTACT_HELLO;
    o->e.due = fab_ct_after(now, o->rto);
    o->knocked = false;
    fab_ct_want(c, o->e.due);
    return 0;
}

int fab_ct_out_datagram(fab_contact *c, const fab_cw_addr *from, const fab_cw_msg *m, uint64_t now) {
    fab_ct_out *o = find(c, from, m);
    if (!o) return stale(c);
    if (m->type == FAB_CONTACT_T_CHALLENGE) return on_challenge(c, o, m, now);
    /* All others belong to one cookie; a REFUSE of a HELLO has none, as we have none then. */
    if (memcmp(o->e.nonce_r, m->nonce_r, FAB_CW_NONCE) != 0) return stale(c);
    if (m->type == FAB_CONTACT_T_REFUSE) return on_refuse(c, o, m, now);
    if (m->from_inc != o->e.inc) return stale(c);
    return m->type == FAB_CONTACT_T_ACCEPT ? on_accept(c, o, m, now) : on_pong(c, o, m, now);
}

void fab_ct_out_claim(fab_contact *c, const fab_cw_addr *from, const fab_cw_msg *m, int32_t status) {
    fab_ct_out *o = find(c, from, m);
    if (!o || o->e.state != FAB_CONTACT_HELLO) return;
    o->hint = status;
    o->e.version = m->version;
}
