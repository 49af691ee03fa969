/* fuzz_local_wire.c - libFuzzer at the door of a local node: everything a stranger, or a peer with a bug, can say on the
 * control socket (S2, S8, C12). `make fuzz` builds and runs it.
 *
 * An input is a script of messages. Bytes that chance would never hit (magic, size, a right proof) are put in on request,
 * so that the code behind them is reached too. After each input nothing may be left: no link, descriptor or mapping.
 */
#include "local/wire.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

enum { HEAD = 1, NAME = 2, PROVE = 4, FDS = 8, WRONG_FDS = 16, CUT = 32 };
#define SAY 96u /* bytes of a message that an input gives */

static const uint8_t key[32] = "a secret that the inputs may use";
static char dir[64];
static fab_local_node *nodes[3]; /* with a secret, without, and one that comes to us and maps what we give it */
static int door; /* where it comes to */
static fab_local_node signer;
static int fds_before;

static void die(const char *what) {
    fprintf(stderr, "fuzz_local_wire: %s\n", what);
    abort();
}
static int count_fds(void) {
    DIR *d = opendir("/proc/self/fd");
    int n = 0;
    if (!d) die("no /proc");
    while (readdir(d)) n++;
    closedir(d);
    return n;
}
static void tidy(void) {
    for (int i = 0; i < 3; i++)
        if (nodes[i]) fab_local_ops()->close(fab_local_domain(nodes[i], 0));
    char path[80];
    snprintf(path, sizeof path, "%s/.lock", dir);
    unlink(path);
    snprintf(path, sizeof path, "%s/us.sock", dir);
    unlink(path);
    rmdir(dir);
}
static struct sockaddr_un at(const char *name) {
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    snprintf(a.sun_path, sizeof a.sun_path, "%s/%s.sock", dir, name);
    return a;
}
static void start(void) {
    char err[256];
    snprintf(dir, sizeof dir, "/tmp/fab-fuzz-%d", getpid());
    for (int i = 0; i < 3; i++) {
        fab_local_cfg c = {.dir = dir,
                           .name = i == 1 ? "open"
                                   : i    ? "comes"
                                          : "closed",
                           .nics = 1,
                           .path = i == 2,
                           .shuffle_seed = -1,
                           .connect_timeout_ns = 10000000000u,
                           .key = i == 1 ? NULL : key};
        if (fab_local_open(&c, &nodes[i], err, sizeof err)) die(err);
    }
    struct sockaddr_un a = at("us");
    door = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (door < 0 || bind(door, (struct sockaddr *)&a, sizeof a) || listen(door, 4)) die("listen");
    signer.has_key = true;
    memcpy(signer.key, key, sizeof key);
    atexit(tidy);
    fds_before = count_fds() + 4; /* libFuzzer opens some of its own */
}
static int knock(const char *name) {
    struct sockaddr_un a = at(name);
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    struct timeval tv = {.tv_sec = 5};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &tv, sizeof tv);
    if (fd < 0 || connect(fd, (struct sockaddr *)&a, sizeof a)) die("connect");
    return fd;
}
/* Waits for an answer, or the end (false). Descriptors are not taken. */
static bool hear(int fd, fl_wire *m) {
    ssize_t n = recv(fd, m, sizeof *m, 0);
    if (n < 0 && errno == EAGAIN) die("a node does not answer");
    return n > 0;
}

/* What is over must go; looked at every now and then, because counting takes longer than an input. */
static void settle(void) {
    static unsigned runs;
    fab_wc wc[16];
    bool look = ++runs % 256 == 0;
    for (int tries = 0;; tries++) {
        for (int i = 0; i < 3; i++) fab_local_ops()->poll(fab_local_domain(nodes[i], 0), wc, 16, 0);
        if (!look || count_fds() <= fds_before) return;
        if (tries == 5000) die("descriptors were left behind");
        usleep(1000);
    }
}

