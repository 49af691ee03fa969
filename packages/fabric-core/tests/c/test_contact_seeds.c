/* First contact, heartbeat, farewell in all weathers: two to eight contacts open, close, stop, die and come back on a network
 * that loses, repeats, delays, reorders, corrupts and replays. C1, C11, R5, R7, R9, R12, S1.
 *
 *   test_contact_seeds           the usual number
 *   test_contact_seeds N         N seeds
 *   test_contact_seeds seed S    one, to look at it */
#include "contact_net.h"

static uint64_t sum_up, sum_down, sum_delivered, sum_lost_found;

static void weather(net *w) {
    w->loss = (uint32_t)below(w, 601) * (uint32_t)below(w, 2);
    w->dup = (uint32_t)below(w, 300) * (uint32_t)below(w, 2);
    w->corrupt = (uint32_t)below(w, 200) * (uint32_t)below(w, 2);
    w->replay = (uint32_t)below(w, 200) * (uint32_t)below(w, 2);
    w->refuse = chance(w, 200) ? 200 : 0;
    w->delay_min = below(w, MS);
    w->delay_max = w->delay_min + (chance(w, 300) ? below(w, 300 * MS) : below(w, 5 * MS)); /* above a retransmission */
}

static bool status_ok(const net *w, const net_open *o, bool restarts) {
    bool strange = w->node[o->node].strange != w->node[o->to].strange;
    switch (o->status) {
    case -ETIMEDOUT: return true;
    case -ECONNRESET: return o->ups || restarts;
    case -ESTALE: return restarts;
    case -EACCES: return strange || w->corrupt || w->replay;
    case -EPROTO: return w->corrupt != 0;
    case -EDQUOT: return w->refuse != 0;
    default: return false;
    }
}

