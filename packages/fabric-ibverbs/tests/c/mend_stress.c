/* Refused writes between others, again and again, while more are posted: each good one is executed once, after its bytes; each
 * bad one fails alone; the link lives.
 *
 *     mend_stress DEVICE PEER_DEVICE GID TURNS [SEED]
 *
 * A turn is 24 writes of which one or two go to a registration that no longer exists, with an immediate or without, or
 * outside of one that does. Several turns are in flight at a time. exit 0: all of that held. */
#include "rig.h"

#include <errno.h>

#define EACH 24u
#define BYTES 64u
#define AHEAD 100u /* writes in flight */

static uint32_t turns, total, posted, ended, came, want, bad_turn;
static uint8_t *kind, *status_seen, *seen; /* kind: 0 good, else bad; 2 and 3 with an immediate, 3 with the good key */
static uint8_t *source, *target;
static fab_mr_keys ours, theirs, gone;
static uint64_t state;

static uint32_t rnd(uint32_t below) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)(state >> 33) % below;
}

static void plan(uint32_t turn) {
    for (uint32_t n = 1 + rnd(2); n; n--) kind[turn * EACH + rnd(EACH)] = (uint8_t)(1 + rnd(3));
}

static fab_wr make(uint32_t i) {
    fab_wr w = {.id = i,
                .len = BYTES,
                .local_addr = ours.remote_base + (uint64_t)i * BYTES,
                .local_key = ours.local_key,
                .kind = FAB_WR_WRITE,
                .imm = i};
    memcpy(source + (size_t)i * BYTES, &(uint32_t[2]){i, ~i}, 8);
    w.remote_key = kind[i] ? gone.remote_key : theirs.remote_key;
    w.remote_addr = kind[i] ? gone.remote_base : theirs.remote_base + (uint64_t)i * BYTES;
    if (kind[i] == 3) {
        w.remote_key = theirs.remote_key;
        w.remote_addr = theirs.remote_base + (uint64_t)total * BYTES;
    }
    if (kind[i] != 1) w.flags = FAB_WR_IMM;
    return w;
}

/* Another registration that is gone at each turn: a key that is known to be revoked never reaches the NIC. */
static void post_some(void *a, void *b, uint32_t peer) {
    static uint8_t there[64];
    while (posted < total && posted - ended < AHEAD) {
        uint32_t n = 1 + rnd(8);
        if (posted / EACH >= bad_turn) {
            reg(b, there, sizeof there, &gone);
            if (ops->mr_dereg(b, gone.local_key)) die("deregistration", 0);
            bad_turn++;
        }
        uint32_t left = EACH - posted % EACH;
        if (n > left) n = left;
        fab_wr w[8];
        for (uint32_t k = 0; k < n; k++) w[k] = make(posted + k);
        int took = ops->post(a, peer, w, n);
        if (took == -EKEYREVOKED) { /* refused at once, this key is known */
            if (!kind[posted]) die("a good write was refused at once", (long)posted);
            status_seen[posted++] = 1;
            ended++;
            continue;
        }
        if (took < 0) die("post", took);
        posted += (uint32_t)took;
        if (!took) return;
    }
}

static void writer(void *a) {
    fab_wc wc[64];
    int n = ops->poll(a, wc, 64, now_ns());
    if (n < 0) die("poll of the writer", n);
    for (int k = 0; k < n; k++) {
        if (wc[k].kind != FAB_WC_OP || wc[k].id >= total || wc[k].count != 1) {
            printf("kind %u status %d\n", wc[k].kind, wc[k].status);
            die("the writer's completion", (long)wc[k].id);
        }
        uint32_t i = (uint32_t)wc[k].id;
        if (status_seen[i]++) die("ended twice", (long)i);
        if ((wc[k].status != 0) != (kind[i] != 0)) {
            printf("write %u of kind %u: status %d; ended %u of %u\n", i, kind[i], wc[k].status, ended, total);
            die("a wrong status", wc[k].status);
        }
        ended++;
    }
}

static void reader(void *b) {
    fab_wc wc[64];
    int n = ops->poll(b, wc, 64, now_ns());
    if (n < 0) die("poll of the reader", n);
    for (int k = 0; k < n; k++) {
        uint32_t i = wc[k].imm, there[2];
        if (wc[k].kind != FAB_WC_IMM || i >= total || kind[i]) {
            printf("kind %u status %d\n", wc[k].kind, wc[k].status);
            die("the reader's completion", (long)i);
        }
        if (wc[k].count != 1 || seen[i]++) die("an immediate came twice", (long)i);
        memcpy(there, target + (size_t)i * BYTES, 8);
        if (there[0] != i || there[1] != ~i) die("an immediate came before its bytes", (long)i);
        came++;
    }
}

int main(int argc, char **argv) {
    char address[256];
    if (argc != 5 && argc != 6) die("usage: mend_stress DEVICE PEER_DEVICE GID TURNS [SEED]", argc);
    uint32_t gid = gid_argument(argv[3]), peer;
    turns = (uint32_t)atoi(argv[4]);
    state = argc == 6 ? strtoull(argv[5], NULL, 0) : 1;
    total = turns * EACH;
    kind = calloc(total, 1);
    status_seen = calloc(total, 1);
    seen = calloc(total, 1);
    source = calloc(total, BYTES);
    target = calloc(total, BYTES);
    for (uint32_t t = 0; t < turns; t++) plan(t);
    for (uint32_t i = 0; i < total; i++) want += !kind[i];
    void *a = open_domain(argv[1], gid, 128, 4, 1), *b = open_domain(argv[2], gid, 128, 4, 2);
    int len = ops->address(b, address, sizeof address);
    reg(a, source, (size_t)total * BYTES, &ours);
    reg(b, target, (size_t)total * BYTES, &theirs);
    int rc = ops->peer_open(a, address, (size_t)len, &peer);
    if (rc) die("peer_open", rc);
    fab_wc wc;
    for (uint64_t until = now_ns() + 60000000000ull; !ops->poll(a, &wc, 1, now_ns());) {
        reader(b);
        if (now_ns() > until) die("no first contact", 0);
    }
    if (wc.kind != FAB_WC_PEER_UP) die("first contact", wc.status);
    uint64_t begin = now_ns(), until = begin + 300000000000ull;
    while ((ended < total || came < want) && now_ns() < until) {
        post_some(a, b, peer);
        writer(a);
        reader(b);
    }
    printf("%u turns in %.1f s: %u of %u ended, %u of %u immediates; mended %llu, asked %llu, revoked %llu, lost "
           "receives %llu\n",
           turns, (double)(now_ns() - begin) * 1e-9, ended, total, came, want, (unsigned long long)counter(a, "mended"),
           (unsigned long long)counter(a, "asked"), (unsigned long long)counter(a, "revoked"),
           (unsigned long long)counter(b, "lost_receives"));
    int good = ended == total && came == want && counter(a, "mended") > 0;
    ops->close(a);
    ops->close(b);
    return good ? 0 : 1;
}