/* Takes the next message of the script: how it is sent, and its bytes. */
static uint8_t take(const uint8_t **data, size_t *size, fl_wire *m) {
    uint8_t how = *(*data)++;
    size_t n = --*size < SAY ? *size : SAY;
    memset(m, 0, sizeof *m);
    memcpy(m, *data, n);
    *data += n;
    *size -= n;
    return how;
}

/* The other way round: a node comes to us, and we answer as the script says. */
static void visited(const uint8_t *data, size_t size) {
    void *d = fab_local_domain(nodes[2], 0);
    const fab_domain_ops *ops = fab_local_ops();
    uint32_t peer, up = 0, down = 0, ended = 0, posted = 0;
    char source[64] = {0};
    fab_mr_keys mine;
    if (ops->peer_open(d, "us", 2, &peer)) die("peer_open");
    if (ops->mr_reg(d, &(fab_mr){.addr = (uintptr_t)source, .len = sizeof source, .fd = -1}, &mine)) die("mr_reg");
    int fd = accept4(door, NULL, NULL, SOCK_CLOEXEC);
    struct timeval tv = {.tv_sec = 5};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &tv, sizeof tv);
    fl_wire hello, m;
    if (fd < 0 || !hear(fd, &hello)) die("no hello");
    fl_shm *header;
    int header_fd, memory = memfd_create("target", MFD_CLOEXEC), wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (fl_shm_create("h", sizeof(fl_node_hdr), &header, &header_fd) || memory < 0 || ftruncate(memory, 8192))
        die("no shared memory");
    fl_node_hdr *h = header->at;
    h->mr[0].gen = 1;
    h->mr[0].flags = FL_MR_WRITE | FL_MR_MAPPABLE;
    h->mr[0].len = 64;
    bool living = true;
    for (int k = 0; k < 5 && size > 1 && living && !down; k++) {
        uint8_t how = take(&data, &size, &m);
        int fds[2] = {-1, -1}, nfds = 0;
        if (how & HEAD) {
            m.type = k == 0 ? FL_CHALLENGE : k == 1 ? FL_WELCOME : FL_MAPPED;
            m.magic = FL_MAGIC;
            m.version = FL_VERSION;
            m.size = sizeof m;
        }
        if (how & NAME) {
            memcpy(m.from_name, "us", 3);
            m.from_inc |= 1;
            m.to_inc = hello.from_inc;
            m.from_nic = m.to_nic = 0;
            m.flags = FL_WIRE_AUTH;
            m.key = 1ull << 32;
            if (!k) fl_sign_process(&m);
            if (k == 1) m.from_inc = h->inc;
            if (k > 1) m.status = m.len = 0, m.len = 64 + (m.off & 0x1000), m.off %= 8192;
        }
        if (!k) h->inc = m.from_inc;
        if (how & PROVE && !k) {
            fl_script s;
            fl_script_begin(&s, &hello, "us");
            fl_script_answer(&s, &m);
            fl_prove(&signer, &s, true, m.mac);
        }
        if (how & FDS) {
            fds[0] = k > 1 ? memory : header_fd;
            fds[1] = wake;
            nfds = k > 1 ? 1 : 2;
        } else if (how & WRONG_FDS) {
            fds[0] = fds[1] = 2;
            nfds = 1 + how % 2;
        }
        if (fl_wire_send(fd, &m, fds, nfds)) living = false;
        if (living && k == 0) living = hear(fd, &m); /* its PROOF; its descriptors end here */
        fab_wc wc[8];
        for (int i = 0; i < 2000 && k == 1 && !up && !down; i++) {
            int n = ops->poll(d, wc, 8, 0);
            for (int j = 0; j < n; j++) up |= wc[j].kind == FAB_WC_PEER_UP, down |= wc[j].kind == FAB_WC_PEER_DOWN;
            if (!n) usleep(20);
        }
        if (up && !posted) { /* it asks for the memory, and we answer something */
            fab_wr w = {.id = 1,
                        .len = 64,
                        .local_addr = (uintptr_t)source,
                        .local_key = mine.local_key,
                        .remote_key = 1ull << 32,
                        .kind = FAB_WR_WRITE};
            posted = ops->post(d, peer, &w, 1) == 1;
            ops->poll(d, wc, 8, 0);
            if (posted) living = hear(fd, &m);
        }
        for (int i = 0; i < 20 && posted && k > 1 && !ended; i++) {
            int n = ops->poll(d, wc, 8, 0);
            for (int j = 0; j < n; j++) ended |= wc[j].kind == FAB_WC_OP;
            if (!n) usleep(20);
        }
    }
    close(fd);
    ops->peer_close(d, peer);
    ops->mr_dereg(d, mine.local_key);
    fab_wc wc[8];
    for (int i = 0; i < 50; i++)
        if (ops->poll(d, wc, 8, 0) < 0) die("poll");
    fl_close_fds((int[]){header_fd, memory, wake}, 3);
    fl_shm_put(header);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (!nodes[0]) start();
    if (size < 2) return 0;
    uint8_t form = *data++;
    bool open = form & 1;
    size--;
    if (form & 2) {
        visited(data, size);
        settle();
        return 0;
    }
    /* first the check by itself, on exactly these bytes */
    fl_wire one;
    memset(&one, 0, sizeof one);
    memcpy(&one, data, size < sizeof one ? size : sizeof one);
    if (fl_wire_check(&one, size, false) == 0 && !memchr(one.from_name, 0, sizeof one.from_name) &&
        (one.type == FL_HELLO || one.type == FL_CHALLENGE))
        die("a name without an end was let through");

    int fd = knock(open ? "open" : "closed");
    fl_wire said = {0}, heard = {0};
    bool living = true;
    for (int k = 0; k < 6 && size > 1 && living; k++) {
        fl_wire m;
        uint8_t how = take(&data, &size, &m);
        if (how & HEAD) {
            uint16_t type = (uint16_t)(1 + m.type % FL_WIRE_TYPES);
            m.magic = FL_MAGIC;
            m.version = FL_VERSION;
            m.size = sizeof m;
            m.type = k == 0 && !(m.type & 0x100) ? FL_HELLO : k == 1 && !(m.type & 0x100) ? FL_PROOF : type;
        }
        if (how & NAME) {
            memcpy(m.from_name, "fuzz", 5);
            m.from_inc |= 1;
            m.to_inc = m.from_nic = m.to_nic = 0;
            m.flags = open ? 0 : FL_WIRE_AUTH;
            if (!k) fl_sign_process(&m);
        }
        if (!k) said = m;
        fl_shm *shm[2] = {NULL, NULL};
        int fds[3] = {-1, -1, -1}, nfds = 0;
        if (how & PROVE && m.type == FL_PROOF) {
            fl_script s;
            fl_script_begin(&s, &said, open ? "open" : "closed");
            fl_script_answer(&s, &heard);
            fl_prove(&signer, &s, false, m.mac);
        }
        if (how & FDS) {
            nfds = 3;
            if (fl_shm_create("h", sizeof(fl_node_hdr), &shm[0], &fds[0]) ||
                fl_shm_create("c", sizeof(fl_chan), &shm[1], &fds[1]))
                die("no shared memory");
            ((fl_node_hdr *)shm[0]->at)->inc = said.from_inc;
            fds[2] = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        } else if (how & WRONG_FDS) {
            nfds = 1 + how % 3;
            for (int i = 0; i < nfds; i++) fds[i] = dup(2);
        }
        struct iovec v = {&m, how & CUT ? 1 + m.size % sizeof m : sizeof m};
        if (how & CUT) {
            if (send(fd, v.iov_base, v.iov_len, MSG_NOSIGNAL) < 0) living = false;
        } else if (fl_wire_send(fd, &m, fds, nfds)) living = false;
        fl_close_fds(fds, nfds);
        if (living && k < 2) living = hear(fd, &heard);
        fl_shm_put(shm[0]);
        fl_shm_put(shm[1]);
    }
    shutdown(fd, SHUT_WR);
    for (fl_wire rest; hear(fd, &rest);) {
    }
    close(fd);
    settle();
    return 0;
}