static uint64_t one_seed(uint64_t seed) {
    net *w = net_new(seed, 2 + (uint32_t)(seed % 7));
    weather(w);
    w->bound = chance(w, 500);
    bool faults = chance(w, 600), strange = chance(w, 150);
    if (strange) w->node[below(w, w->n)].strange = true;
    net_start(w);
    uint64_t until = w->now + 1200 * MS;
    while (w->now < until) {
        uint32_t a = (uint32_t)below(w, w->n), b = (uint32_t)below(w, w->n);
        net_node *s = &w->node[a];
        uint64_t dice = below(w, 100);
        if (!s->c) node_start(w, a);
        else if (s->paused) s->paused = chance(w, 500);
        else if (dice < 60 && a != b) node_open(w, a, b, chance(w, 500) ? 0 : w->node[b].inc);
        else if (dice < 70) {
            uint32_t out = (uint32_t)below(w, TABLE);
            if (s->open_of[out] != UINT32_MAX) node_close(w, a, out);
        } else if (faults && dice < 75) node_crash(w, a);
        else if (faults && dice < 80) s->paused = true;
        net_run(w, w->now + below(w, 100 * MS));
        for (uint32_t out = 0; s->c && !s->paused && out < TABLE; out++)
            if (s->open_of[out] != UINT32_MAX && open_of(s, out)->downs) node_close(w, a, out);
    }
    for (uint32_t i = 0; i < w->nopens; i++) {
        net_open *o = &w->opens[i];
        if (o->downs) CHECK(status_ok(w, o, faults), "seed %lu: open %u ended with %d", seed, i, o->status);
    }
    /* R5: somebody dies for good. Whoever had it finds out in two intervals, whatever is still on its way. */
    uint32_t dead = (uint32_t)below(w, w->n);
    for (uint32_t i = 0; i < w->n; i++) w->node[i].paused = false;
    net_run(w, w->now + 60 * MS); /* who stood still has counted anew */
    uint64_t t0 = w->now;
    if (w->node[dead].c) node_crash(w, dead);
    net_run(w, t0 + 1000 * MS + 2 * INTERVAL);
    for (uint32_t i = 0; i < w->nopens; i++) {
        net_open *o = &w->opens[i];
        CHECK(o->ups || o->ended, "seed %lu: open %u never ended", seed, i); /* C1 */
        CHECK(o->ups <= 1 && o->downs <= 1, "seed %lu", seed);
        if (w->node[o->node].strange != w->node[o->to].strange) CHECK(!o->ups, "seed %lu: S1", seed);
        if (o->to != dead || o->closed) continue;
        uint64_t from = o->up_at > t0 ? o->up_at : t0, limit = o->at + 1000 * MS + (faults ? INTERVAL / 2 : 0);
        if (stats_of(w, o->node).stalls) limit += t0 - o->at; /* its deadlines stood still as it did */
        CHECK(o->downs && o->ended <= (o->ups ? from + 2 * INTERVAL : limit),
              "seed %lu: R5, open %u of %u to %u: %lu after the end", seed, i, o->node, dead, o->ended - t0);
        sum_lost_found += o->ups;
    }
    /* Fair weather: what is up on one side is in on the other, and everybody finds everybody. */
    w->loss = w->dup = w->corrupt = w->replay = w->refuse = 0;
    w->delay_max = w->delay_min + MS;
    if (!w->node[dead].c) node_start(w, dead);
    for (uint32_t i = 0; i < w->n; i++)
        if (!w->node[i].c) node_start(w, i);
    net_run(w, w->now + 2200 * MS); /* replays come up to two seconds late */
    for (uint32_t a = 0; a < w->n; a++) {
        for (uint32_t out = 0; out < TABLE; out++)
            if (w->node[a].open_of[out] != UINT32_MAX && open_of(&w->node[a], out)->downs) node_close(w, a, out);
        node_open(w, a, (a + 1) % w->n, 0); /* or it is there already */
    }
    net_run(w, w->now + 3 * INTERVAL);
    for (uint32_t a = 0; a < w->n; a++) {
        net_node *s = &w->node[a];
        uint32_t ups = 0, ins = 0;
        for (uint32_t out = 0; out < TABLE; out++) {
            if (s->open_of[out] == UINT32_MAX) continue;
            net_open *o = open_of(s, out);
            if (s->strange || w->node[o->to].strange) continue;
            CHECK(o->ups && !o->downs, "seed %lu: fair weather, %u to %u: %d", seed, a, o->to, o->status);
            bool there = false;
            for (uint32_t i = 0; i < TABLE; i++)
                there |= w->node[o->to].in[i].live && w->node[o->to].in[i].open == s->open_of[out];
            CHECK(there, "seed %lu: %u is up to %u, which has no inbound", seed, a, o->to);
            ups++;
        }
        for (uint32_t i = 0; i < TABLE; i++) {
            if (!s->in[i].live) continue;
            net_open *o = &w->opens[s->in[i].open];
            CHECK(o->ups && !o->downs && !o->closed, "seed %lu: %u keeps an inbound of an open that is over", seed, a);
            ins++;
        }
        CHECK(stats_of(w, a).in_used == ins, "seed %lu", seed);
        sum_up += ups;
    }
    for (uint32_t a = 0; a < w->n; a++) fab_contact_farewell(w->node[a].c), w->node[a].wake = UINT64_MAX;
    net_run(w, w->now + 20 * MS);
    for (uint32_t a = 0; a < w->n; a++) {
        fab_contact_stats s = stats_of(w, a);
        CHECK(!s.out_used && !s.in_used, "seed %lu: something stayed after farewell", seed); /* R9 */
        CHECK(fab_contact_run(w->node[a].c, w->now + 10000 * MS) == UINT64_MAX, "seed %lu: a timer stayed", seed);
        sum_down += s.downs;
    }
    sum_delivered += w->delivered;
    uint64_t hash = w->hash;
    net_free(w);
    return hash;
}

int main(int argc, char **argv) {
    if (argc > 2) return one_seed(strtoull(argv[2], NULL, 0)) == 0;
    for (uint64_t seed = 1; seed <= 20; seed++) CHECK(one_seed(seed) == one_seed(seed), "R12, seed %lu", seed);
    uint64_t seeds = argc > 1 ? strtoull(argv[1], NULL, 0) : SLOW ? 500 : 5000;
    for (uint64_t seed = 1; seed <= seeds; seed++) one_seed(seed);
    printf("%lu seeds: %lu datagrams, %lu up in the end, %lu downs, %lu losses found in time\n", seeds, sum_delivered,
           sum_up, sum_down, sum_lost_found);
    return 0;
}
