/* The latency of a bare queue pair: a write of 8 bytes with an immediate there, and one back, each seen by polling its completion
 * queue, between two processes. perftest's ib_write_lat looks at memory and has no immediates; this is what ours is made of.
 *
 *     bare_ping DEVICE PEER_DEVICE GID PINGS       half of a round trip in microseconds: median */
#include "bare.h"

#include <sys/wait.h>
#include <unistd.h>

static void meet(bare *b, const char *device, uint32_t gid, int in, int out, bare_where *to) {
    bare_open(b, device, (int)gid);
    if (write(out, &b->self, sizeof b->self) != sizeof b->self || read(in, to, sizeof *to) != sizeof *to)
        die("the other process", errno);
    bare_connect(b, to, (uint8_t)gid);
    char ready = 1; /* both are, before anything is sent */
    if (write(out, &ready, 1) != 1 || read(in, &ready, 1) != 1) die("the other process", errno);
}

int main(int argc, char **argv) {
    char err[256] = "";
    static bare b;
    bare_where to;
    int there[2], back[2];
    if (argc != 5) die("usage: bare_ping DEVICE PEER_DEVICE GID PINGS", argc);
    uint32_t gid = (uint32_t)atoi(argv[3]), n = (uint32_t)atoi(argv[4]);
    double *took = calloc(n, sizeof *took);
    if (!n || !took || pipe(there) || pipe(back)) die("pings", n);
    if (fab_verbs_load(NULL, err, sizeof err) < 0) die(err, 0);
    pid_t child = fork();
    if (child < 0) die("fork", errno);
    close(child ? there[0] : there[1]); /* so that the end of one process is seen by the other */
    close(child ? back[1] : back[0]);
    if (!child) {
        meet(&b, argv[2], gid, there[0], back[1], &to);
        for (uint32_t i = 0; i < n; i++) {
            bare_wait(&b);
            bare_post(&b, &to);
        }
        char over; /* its last write may still be on its way */
        _exit(read(there[0], &over, 1) != 1);
    }
    meet(&b, argv[1], gid, back[0], there[1], &to);
    for (uint32_t i = 0; i < n; i++) {
        uint64_t begin = fv_clock();
        bare_post(&b, &to);
        bare_wait(&b);
        took[i] = (double)(fv_clock() - begin) / 2000;
    }
    int status = 1;
    if (write(there[1], "", 1) != 1 || waitpid(child, &status, 0) != child) die("the other process", errno);
    printf("%.3f\n", median(took, n));
    return status != 0;
}
