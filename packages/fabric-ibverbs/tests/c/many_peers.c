/* Many peers at once: N domains on one device open one domain on another, all in parallel, and each writes with an immediate.
 * Without the engine, so that one thread can drive a thousand of them.
 *
 *     many_peers DEVICE PEER_DEVICE GID N [LIMIT]
 *
 * LIMIT (0: what the device's queues hold) is how many peers the one domain takes; those beyond are refused by name, and
 * counted. exit 0: as many as fit are connected, each immediate came once. */
#include "rig.h"

#include <errno.h>
#include <sys/resource.h>

typedef struct client {
    void *ctx;
    uint32_t peer;
    int done, refused;
} client;

static uint64_t target_key, target_base;

static void post_one(client *c, uint32_t number) {
    fab_wr wr = {.id = number,
                 .kind = FAB_WR_WRITE,
                 .flags = FAB_WR_IMM,
                 .imm = number,
                 .remote_addr = target_base,
                 .remote_key = target_key};
    int n = ops->post(c->ctx, c->peer, &wr, 1);
    if (n != 1) die("post", n);
}

/* Returns whether it is through with all it had to do. */
static int poll_client(client *c, uint32_t number) {
    fab_wc wc[16];
    int n = ops->poll(c->ctx, wc, 16, now_ns());
    for (int i = 0; i < n; i++) {
        if (wc[i].kind == FAB_WC_PEER_UP) post_one(c, number);
        else if (wc[i].kind == FAB_WC_OP && !wc[i].status && !c->done) return c->done = 1;
        else if (wc[i].kind == FAB_WC_PEER_DOWN && wc[i].status == -ENOSPC && !c->done) return c->refused = 1;
        else die("a client's completion", wc[i].status);
    }
    return 0;
}

int main(int argc, char **argv) {
    char address[256], text[512];
    if (argc != 5 && argc != 6) die("usage: many_peers DEVICE PEER_DEVICE GID N [LIMIT]", argc);
    uint32_t gid = gid_argument(argv[3]), count = (uint32_t)atoi(argv[4]), ended = 0, came = 0;
    uint32_t limit = argc == 6 ? (uint32_t)atoi(argv[5]) : 0, refused = 0;
    static uint8_t memory[4096];
    fab_mr_keys keys;
    struct rlimit files = {10 * count + 1024, 10 * count + 1024}; /* each domain has a handful */
    if (setrlimit(RLIMIT_NOFILE, &files)) die("open files", errno);
    void *server = open_domain(argv[2], gid, 16, limit, 1);
    int len = ops->address(server, address, sizeof address);
    reg(server, memory, sizeof memory, &keys);
    target_key = keys.remote_key;
    target_base = keys.remote_base;
    client *clients = calloc(count, sizeof *clients);
    uint8_t *seen = calloc(count, 1);
    uint64_t begin = now_ns();
    for (uint32_t i = 0; i < count; i++) clients[i].ctx = open_domain(argv[1], gid, 16, 1, 1000 + i);
    uint64_t opened = now_ns();
    for (uint32_t i = 0; i < count; i++) {
        int rc = ops->peer_open(clients[i].ctx, address, (size_t)len, &clients[i].peer);
        if (rc) die("peer_open", rc);
    }
    for (uint64_t until = opened + 300000000000ull; (ended < count || came < count - refused) && now_ns() < until;) {
        fab_wc wc[64];
        int n = ops->poll(server, wc, 64, now_ns());
        for (int i = 0; i < n; i++) {
            if (wc[i].kind != FAB_WC_IMM || wc[i].count != 1 || wc[i].imm >= count || seen[wc[i].imm]++)
                die("the server's completion", (long)wc[i].imm);
            came++;
        }
        for (uint32_t i = 0; i < count; i++) {
            if (clients[i].refused || !poll_client(&clients[i], i)) continue;
            ended++;
            refused += (uint32_t)clients[i].refused;
        }
    }
    uint64_t ready = now_ns();
    printf(
        "%u of %u ended, %u refused, %u immediates came; domains opened in %.1f s, connected and written in %.1f s\n",
        ended, count, refused, came, (double)(opened - begin) * 1e-9, (double)(ready - opened) * 1e-9);
    fab_verbs_describe(server, text, sizeof text);
    printf("%sfull %llu\n", text, (unsigned long long)counter(server, "full"));
    int good = ended == count && came == count - refused && (limit ? refused == count - limit : !refused);
    for (uint32_t i = 0; i < count; i++) ops->close(clients[i].ctx);
    ops->close(server);
    printf("closed in %.1f s\n", (double)(now_ns() - ready) * 1e-9);
    return good ? 0 : 1;
}
