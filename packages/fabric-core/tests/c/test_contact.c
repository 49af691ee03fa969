/* First contact, heartbeat, farewell, case by case: C1, C11, C12, R5, R7, R12, R15, S1, S8, S9. */
#include <stdbool.h>
#include <stdint.h>

#include "contact_net.h"
#include "contact_wire.h"

static int up_pair(net *w) { /* node 0 has node 1 */
    int out = node_open(w, 0, 1, w->node[1].inc);
    CHECK(out >= 0, "%d", out);
    net_run(w, w->now + 100 * MS);
    CHECK(w->opens[w->nopens - 1].ups == 1, "not up");
    return out;
}

static void test_thin(void) {
    net *w = net_new(1, 2);
    net_start(w);
    int out = up_pair(w);
    fab_contact_info i;
    CHECK(fab_contact_out_info(w->node[0].c, (uint32_t)out, &i) == 0 && i.state == FAB_CONTACT_UP, "%u", i.state);
    CHECK(i.incarnation == w->node[1].inc && i.version == 1 && i.rtt_ns && i.interval_ns == INTERVAL, "info");
    CHECK(node_open(w, 0, 1, 0) == -EEXIST, "two connections to one address");
    net_run(w, w->now + 5000 * MS);
    fab_contact_stats a = stats_of(w, 0), b = stats_of(w, 1);
    CHECK(a.ups == 1 && !a.downs && a.sent[FAB_CONTACT_T_HELLO] == 1 && a.sent[FAB_CONTACT_T_CONFIRM] == 1,
          "handshake");
    CHECK(a.sent[FAB_CONTACT_T_PING] >= 25 && a.sent[FAB_CONTACT_T_PING] <= 55, "%lu pings in 25 intervals",
          a.sent[FAB_CONTACT_T_PING]);
    CHECK(b.ins == 1 && !b.gones && b.sent[FAB_CONTACT_T_PONG] == a.sent[FAB_CONTACT_T_PING], "pongs");
    /* Signs of life that come another way spare pings, down to the one in an interval that the other side needs. */
    for (int k = 0; k < 2500; k++) {
        net_run(w, w->now + 2 * MS);
        fab_contact_heard(w->node[0].c, (uint32_t)out, w->now);
    }
    uint64_t spared = stats_of(w, 0).sent[FAB_CONTACT_T_PING] - a.sent[FAB_CONTACT_T_PING];
    CHECK(spared >= 24 && spared <= 27, "%lu pings in 25 busy intervals", spared);
    node_close(w, 0, (uint32_t)out);
    net_run(w, w->now + 10 * MS);
    CHECK(w->node[1].gones == 1 && stats_of(w, 1).in_used == 0 && stats_of(w, 0).out_used == 0, "farewell");
    out = up_pair(w); /* the responder ends it */
    for (uint32_t k = 0; k < TABLE; k++) {
        if (!w->node[1].in[k].live) continue;
        CHECK(!fab_contact_drop(w->node[1].c, k, w->now), "drop");
        w->node[1].in[k].live = 0;
    }
    net_run(w, w->now + 10 * MS);
    CHECK(open_of(&w->node[0], (uint32_t)out)->status == -ETIMEDOUT, "%d: a path, not a process",
          open_of(&w->node[0], (uint32_t)out)->status);
    net_free(w);
}

