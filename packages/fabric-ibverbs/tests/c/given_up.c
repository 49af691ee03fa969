/* A process stands still; a peer that has a message on the way to it gives it up, and says so. Awake again, it finds message and
 * farewell in its queues at once, and a receive posted before it looks: the message that its sender was told is lost is not
 * delivered, and a new one is, over a new link.
 *
 *     given_up DEVICE PEER_DEVICE GID [TURNS]
 *
 * Standing still is not being polled. exit 0: each turn the first message was lost at both ends and the second one arrived. */
#include "rig.h"

#include <errno.h>

#define SECOND 1000000000ull
#define ROOM 32u

static void *a, *b;
static char inbox[ROOM];
static int up, down, sent, failed, came;

static void look(void *domain) {
    fab_wc wc[16];
    int n = ops->poll(domain, wc, 16, now_ns());
    if (n < 0) die("poll", n);
    for (int i = 0; i < n; i++) switch (wc[i].kind) {
        case FAB_WC_PEER_UP: up++; break;
        case FAB_WC_PEER_DOWN: down = wc[i].status; break;
        case FAB_WC_OP:
            if (wc[i].status) failed++;
            else sent++;
            break;
        case FAB_WC_RECV: came++; break;
        default: break;
        }
}

static uint32_t meet(void) {
    char address[256];
    uint32_t peer = 0;
    int len = ops->address(b, address, sizeof address);
    int rc = ops->peer_open(a, address, (size_t)len, &peer);
    if (rc) die("peer_open", rc);
    for (uint64_t until = now_ns() + 60 * SECOND; !up && !down && now_ns() < until;) {
        look(a);
        look(b);
    }
    if (!up) die("no first contact", down);
    return peer;
}

static void say(uint32_t peer, const char *text) {
    fab_wr wr = {.kind = FAB_WR_SEND, .id = 1, .len = strlen(text) + 1, .local_addr = (uint64_t)(uintptr_t)text};
    int n = ops->post(a, peer, &wr, 1);
    if (n != 1) die("a message was not taken", n);
}

int main(int argc, char **argv) {
    if (argc != 4 && argc != 5) die("usage: given_up DEVICE PEER_DEVICE GID [TURNS]", argc);
    uint32_t gid = gid_argument(argv[3]), turns = argc == 5 ? (uint32_t)atoi(argv[4]) : 1;
    heartbeat_ns = SECOND / 2;
    a = open_domain(argv[1], gid, 16, 4, 1);
    b = open_domain(argv[2], gid, 16, 4, 2);
    for (uint32_t turn = 0; turn < turns; turn++) {
        up = down = sent = failed = came = 0;
        uint32_t peer = meet();
        for (uint64_t until = now_ns() + SECOND / 10; now_ns() < until;) { /* the answer to the first ping, too */
            look(a);
            look(b);
        }
        if (down) die("lost although both looked", down);
        say(peer, "lost");
        for (uint64_t until = now_ns() + 60 * SECOND; !(down && failed) && now_ns() < until;) look(a);
        if (down != -ETIMEDOUT) die("the silence was not noticed", down);
        ops->peer_close(a, peer);
        inbox[0] = 0;
        if (ops->post_recv(b, turn, (uint64_t)(uintptr_t)inbox, ROOM)) die("a receive was not taken", 0);
        for (uint64_t until = now_ns() + SECOND / 10; now_ns() < until;) look(b);
        int early = came;
        up = down = 0;
        peer = meet();
        say(peer, "found");
        for (uint64_t until = now_ns() + 60 * SECOND; !(sent && came) && !down && now_ns() < until;) {
            look(a);
            look(b);
        }
        printf("turn %u: %d failed, %d sent, %d came, %d of it before; the last: '%s'\n", turn, failed, sent, came,
               early, inbox);
        if (early || failed != 1 || sent != 1 || came != 1 || strcmp(inbox, "found") != 0) return 1;
        ops->peer_close(a, peer);
        for (uint64_t until = now_ns() + SECOND / 10; now_ns() < until;) {
            look(a);
            look(b);
        }
    }
    ops->close(a);
    ops->close(b);
    return 0;
}
