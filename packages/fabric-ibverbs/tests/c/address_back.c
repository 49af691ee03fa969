/* An interface loses its address for a while and gets it back: its device is a lost NIC, then a good one, and peers reach it
 * again at the address that they know, in both directions.
 *
 *     address_back DEVICE PEER_DEVICE GID TIMES
 *
 * The peer's device loses it: rxeN on the interface nicN with 10.77.0.(N + 1), as tools/rdma-guest makes them. exit 0: each time
 * a write with an immediate crossed both ways before, and both ways after. */
#include "rig.h"

#define SECOND 1000000000ull

typedef struct end {
    void *ctx;
    char address[256], name[8];
    int len, open, up, nic_down, nic_up, ended, imms;
    uint32_t peer;
    int32_t status;
    fab_mr_keys keys;
    uint8_t memory[64];
} end;

static void look(end *e) {
    fab_wc wc[16];
    int n = ops->poll(e->ctx, wc, 16, now_ns());
    if (n < 0) die(e->name, n);
    for (int i = 0; i < n; i++) switch (wc[i].kind) {
        case FAB_WC_PEER_UP: e->up = 1; break;
        case FAB_WC_PEER_DOWN:
            e->status = wc[i].status;
            e->up = -1;
            break;
        case FAB_WC_NIC_DOWN: e->nic_down++; break;
        case FAB_WC_NIC_UP: e->nic_up++; break;
        case FAB_WC_OP:
            e->status = wc[i].status;
            e->ended++;
            break;
        case FAB_WC_IMM: e->imms++; break;
        default: break;
        }
}

static int until(end *a, end *b, const int *what, int at_least, const char *text) {
    uint64_t begin = now_ns();
    while (*what < at_least && now_ns() - begin < 30 * SECOND) {
        look(a);
        look(b);
    }
    printf("%s: %s after %.1f s\n", text, *what >= at_least ? "so" : "NOT", (double)(now_ns() - begin) * 1e-9);
    fflush(stdout);
    return *what >= at_least;
}

/* Opens until the peer is up, as the engine does: anew after each failure. */
static int meet(end *a, end *b, const char *text) {
    uint64_t begin = now_ns();
    for (a->up = 0; now_ns() - begin < 30 * SECOND && a->up != 1;) {
        if (!a->open) {
            int rc = ops->peer_open(a->ctx, b->address, (size_t)b->len, &a->peer);
            if (rc) die("peer_open", rc);
            a->open = 1;
            a->up = 0;
        }
        look(a);
        look(b);
        if (a->up >= 0) continue;
        printf("%s: %d after %.1f s\n", text, a->status, (double)(now_ns() - begin) * 1e-9);
        ops->peer_close(a->ctx, a->peer);
        a->open = 0;
    }
    printf("%s: %s after %.1f s\n", text, a->up == 1 ? "connected" : "NOT connected",
           (double)(now_ns() - begin) * 1e-9);
    fflush(stdout);
    return a->up == 1;
}

static void cross(end *a, end *b, const char *text) {
    int ended = a->ended, imms = b->imms;
    if (!meet(a, b, text)) exit(1);
    fab_wr wr = {.kind = FAB_WR_WRITE,
                 .flags = FAB_WR_IMM,
                 .imm = 1,
                 .len = 8,
                 .local_addr = a->keys.remote_base,
                 .local_key = a->keys.local_key,
                 .remote_addr = b->keys.remote_base,
                 .remote_key = b->keys.remote_key};
    int n = ops->post(a->ctx, a->peer, &wr, 1);
    if (n != 1) die("post", n);
    if (!until(a, b, &a->ended, ended + 1, "the write ended") || a->status) die(text, a->status);
    if (!until(a, b, &b->imms, imms + 1, "its immediate came")) exit(1);
}

static void shell(const char *format, int number) {
    char line[256];
    snprintf(line, sizeof line, format, number + 1, number, number, 200 + number);
    if (system(line)) die(line, 0);
}

int main(int argc, char **argv) {
    if (argc != 5) die("usage: address_back DEVICE PEER_DEVICE GID TIMES", argc);
    static end a = {.name = "near"}, b = {.name = "far"};
    uint32_t gid = gid_argument(argv[3]);
    int number = atoi(argv[2] + strlen(argv[2]) - 1);
    a.ctx = open_domain(argv[1], gid, 16, 4, 1);
    b.ctx = open_domain(argv[2], gid, 16, 4, 2);
    a.len = ops->address(a.ctx, a.address, sizeof a.address);
    b.len = ops->address(b.ctx, b.address, sizeof b.address);
    reg(a.ctx, a.memory, sizeof a.memory, &a.keys);
    reg(b.ctx, b.memory, sizeof b.memory, &b.keys);
    cross(&a, &b, "to it");
    cross(&b, &a, "from it");
    for (int k = 1; k <= atoi(argv[4]); k++) {
        shell("ip addr del 10.77.0.%d/16 dev nic%d", number);
        if (!until(&a, &b, &b.nic_down, k, "its NIC is lost")) exit(1);
        /* what the engine does with the paths of a lost NIC, and the other side once it notices */
        ops->peer_close(b.ctx, b.peer);
        ops->peer_close(a.ctx, a.peer);
        a.open = b.open = 0;
        shell("ip addr add 10.77.0.%d/16 dev nic%d && ip route replace 10.77.0.0/16 dev nic%d table %d", number);
        if (!until(&a, &b, &b.nic_up, k, "its NIC is back")) exit(1);
        cross(&a, &b, "to it, again");
        cross(&b, &a, "from it, again");
    }
    ops->close(a.ctx);
    ops->close(b.ctx);
    return 0;
}