/* R5, R7: an end is named in time, and the next incarnation is told apart. */
static void test_loss_and_restart(void) {
    net *w = net_new(2, 3);
    net_start(w);
    int out = up_pair(w);
    CHECK(node_open(w, 2, 0, 0) >= 0, "open");
    net_run(w, w->now + 777 * MS);
    net_open *o = open_of(&w->node[0], (uint32_t)out);
    node_crash(w, 1);
    uint64_t t0 = w->now;
    net_run(w, t0 + 3 * INTERVAL);
    CHECK(o->downs == 1 && o->status == -ETIMEDOUT && o->ended - t0 <= 2 * INTERVAL, "%d %lu", o->status,
          o->ended - t0);
    node_close(w, 0, (uint32_t)out);
    CHECK(w->opens[1].ups == 1 && !w->opens[1].downs, "another peer suffered");

    node_start(w, 1); /* the old incarnation's address: refused at once, not at the deadline */
    t0 = w->now;
    out = node_open(w, 0, 1, 12345);
    net_run(w, t0 + 20 * MS);
    o = open_of(&w->node[0], (uint32_t)out);
    CHECK(o->downs == 1 && o->status == -ESTALE, "%d", o->status);
    CHECK(stats_of(w, 1).sent[FAB_CONTACT_T_REFUSE] == 1 && !stats_of(w, 1).sent[FAB_CONTACT_T_CHALLENGE],
          "which it is not");
    node_close(w, 0, (uint32_t)out);

    out = up_pair(w); /* a restart between two pings: the next ping finds it */
    o = open_of(&w->node[0], (uint32_t)out);
    node_crash(w, 1);
    node_start(w, 1);
    t0 = w->now;
    net_run(w, t0 + INTERVAL);
    CHECK(o->status == -ESTALE, "%d", o->status);
    node_close(w, 0, (uint32_t)out);

    out = up_pair(w); /* the initiator restarts: its old inbound goes, then the new one comes */
    uint32_t gones = w->node[1].gones;
    node_crash(w, 0);
    node_start(w, 0);
    up_pair(w);
    CHECK(w->node[1].gones == gones + 1 && stats_of(w, 1).in_used == 1, "the old inbound stayed");
    net_free(w);
}

/* SIGSTOP of one side: found by the other within two intervals; on return it reconnects, and blames nobody. */
static void test_pause(void) {
    net *w = net_new(3, 3);
    net_start(w);
    int out = up_pair(w), back = node_open(w, 1, 2, 0);
    net_run(w, w->now + 900 * MS);
    net_open *o = open_of(&w->node[0], (uint32_t)out), *b = open_of(&w->node[1], (uint32_t)back);
    w->node[1].paused = true;
    uint64_t t0 = w->now;
    net_run(w, t0 + 1500 * MS);
    CHECK(o->status == -ETIMEDOUT && o->ended - t0 <= 2 * INTERVAL, "%d after %lu", o->status, o->ended - t0);
    node_close(w, 0, (uint32_t)out);
    CHECK(w->node[2].gones == 1, "its inbound was not missed");
    w->node[1].paused = false;
    net_run(w, w->now + 200 * MS);
    CHECK(stats_of(w, 1).stalls == 1, "%lu", stats_of(w, 1).stalls);
    CHECK(b->downs == 1 && b->status == -ETIMEDOUT, "%d: node 2 had given it up, and said so", b->status);
    node_close(w, 1, (uint32_t)back);
    up_pair(w);
    CHECK(node_open(w, 1, 2, 0) >= 0, "open");
    net_run(w, w->now + 100 * MS);
    CHECK(w->opens[w->nopens - 1].ups == 1, "no way back");

    /* Everybody stops for as long (a laptop's lid): nobody is lost. */
    uint32_t downs = 0;
    for (uint32_t i = 0; i < 3; i++) w->node[i].paused = true;
    net_run(w, w->now + 5000 * MS);
    for (uint32_t i = 0; i < 3; i++) w->node[i].paused = false;
    net_run(w, w->now + 2000 * MS);
    for (uint32_t i = w->nopens - 2; i < w->nopens; i++) downs += w->opens[i].downs;
    CHECK(downs == 0, "%u lost by silence that says nothing", downs);

    /* The same after a moment in which answers were lost: the silence before does not count either. */
    w->loss = 1000;
    net_run(w, w->now + 3 * INTERVAL / 2);
    w->loss = 0;
    for (uint32_t i = 0; i < 3; i++) w->node[i].paused = true;
    net_run(w, w->now + 1000 * MS);
    for (uint32_t i = 0; i < 3; i++) w->node[i].paused = false;
    net_run(w, w->now + 2000 * MS);
    for (uint32_t i = w->nopens - 2; i < w->nopens; i++) downs += w->opens[i].downs;
    CHECK(downs == 0, "%u lost by silence that says nothing", downs);

    /* A caller that is always late still finds a loss. */
    node_crash(w, 1);
    o = &w->opens[w->nopens - 2];
    for (int k = 0; k < 12 && !o->downs; k++) fab_contact_run(w->node[0].c, w->now += 2 * INTERVAL);
    CHECK(o->downs == 1, "a late caller never finds a loss");
    net_free(w);
}

