/* First contact with hosts that are not there costs the others nothing: the kernel takes a second to find that nobody answers
 * for such an address.
 *
 *     dead_hosts DEVICE PEER_DEVICE GID COUNT
 *
 * Opens COUNT peers at addresses of this network that nobody has, and then one on the second device, with COUNT / 2 seconds for
 * first contact. exit 0: the one that lives is up before its time is over, and the others are named as lost. */
#include "rig.h"

#include <errno.h>

int main(int argc, char **argv) {
    if (argc != 5) die("usage: dead_hosts DEVICE PEER_DEVICE GID COUNT", argc);
    uint32_t gid = gid_argument(argv[3]), count = (uint32_t)atoi(argv[4]), peer, alive, lost = 0;
    int up = 0;
    connect_ns = count * 500000000ull;
    void *a = open_domain(argv[1], gid, 16, 0, 1), *b = open_domain(argv[2], gid, 16, 4, 2);
    char address[256], dead[512];
    int len = ops->address(b, address, sizeof address);
    for (uint32_t i = 0; i < count; i++) {
        /* the last 8 of 32 digits of a GID are the IPv4 address: 10.77.9.x */
        snprintf(dead, sizeof dead, "%.24s0a4d09%02x%s", address, 1 + i, address + 32);
        int rc = ops->peer_open(a, dead, strlen(dead), &peer);
        if (rc) die("peer_open of a host that is not there", rc);
    }
    int rc = ops->peer_open(a, address, (size_t)len, &alive);
    if (rc) die("peer_open", rc);
    uint64_t begin = now_ns(), up_after = 0;
    for (uint64_t until = begin + 120000000000ull; (!up || lost < count) && now_ns() < until;) {
        fab_wc wc[16];
        int n = ops->poll(a, wc, 16, now_ns());
        for (int i = 0; i < n; i++) {
            if (wc[i].kind == FAB_WC_PEER_DOWN && wc[i].peer != alive && wc[i].status == -ETIMEDOUT) lost++;
            else if (wc[i].kind != FAB_WC_PEER_UP || wc[i].peer != alive) die("the living peer", wc[i].status);
            else up_after = now_ns() - begin, up = 1;
        }
        if (ops->poll(b, wc, 16, now_ns()) < 0) die("poll of the peer", 0);
    }
    printf("%s after %.1f s; %u of %u lost\n", up ? "connected" : "not connected", (double)up_after * 1e-9, lost,
           count);
    ops->close(a);
    ops->close(b);
    return up && lost == count ? 0 : 1;
}
