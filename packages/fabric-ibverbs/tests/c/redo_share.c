/* A link is mended while another peer has taken all of the completion queue that is not shared out: what was behind the refused
 * write is posted again all the same, and ends.
 *
 *     redo_share DEVICE PEER_DEVICE GID [TURNS]
 *
 * Two peers, 32 writes in flight each: the completion queue has 64 places, 16 of them for either peer alone. The first peer
 * has 31 writes on their way, of which the first is refused; the second one has 16 long ones, which are still on their way when
 * the first one's are posted again. exit 0: each turn, one write failed and 30 ended well. */
#include "rig.h"

#include <errno.h>

#define DEPTH 32u
#define FIRST (DEPTH - 1)
#define LONG_ONES 16u
#define LONG_BYTES (256u << 10)

static uint8_t memory[2][LONG_BYTES];
static fab_mr_keys ours, theirs[2], gone;
static uint32_t good, refused, others;
static int up, lost;

static void look(void *a) {
    fab_wc wc[64];
    int n = ops->poll(a, wc, 64, now_ns());
    if (n < 0) die("poll of the writer", n);
    for (int i = 0; i < n; i++) switch (wc[i].kind) {
        case FAB_WC_PEER_UP: up++; break;
        case FAB_WC_PEER_DOWN: lost = wc[i].status; break;
        case FAB_WC_OP:
            if (wc[i].id == 2) others += wc[i].count;
            else if (wc[i].status) refused += wc[i].count;
            else good += wc[i].count;
            break;
        default: break;
        }
}

static void others_look(void *b) {
    fab_wc wc[64];
    if (ops->poll(b, wc, 64, now_ns()) < 0) die("poll of a peer", 0);
}

static fab_wr to(int which, uint64_t id, uint32_t len) {
    return (fab_wr){.id = id,
                    .len = len,
                    .local_addr = ours.remote_base,
                    .local_key = ours.local_key,
                    .remote_addr = theirs[which].remote_base,
                    .remote_key = theirs[which].remote_key,
                    .kind = FAB_WR_WRITE};
}

static uint32_t meet(void *a, void *b, void *c) {
    char address[256];
    uint32_t peer = 0;
    int len = ops->address(b, address, sizeof address), before = up;
    int rc = ops->peer_open(a, address, (size_t)len, &peer);
    if (rc) die("peer_open", rc);
    for (uint64_t until = now_ns() + 60000000000ull; up == before;) {
        look(a);
        others_look(b);
        others_look(c);
        if (lost || now_ns() > until) die("no first contact", lost);
    }
    return peer;
}

int main(int argc, char **argv) {
    if (argc != 4 && argc != 5) die("usage: redo_share DEVICE PEER_DEVICE GID [TURNS]", argc);
    uint32_t gid = gid_argument(argv[3]), turns = argc == 5 ? (uint32_t)atoi(argv[4]) : 3;
    void *a = open_domain(argv[1], gid, DEPTH, 2, 1), *b[2];
    static uint8_t source[LONG_BYTES], there[64];
    reg(a, source, sizeof source, &ours);
    for (int k = 0; k < 2; k++) {
        b[k] = open_domain(argv[2], gid, DEPTH, 2, 2 + (uint64_t)k);
        reg(b[k], memory[k], LONG_BYTES, &theirs[k]);
    }
    uint32_t first = meet(a, b[0], b[1]), second = meet(a, b[1], b[0]), long_ones = 0;
    for (uint32_t turn = 0; turn < turns && !lost; turn++) {
        fab_wr w[FIRST], l[LONG_ONES];
        reg(b[0], there, sizeof there, &gone);
        if (ops->mr_dereg(b[0], gone.local_key)) die("deregistration", 0);
        good = refused = 0;
        for (uint32_t i = 0; i < FIRST; i++) w[i] = to(0, 1, 64);
        w[0].remote_key = gone.remote_key;
        w[0].remote_addr = gone.remote_base;
        for (uint32_t i = 0; i < LONG_ONES; i++) l[i] = to(1, 2, LONG_BYTES);
        int took = ops->post(a, first, w, FIRST);
        if (took != (int)FIRST) die("the first peer's writes were not all taken", took);
        for (uint64_t until = now_ns() + 60000000000ull; good + refused < FIRST && !lost && now_ns() < until;) {
            /* kept at the second peer's share */
            if (long_ones - others < LONG_ONES) {
                took = ops->post(a, second, l, LONG_ONES - (long_ones - others));
                if (took < 0) die("the second peer's writes", took);
                long_ones += (uint32_t)took;
            }
            look(a);
            others_look(b[0]);
            others_look(b[1]);
        }
        printf("turn %u: %u refused, %u well of %u; %u of %u long ones on their way; lost %d, mended %llu\n", turn,
               refused, good, FIRST, long_ones - others, LONG_ONES, lost, (unsigned long long)counter(a, "mended"));
        if (refused != 1 || good != FIRST - 1) return 1;
        for (uint64_t until = now_ns() + 60000000000ull; others < long_ones && !lost && now_ns() < until;) {
            look(a);
            others_look(b[1]);
        }
    }
    ops->close(a);
    ops->close(b[0]);
    ops->close(b[1]);
    return lost != 0;
}