/* S1: another secret or label is never let in, and is told from silence. */
static void test_secret(void) {
    net *w = net_new(4, 2);
    w->node[1].strange = true;
    net_start(w);
    for (int k = 0; k < 2; k++) {
        int out = node_open(w, k ? 1 : 0, k ? 0 : 1, 0);
        uint64_t t0 = w->now;
        net_run(w, t0 + 1200 * MS);
        net_open *o = open_of(&w->node[k], (uint32_t)out);
        CHECK(o->status == -EACCES && !o->ups && o->ended - t0 == 1000 * MS, "%d", o->status);
        fab_contact_stats s = stats_of(w, k ? 0 : 1);
        CHECK(s.bad_mac && s.in_used == 0 && s.ins == 0, "not counted"); /* S9 */
    }
    node_crash(w, 1); /* nobody there is not the same */
    node_close(w, 0, 0);
    int out = node_open(w, 0, 1, 0);
    net_run(w, w->now + 1200 * MS);
    CHECK(open_of(&w->node[0], (uint32_t)out)->status == -ETIMEDOUT, "silence");
    net_free(w);
}

/* ---- forged, reflected, replayed, truncated ---- */

static void feed(net *w, uint32_t to, uint32_t from, const net_msg *m, int want) {
    int r = fab_contact_datagram(w->node[to].c, &from, 4, m->bytes, m->len, w->now);
    CHECK(r == want, "type %u from %u to %u: %d, not %d", m->bytes[6], from, to, r, want);
}

static void test_replay(bool bound) {
    net *w = net_new(5, 3);
    w->bound = bound;
    net_start(w);
    int out = up_pair(w);
    net_run(w, w->now + 500 * MS);
    node_close(w, 0, (uint32_t)out);
    net_run(w, w->now + 100 * MS);
    out = up_pair(w); /* so that there is a live connection which replays of the former could touch */
    net_run(w, w->now + 500 * MS);
    fab_contact_stats a0 = stats_of(w, 0), b0 = stats_of(w, 1);
    uint32_t accepts = w->node[1].accepts, taped = w->taped;
    static net_msg tape[TAPE]; /* answers are taped too: not while we play */
    memcpy(tape, w->tape, sizeof tape);
    CHECK(taped <= TAPE, "%u", taped);
    for (uint32_t i = 0; i < taped; i++) {
        net_msg m = tape[i];
        fab_contact_datagram(w->node[m.to].c, &m.from, 4, m.bytes, m.len, w->now);   /* replayed */
        fab_contact_datagram(w->node[m.from].c, &m.to, 4, m.bytes, m.len, w->now);   /* reflected */
        fab_contact_datagram(w->node[2].c, &m.from, 4, m.bytes, m.len, w->now);      /* misdirected */
        for (uint32_t len = 0; len < m.len; len++) {                                 /* truncated */
            net_msg cut = m;
            cut.len = len;
            feed(w, m.to, m.from, &cut, -EBADMSG);
        }
        for (uint32_t bit = 0; bit < 8 * m.len; bit += SLOW ? 61 : 13) { /* corrupted */
            net_msg bad = m;
            bad.bytes[bit / 8] ^= (uint8_t)(1u << bit % 8);
            int r = fab_contact_datagram(w->node[m.to].c, &m.from, 4, bad.bytes, bad.len, w->now);
            CHECK(r == -EBADMSG || r == -EACCES || r == -EPROTO, "bit %u: %d", bit, r);
        }
    }
    fab_contact_stats a1 = stats_of(w, 0), b1 = stats_of(w, 1), c1 = stats_of(w, 2);
    CHECK(w->node[1].accepts == accepts && b1.in_used == 1 && !w->node[2].accepts && !c1.in_used, "S1: state was made");
    CHECK(a1.downs == a0.downs && b1.gones == b0.gones && a1.ups == a0.ups, "S1: a replay ended something");
    CHECK(b1.replay > b0.replay && b1.stale > b0.stale && a1.stale > a0.stale, "S9: not counted");
    CHECK(a1.replay > a0.replay, "S9: an answer taken twice");
    CHECK(b1.bad_mac > b0.bad_mac && b1.bad_length > b0.bad_length && b1.bad_magic > b0.bad_magic, "S9: not counted");
    if (bound) CHECK(c1.bad_mac, "a misdirected datagram passed");
    net_run(w, w->now + 2000 * MS);
    CHECK(!open_of(&w->node[0], (uint32_t)out)->downs && stats_of(w, 1).in_used == 1, "the live connection suffered");

    /* After the end nothing can be brought back, however fresh the cookie is. */
    node_close(w, 0, (uint32_t)out);
    net_run(w, w->now + 100 * MS);
    out = up_pair(w);
    node_close(w, 0, (uint32_t)out);
    net_run(w, w->now + 50 * MS);
    accepts = w->node[1].accepts;
    memcpy(tape, w->tape, sizeof tape);
    for (uint32_t i = 0; i < TAPE; i++) {
        net_msg m = tape[i];
        if (m.to == 1) fab_contact_datagram(w->node[1].c, &m.from, 4, m.bytes, m.len, w->now);
    }
    CHECK(w->node[1].accepts == accepts && !stats_of(w, 1).in_used, "S1: a replayed CONFIRM raised the dead");
    net_free(w);
}

