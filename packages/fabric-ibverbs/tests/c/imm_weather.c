/* Write-with-immediates over a bad wire, each with a number of its own, and its bytes looked at when the backend hands out that
 * number: none early, lost or doubled.
 *
 *     imm_weather DEVICE PEER_DEVICE GID COUNT [BYTES]
 *
 * Weather is the caller's (netem). Every word of a write is another one for each number, the last packet's too: BYTES above the
 * path MTU makes writes of several packets, of which any may be late. exit 0: all of that held. */
#include "rig.h"

#define AHEAD 100u /* writes in flight */
#define SLOTS 256u /* places, each used again when the write before has ended and its immediate has come */
#define DEADLINE_NS 600000000000ull

static uint32_t total, bytes, posted, ended, came;
static uint8_t *source, *target, *done, *seen;
static fab_mr_keys ours, theirs;

static uint64_t word(uint32_t i, uint32_t k) { return ((uint64_t)i << 32 | k) * 0x9e3779b97f4a7c15ull + 1; }

static uint8_t *place(uint8_t *memory, uint32_t i) { return memory + (size_t)(i % SLOTS) * bytes; }

static fab_wr make(uint32_t i) {
    uint64_t off = (uint64_t)(i % SLOTS) * bytes;
    for (uint32_t k = 0; k < bytes / 8; k++) memcpy(place(source, i) + k * 8, &(uint64_t){word(i, k)}, 8);
    return (fab_wr){.id = i,
                    .len = bytes,
                    .local_addr = ours.remote_base + off,
                    .local_key = ours.local_key,
                    .remote_addr = theirs.remote_base + off,
                    .remote_key = theirs.remote_key,
                    .kind = FAB_WR_WRITE,
                    .flags = FAB_WR_IMM,
                    .imm = i};
}

static void post_some(void *a, uint32_t peer) {
    while (posted < total && posted - ended < AHEAD && posted - came < SLOTS) {
        if (posted >= SLOTS && !(done[posted - SLOTS] && seen[posted - SLOTS])) return; /* its place is in use */
        fab_wr w = make(posted);
        int took = ops->post(a, peer, &w, 1);
        if (took < 0) die("post", took);
        if (!took) return;
        posted++;
    }
}

static void writer(void *a) {
    fab_wc wc[64];
    int n = ops->poll(a, wc, 64, now_ns());
    if (n < 0) die("poll of the writer", n);
    for (int k = 0; k < n; k++) {
        if (wc[k].kind != FAB_WC_OP || wc[k].status || wc[k].id >= posted) {
            printf("kind %u status %d; %u posted, %u ended, %u came\n", wc[k].kind, wc[k].status, posted, ended, came);
            die("the writer's completion", (long)wc[k].id);
        }
        if (wc[k].count != 1 || done[wc[k].id]++) die("a write ended twice", (long)wc[k].id);
        ended++;
    }
}

static void reader(void *b) {
    fab_wc wc[64];
    int n = ops->poll(b, wc, 64, now_ns());
    if (n < 0) die("poll of the reader", n);
    for (int k = 0; k < n; k++) {
        uint32_t i = wc[k].imm;
        if (wc[k].kind != FAB_WC_IMM || i >= posted) {
            printf("kind %u status %d\n", wc[k].kind, wc[k].status);
            die("the reader's completion", (long)i);
        }
        if (wc[k].count != 1 || seen[i]++) die("an immediate came twice", (long)i);
        for (uint32_t at = 0; at < bytes / 8; at++) {
            uint64_t there;
            memcpy(&there, place(target, i) + at * 8, 8);
            if (there != word(i, at)) die("an immediate came before its bytes", (long)i);
        }
        came++;
    }
}

int main(int argc, char **argv) {
    char address[256];
    uint32_t peer;
    fab_wc wc;
    if (argc != 5 && argc != 6) die("usage: imm_weather DEVICE PEER_DEVICE GID COUNT [BYTES]", argc);
    uint32_t gid = gid_argument(argv[3]);
    total = (uint32_t)strtoul(argv[4], NULL, 10);
    bytes = argc == 6 ? (uint32_t)strtoul(argv[5], NULL, 10) / 8 * 8 : 64;
    if (!total || !bytes || bytes > 1u << 20) die("COUNT from 1, BYTES from 8 to 1048576", (long)bytes);
    done = calloc(total, 1);
    seen = calloc(total, 1);
    source = calloc(SLOTS, bytes);
    target = calloc(SLOTS, bytes);
    if (!done || !seen || !source || !target) die("memory", (long)total);
    void *a = open_domain(argv[1], gid, 128, 4, 1), *b = open_domain(argv[2], gid, 128, 4, 2);
    int len = ops->address(b, address, sizeof address);
    reg(a, source, (size_t)SLOTS * bytes, &ours);
    reg(b, target, (size_t)SLOTS * bytes, &theirs);
    int rc = ops->peer_open(a, address, (size_t)len, &peer);
    if (rc) die("peer_open", rc);
    for (uint64_t until = now_ns() + 120000000000ull; !ops->poll(a, &wc, 1, now_ns());) {
        reader(b);
        if (now_ns() > until) die("no first contact", 0);
    }
    if (wc.kind != FAB_WC_PEER_UP) die("first contact", wc.status);
    uint64_t begin = now_ns(), until = begin + DEADLINE_NS;
    while ((ended < total || came < total) && now_ns() < until) {
        post_some(a, peer);
        writer(a);
        reader(b);
    }
    uint64_t end = now_ns();
    while (now_ns() < end + 500000000u) { /* what comes late comes twice */
        writer(a);
        reader(b);
    }
    printf(
        "%u writes of %u bytes in %.1f s: %u ended, %u immediates, each once and after its bytes; mended %llu, asked "
        "%llu, stalls %llu, stray %llu\n",
        total, bytes, (double)(end - begin) * 1e-9, ended, came, (unsigned long long)counter(a, "mended"),
        (unsigned long long)counter(a, "asked"), (unsigned long long)counter(a, "stalls"),
        (unsigned long long)(counter(a, "stray") + counter(b, "stray")));
    ops->close(a);
    ops->close(b);
    return ended == total && came == total ? 0 : 1;
}