/* A mirror that sends everything back to us under the peer's address must not make us our own peer. */
static void test_mirror(bool bound) {
    net *w = net_new(6, 2);
    w->bound = bound;
    net_start(w);
    node_crash(w, 1);
    int out = node_open(w, 0, 1, 0);
    for (uint32_t seen = 0, k = 0; k < 400; k++) {
        for (; seen < w->taped; seen++) {
            net_msg m = w->tape[seen % TAPE];
            fab_contact_datagram(w->node[0].c, &m.to, 4, m.bytes, m.len, w->now);
        }
        net_run(w, w->now + 5 * MS);
    }
    net_open *o = open_of(&w->node[0], (uint32_t)out);
    CHECK(!o->ups && o->downs == 1, "S1: connected to its own mirror image");
    CHECK(o->status == (bound ? -EACCES : -ETIMEDOUT), "%d", o->status);
    CHECK(bound || stats_of(w, 0).reflected, "S9: not counted");
    if (bound) { /* but a contact may open itself */
        CHECK((out = node_open(w, 0, 0, 0)) >= 0, "open");
        net_run(w, w->now + 100 * MS);
        CHECK(open_of(&w->node[0], (uint32_t)out)->ups == 1, "not up with itself");
    }
    net_free(w);
}

/* S1: without the secret nobody ends a handshake or a connection. */
static void test_forged(void) {
    net *w = net_new(7, 2);
    net_start(w);
    int out = node_open(w, 0, 1, 0);
    net_msg hello = w->tape[0];
    fab_cw_msg m;
    CHECK(fab_cw_get(&m, hello.bytes, hello.len) == FAB_CW_OK && m.type == FAB_CONTACT_T_HELLO, "the first word");
    for (int k = 0; k < 2; k++) {
        for (int type = 1; type < FAB_CONTACT_TYPES; type++)
            for (int version = 1; version <= 2; version++) {
                net_msg f = {0};
                fab_cw_msg q = m;
                q.type = (uint8_t)type;
                q.version = (uint16_t)version;
                q.status = -EPROTO;
                q.body_len = 0;
                f.len = fab_cw_put(f.bytes, &q);
                memset(f.bytes + f.len - 32, type, k ? 32 : 0);
                feed(w, 0, 1, &f, version == 2 ? -EPROTO : -EACCES);
            }
    }
    net_run(w, w->now + 100 * MS);
    net_open *o = open_of(&w->node[0], (uint32_t)out);
    CHECK(o->ups == 1 && !o->downs, "a stranger's word counted");
    net_free(w);
}

/* C11: any datagram of a handshake may be lost once or twice; the same handshake is repaired, nobody is admitted twice. */
static void test_lost_once(void) {
    for (int type = FAB_CONTACT_T_HELLO; type <= FAB_CONTACT_T_ACCEPT; type++)
        for (uint32_t times = 1; times <= 2; times++) {
            net *w = net_new(20, 2);
            net_start(w);
            w->drop[type] = times;
            up_pair(w); /* two retransmissions come within 100 ms */
            CHECK(w->node[1].accepts == 1 && stats_of(w, 0).resent == times, "type %d, %u times", type, times);
            net_free(w);
        }
}

/* A handshake that its responder cannot honour any more begins anew, with another nonce. */
static void test_begins_anew(void) {
    net *w = net_new(21, 3);
    net_start(w);
    w->drop[FAB_CONTACT_T_CONFIRM] = 1;
    int out = node_open(w, 0, 1, 0);
    net_run(w, w->now + 5 * MS);
    net_msg confirm = w->dropped[FAB_CONTACT_T_CONFIRM];
    int other = node_open(w, 2, 1, 0); /* a later cookie, used up */
    net_run(w, w->now + 8 * MS);
    CHECK(w->opens[1].ups == 1, "up");
    node_close(w, 2, (uint32_t)other);
    net_run(w, w->now + 100 * MS);
    CHECK(open_of(&w->node[0], (uint32_t)out)->ups == 1 && stats_of(w, 1).stale, "no second beginning");
    net_msg again = {0};
    for (uint32_t i = 0; i < w->taped; i++)
        if (w->tape[i].from == 0 && w->tape[i].bytes[6] == FAB_CONTACT_T_HELLO) again = w->tape[i];
    CHECK(memcmp(again.bytes + 32, confirm.bytes + 32, FAB_CW_NONCE) != 0, "the nonce of the first attempt");
    net_free(w);
}

/* CONFIRMs that nobody may act on: overtaken by a later handshake, expired, with a cookie that is made up or another's. */
static void test_late_confirm(void) {
    net *w = net_new(22, 3);
    net_start(w);
    w->drop[FAB_CONTACT_T_CONFIRM] = UINT32_MAX;
    int out = node_open(w, 0, 1, 0);
    net_run(w, w->now + 10 * MS);
    net_msg confirm = w->dropped[FAB_CONTACT_T_CONFIRM], forged = confirm;
    node_close(w, 0, (uint32_t)out);
    w->drop[FAB_CONTACT_T_CONFIRM] = 0;
    out = up_pair(w);
    feed(w, 1, 0, &confirm, -ESTALE);
    CHECK(w->node[1].accepts == 1 && !w->node[1].gones, "C11: the older handshake won");
    node_close(w, 0, (uint32_t)out);

    w->drop[FAB_CONTACT_T_CONFIRM] = UINT32_MAX;
    net_run(w, w->now + 10 * MS);
    out = node_open(w, 0, 1, 0);
    net_run(w, w->now + 10 * MS);
    confirm = w->dropped[FAB_CONTACT_T_CONFIRM];
    forged = confirm;
    forged.bytes[48] ^= 1; /* the cookie */
    net_sign(forged.bytes, forged.len, 0, 1, true);
    fab_contact_stats before = stats_of(w, 1);
    feed(w, 1, 0, &forged, -ESTALE);
    forged = confirm;
    net_sign(forged.bytes, forged.len, 2, 1, true);
    feed(w, 1, 2, &forged, -ESTALE); /* from another address than the one that was challenged */
    CHECK(stats_of(w, 1).bad_cookie == before.bad_cookie + 2 && w->node[1].accepts == 1, "S1: a made-up cookie");
    node_close(w, 0, (uint32_t)out);
    net_run(w, w->now + 1500 * MS);
    feed(w, 1, 0, &confirm, -ESTALE);
    CHECK(w->node[1].accepts == 1, "S1: an expired cookie");
    net_free(w);
}

/* An ACCEPT must name the cookie that it answers, and a claim that something signed contradicts is forgotten. */
static void test_bound_answers(void) {
    net *w = net_new(23, 2);
    net_start(w);
    w->drop[FAB_CONTACT_T_ACCEPT] = UINT32_MAX;
    int out = node_open(w, 0, 1, 0);
    net_msg claim = w->tape[0]; /* an unsigned REFUSE, before anything signed came */
    claim.bytes[6] = FAB_CONTACT_T_REFUSE;
    memset(claim.bytes + claim.len - 32, 0, 32);
    feed(w, 0, 1, &claim, -EACCES);
    net_run(w, w->now + 20 * MS);
    net_msg accept = w->dropped[FAB_CONTACT_T_ACCEPT];
    CHECK(accept.len, "no ACCEPT");
    accept.bytes[48] ^= 1;
    net_sign(accept.bytes, accept.len, 0, 1, true);
    feed(w, 0, 1, &accept, -ESTALE);
    net_open *o = open_of(&w->node[0], (uint32_t)out);
    CHECK(!o->ups, "S1: up by another cookie's ACCEPT");
    node_crash(w, 1);
    net_run(w, w->now + 1100 * MS);
    CHECK(o->status == -ETIMEDOUT, "%d: a stranger's claim outlived the proof", o->status);
    net_free(w);
}

/* S1: what a dead peer said is no sign of life. */
static void test_dead_is_silent(void) {
    net *w = net_new(24, 2);
    net_start(w);
    up_pair(w);
    net_run(w, w->now + 1000 * MS);
    static net_msg tape[TAPE];
    memcpy(tape, w->tape, sizeof tape);
    node_crash(w, 0);
    uint64_t t0 = w->now;
    for (; w->now < t0 + 3 * INTERVAL; net_run(w, w->now + 10 * MS))
        for (uint32_t i = 0; i < TAPE; i++)
            if (tape[i].len && tape[i].to == 1)
                fab_contact_datagram(w->node[1].c, &tape[i].from, 4, tape[i].bytes, tape[i].len, w->now);
    CHECK(w->node[1].gones == 1 && w->node[1].accepts == 1, "replays keep the dead alive");
    net_free(w);
}

/* ---- R15: versions ---- */

static bool is_signed(const net_msg *m) {
    static const uint8_t zero[32];
    return memcmp(m->bytes + m->len - 32, zero, 32) != 0;
}

static void test_version(void) {
    for (int known = 0; known < 2; known++) {
        net *w = net_new(8, 2);
        net_start(w);
        /* A newer peer asks us: it learns both versions, signed only if we could check who asks. */
        net_msg hello = {.len = FAB_CW_MIN}, no;
        fab_cw_msg q = {.version = 2, .type = FAB_CONTACT_T_HELLO, .from_inc = 9, .slot_i = 3}, a;
        memset(q.nonce_i, 0x5a, sizeof q.nonce_i);
        fab_cw_put(hello.bytes, &q);
        if (known) net_sign(hello.bytes, hello.len, 0, 1, true);
        feed(w, 1, 0, &hello, -EPROTO);
        no = w->tape[0];
        CHECK(w->taped == 1 && fab_cw_get(&a, no.bytes, no.len) == FAB_CW_OK && a.type == FAB_CONTACT_T_REFUSE,
              "no answer");
        CHECK(a.version == 1 && a.seq == 2 && a.status == -EPROTO && a.slot_i == 3 && no.len <= hello.len, "R15");
        CHECK(memcmp(a.nonce_i, q.nonce_i, sizeof q.nonce_i) == 0 && is_signed(&no) == (known != 0), "bound to it");

        /* We ask a newer peer. */
        int out = node_open(w, 0, 1, 0);
        hello = w->tape[1];
        CHECK(fab_cw_get(&q, hello.bytes, hello.len) == FAB_CW_OK, "hello");
        node_crash(w, 1);
        q.version = 2;
        q.type = FAB_CONTACT_T_REFUSE;
        q.status = -EPROTO;
        no.len = fab_cw_put(no.bytes, &q);
        if (known) net_sign(no.bytes, no.len, 0, 1, true);
        feed(w, 0, 1, &no, -EPROTO);
        net_open *o = open_of(&w->node[0], (uint32_t)out);
        CHECK(o->downs == (uint32_t)known, "a word that we cannot check ends nothing at once, one that we can does");
        net_run(w, w->now + 1100 * MS);
        fab_contact_info i;
        CHECK(o->status == -EPROTO && !fab_contact_out_info(w->node[0].c, (uint32_t)out, &i) && i.version == 2, "R15");
        net_free(w);
    }
}

/* R15: the bytes of version 1. Whoever changes them makes another version. */
static void test_golden(void) {
    uint8_t buf[FAB_CW_LONG], hash[32], body[3] = "abc";
    static const uint8_t want[32] = {0xd4, 0xff, 0xdf, 0x3e, 0xfb, 0x89, 0x98, 0x4c, 0x55, 0x7a, 0x50,
                                     0x12, 0xcc, 0x10, 0x68, 0xfb, 0xef, 0x67, 0x84, 0x4f, 0xd8, 0x76,
                                     0xcb, 0xa1, 0x4b, 0x14, 0x81, 0xe7, 0x03, 0xb5, 0x95, 0x8e};
    fab_sha256 all;
    fab_sha256_init(&all);
    for (int type = 1; type < FAB_CONTACT_TYPES; type++) {
        fab_cw_msg m = {.version = 1,
                        .type = (uint8_t)type,
                        .status = -EPROTO,
                        .from_inc = 0x1122334455667788,
                        .to_inc = 2,
                        .slot_i = 3,
                        .slot_r = 4,
                        .seq = 5,
                        .interval = 6},
                   back;
        m.body = body;
        m.body_len = type == FAB_CONTACT_T_CONFIRM || type == FAB_CONTACT_T_ACCEPT ? 3 : 0;
        memset(m.nonce_i, 7, 16);
        memset(m.nonce_r, 8, 16);
        uint32_t len = fab_cw_put(buf, &m);
        fab_hmac k;
        fab_hmac_init(&k, "key", 3);
        fab_cw_mac(&k, buf, len, NULL, NULL, buf + len - 32);
        CHECK(fab_cw_get(&back, buf, len) == FAB_CW_OK && back.seq == 5 && back.from_inc == m.from_inc, "%d", type);
        CHECK(back.body_len == m.body_len && memcmp(back.body, body, m.body_len) == 0 && back.status == -EPROTO, "%d",
              type);
        fab_sha256_add(&all, buf, len);
    }
    fab_sha256_end(&all, hash);
    if (memcmp(hash, want, 32))
        for (int i = 0; i < 32; i++) fprintf(stderr, "0x%02x,%s", hash[i], i == 31 ? "\n" : " ");
    CHECK(memcmp(hash, want, 32) == 0, "R15: the wire form changed");
}

/* ---- S8: floods ---- */

static uint64_t answers, answer_bytes;
static void count_send(void *ctx, const void *addr, uint32_t addr_len, const void *msg, uint32_t len) {
    (void)ctx, (void)addr, (void)addr_len, (void)msg;
    answers++;
    answer_bytes += len;
}
static int never_accept(void *c, uint32_t i, const void *a, uint32_t n, const void *b, uint32_t l, void *r,
                        uint32_t k) {
    (void)c, (void)i, (void)a, (void)n, (void)b, (void)l, (void)r, (void)k;
    return -EPERM;
}
static void ignore_up(void *c, uint32_t o, const void *b, uint32_t l) { (void)c, (void)o, (void)b, (void)l; }
static void ignore_down(void *c, uint32_t o, int32_t s) { (void)c, (void)o, (void)s; }

static void test_flood(bool secret) {
    fab_contact_cfg cfg = {.incarnation = 1,
                           .seed = 1,
                           .max_out = 4,
                           .max_in = 4,
                           .send = count_send,
                           .accept = never_accept,
                           .up = ignore_up,
                           .down = ignore_down,
                           .gone = ignore_down,
                           .secret = secret ? "x" : NULL,
                           .secret_len = secret,
                           .answers_per_s = 1000};
    fab_contact *c = fab_contact_new(&cfg);
    uint64_t n = SLOW ? 20000 : secret ? 100000 : 1000000, now = 1, got = 0;
    fab_contact_stats s;
    uint8_t buf[FAB_CW_LONG];
    fab_hmac k = net_key("fabric: no secret", "");
    answers = answer_bytes = 0;
    for (uint64_t i = 0; i < n; i++, now += 1000) {
        fab_cw_msg q = {.version = i % 17 ? 1 : 2, .type = i % 5 ? 1 : (uint8_t)(i % 11), .from_inc = i + 1, .seq = i};
        memcpy(q.nonce_i, &i, 8);
        uint32_t len = fab_cw_put(buf, &q), from[4] = {(uint32_t)i * 2654435761u, (uint32_t)i, 7, 9};
        fab_cw_mac(&k, buf, len, NULL, NULL, buf + len - 32);
        uint64_t before = answers, bytes = answer_bytes;
        fab_contact_datagram(c, from, sizeof from, buf, len, now);
        CHECK(answers - before <= 1 && answer_bytes - bytes <= len, "an answer longer than its question");
        got += len;
    }
    fab_contact_stats_get(c, &s);
    CHECK(!s.in_used && !s.out_used && !s.ins && fab_contact_run(c, now) == UINT64_MAX, "S8: state of strangers");
    CHECK(answers && answer_bytes < got && s.limited, "S8: amplification");
    uint64_t most = 2 * (1000 + now / 1000000 + 1); /* both buckets: a second's worth, and 1000 a second */
    CHECK(answers <= most, "S8: %lu answers, at most %lu", answers, most);
    fab_contact_free(c);
}

/* C11: full tables are an answer. */
static void test_full(void) {
    net *w = net_new(9, 2);
    net_start(w);
    uint32_t far = 1000;
    for (uint32_t i = 0; i < TABLE; i++, far++)
        CHECK(fab_contact_open(w->node[0].c, &far, 4, 0, NULL, 0, w->now) >= 0, "open");
    CHECK(fab_contact_open(w->node[0].c, &far, 4, 0, NULL, 0, w->now) == -ENOSPC, "one more");
    CHECK(fab_contact_open(w->node[0].c, &far, 0, 0, NULL, 0, w->now) == -EINVAL, "no address");
    CHECK(fab_contact_open(w->node[0].c, &far, 4, 0, &far, 257, w->now) == -EINVAL, "long body");
    CHECK(fab_contact_close(w->node[0].c, TABLE, 0) == -EINVAL && fab_contact_drop(w->node[0].c, 0, 0) == -EINVAL,
          "ends");
    for (uint32_t i = 0; i < TABLE; i++) CHECK(!fab_contact_close(w->node[0].c, i, 0), "close");
    CHECK(stats_of(w, 0).out_used == 0 && fab_contact_close(w->node[0].c, 0, 0) == -EINVAL, "empty");
    fab_contact_cfg bad = {.incarnation = 1};
    CHECK(!fab_contact_new(&bad) && errno == EINVAL && !fab_contact_new(NULL), "a configuration without callbacks");
    while (w->heap_len) free(heap_take(w));
    net_free(w);
    const fab_contact_api *api = fab_contact_api_get();
    CHECK(api->version == 1 && api->struct_size == sizeof *api && api->create == fab_contact_new && api->stats_get,
          "api");
}

/* Clock: stands still, jumps, runs back. Nobody crashes, nobody is lost by it. */
static void test_clock(void) {
    net *w = net_new(10, 2);
    net_start(w);
    int out = up_pair(w);
    for (int k = 0; k < 50; k++) {
        net_run(w, w->now + INTERVAL);
        if (k % 5 == 0) w->now += 3000 * MS + below(w, 9000 * MS);
    }
    CHECK(!open_of(&w->node[0], (uint32_t)out)->downs, "lost by a jump of the clock");
    for (int k = 0; k < 100; k++) {
        fab_contact_run(w->node[0].c, below(w, w->now));
        net_msg m = w->tape[below(w, 20)];
        fab_contact_datagram(w->node[m.to].c, &m.from, 4, m.bytes, m.len, below(w, w->now));
        fab_contact_run(w->node[1].c, UINT64_MAX - below(w, 3));
    }
    net_free(w);
}

int main(void) {
    test_golden();
    test_thin();
    test_loss_and_restart();
    test_pause();
    test_secret();
    for (int bound = 0; bound < 2; bound++) {
        test_replay(bound);
        test_mirror(bound);
        test_flood(bound);
    }
    test_forged();
    test_lost_once();
    test_begins_anew();
    test_late_confirm();
    test_bound_answers();
    test_dead_is_silent();
    test_version();
    test_full();
    test_clock();
    return 0;
}
