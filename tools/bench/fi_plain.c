/* fi_plain - the yardstick of the libfabric backend: what a plain program gets out of the same provider.
 *
 *     fi_plain LIBRARY PROVIDER NODE SIZE COUNT WINDOW ROUNDS
 *
 * Two processes, one endpoint each. The first writes COUNT times SIZE bytes with fi_writemsg, each with remote CQ data, at
 * most WINDOW at a time (0: as many as the provider takes), into places one after the other; the clock runs from the first
 * post until the second process has seen all COUNT and said so over a pipe. Prints one line of seconds per round. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define SPAN (64ul << 20) /* places walk over this much memory */
#define BATCH 64

static int peer_fd;

static void die(const char *what, long rc) {
    fprintf(stderr, "fi_plain: %s: %ld\n", what, rc);
    exit(3);
}
#define CHECK(call)               \
    do {                          \
        long rc_ = (long)(call);  \
        if (rc_) die(#call, rc_); \
    } while (0)

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
static void say(const void *p, size_t n) {
    if (write(peer_fd, p, n) != (ssize_t)n) _exit(9);
}
static void hear(void *p, size_t n) {
    for (size_t at = 0; at < n;) {
        ssize_t r = read(peer_fd, (char *)p + at, n - at);
        if (r <= 0) _exit(9);
        at += (size_t)r;
    }
}

typedef struct side {
    struct fi_info *info;
    struct fid_fabric *fabric;
    struct fid_domain *domain;
    struct fid_cq *cq;
    struct fid_av *av;
    struct fid_ep *ep;
    struct fid_mr *mr;
    fi_addr_t peer;
    char *memory;
    uint64_t key, base;
} side;

typedef struct hello {
    uint64_t key, base, len;
    char name[256];
} hello;

static void open_side(side *s, void *lib, const char *provider, const char *node, int number) {
    int (*getinfo)(uint32_t, const char *, const char *, uint64_t, const struct fi_info *, struct fi_info **);
    int (*fabric)(struct fi_fabric_attr *, struct fid_fabric **, void *);
    struct fi_info *(*dupinfo)(const struct fi_info *);
    uint32_t (*version)(void);
    *(void **)&getinfo = dlsym(lib, "fi_getinfo");
    *(void **)&fabric = dlsym(lib, "fi_fabric");
    *(void **)&dupinfo = dlsym(lib, "fi_dupinfo");
    *(void **)&version = dlsym(lib, "fi_version");
    struct fi_info *h = dupinfo(NULL);
    h->caps = FI_MSG | FI_RMA;
    h->mode = FI_CONTEXT | FI_CONTEXT2;
    h->ep_attr->type = FI_EP_RDM;
    h->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
    h->domain_attr->threading = FI_THREAD_DOMAIN;
    h->domain_attr->control_progress = h->domain_attr->data_progress = FI_PROGRESS_MANUAL;
    h->fabric_attr->prov_name = strdup(provider);
    CHECK(getinfo(version(), *node ? node : NULL, NULL, *node ? FI_SOURCE : 0, h, &s->info));
    CHECK(fabric(s->info->fabric_attr, &s->fabric, NULL));
    CHECK(fi_domain(s->fabric, s->info, &s->domain, NULL));
    struct fi_cq_attr ca = {.format = FI_CQ_FORMAT_DATA, .size = 32768, .wait_obj = FI_WAIT_NONE};
    CHECK(fi_cq_open(s->domain, &ca, &s->cq, NULL));
    struct fi_av_attr aa = {.type = FI_AV_TABLE};
    CHECK(fi_av_open(s->domain, &aa, &s->av, NULL));
    CHECK(fi_endpoint(s->domain, s->info, &s->ep, NULL));
    CHECK(fi_ep_bind(s->ep, &s->av->fid, 0));
    CHECK(fi_ep_bind(s->ep, &s->cq->fid, FI_TRANSMIT | FI_RECV));
    CHECK(fi_enable(s->ep));
    s->memory = mmap(NULL, SPAN, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    memset(s->memory, number ? 0 : 0x5a, SPAN);
    CHECK(fi_mr_reg(s->domain, s->memory, SPAN, FI_WRITE | FI_REMOTE_WRITE, 0, (uint64_t)number + 7, 0, &s->mr, NULL));
    hello mine = {.key = fi_mr_key(s->mr), .len = sizeof mine.name}, theirs;
    if (s->info->domain_attr->mr_mode & FI_MR_VIRT_ADDR) mine.base = (uint64_t)(uintptr_t)s->memory;
    CHECK(fi_getname(&s->ep->fid, mine.name, &mine.len));
    say(&mine, sizeof mine);
    hear(&theirs, sizeof theirs);
    if (fi_av_insert(s->av, theirs.name, 1, &s->peer, 0, NULL) != 1) die("fi_av_insert", 0);
    s->key = theirs.key;
    s->base = theirs.base;
}

static long drain(side *s) {
    struct fi_cq_data_entry e[BATCH];
    ssize_t n = fi_cq_read(s->cq, e, BATCH);
    if (n == -FI_EAGAIN) return 0;
    if (n < 0) die("fi_cq_read", n);
    return n;
}

static void receive(side *s, long count, long rounds) {
    for (long r = 0; r < rounds; r++) {
        for (long seen = 0; seen < count;) seen += drain(s);
        say("x", 1);
    }
    char end;
    double until = now() + 5;
    while (recv(peer_fd, &end, 1, MSG_DONTWAIT) < 0 && now() < until) drain(s);
}

static double send_round(side *s, uint64_t size, long count, long window) {
    static struct fi_context2 contexts[65536];
    uint64_t places = SPAN / (size ? size : 1);
    struct iovec iov = {.iov_len = size};
    struct fi_rma_iov remote = {.len = size, .key = s->key};
    void *desc = fi_mr_desc(s->mr);
    struct fi_msg_rma msg = {
        .msg_iov = &iov, .desc = &desc, .iov_count = 1, .addr = s->peer, .rma_iov = &remote, .rma_iov_count = 1};
    double begin = now();
    long posted = 0, done = 0;
    while (done < count) {
        while (posted < count && (!window || posted - done < window)) {
            uint64_t at = (uint64_t)posted % places * size;
            iov.iov_base = s->memory + at;
            remote.addr = s->base + at;
            msg.context = &contexts[posted & 65535];
            msg.data = (uint64_t)posted & 0xffffffff;
            ssize_t rc = fi_writemsg(s->ep, &msg, FI_COMPLETION | FI_REMOTE_CQ_DATA);
            if (rc == -FI_EAGAIN) break;
            if (rc) die("fi_writemsg", rc);
            posted++;
        }
        done += drain(s);
    }
    char seen;
    while (recv(peer_fd, &seen, 1, MSG_DONTWAIT) < 0) drain(s); /* progress is manual: it may still be on its way */
    return now() - begin;
}

int main(int argc, char **argv) {
    if (argc != 8) {
        fprintf(stderr, "usage: fi_plain LIBRARY PROVIDER NODE SIZE COUNT WINDOW ROUNDS\n");
        return 2;
    }
    uint64_t size = strtoull(argv[4], NULL, 10);
    long count = atol(argv[5]), window = atol(argv[6]), rounds = atol(argv[7]);
    int fds[2];
    if (size > SPAN || socketpair(AF_UNIX, SOCK_STREAM, 0, fds)) return 2;
    pid_t parent = getpid();
    int number = fork() == 0;
    if (number) prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (number && getppid() != parent) return 9;
    peer_fd = fds[number];
    close(fds[!number]);
    void *lib = dlopen(argv[1], RTLD_NOW);
    if (!lib) die(dlerror(), 0);
    static side s;
    open_side(&s, lib, argv[2], argv[3], number);
    if (number) {
        receive(&s, count, rounds);
        _exit(0);
    }
    for (long r = 0; r < rounds; r++) printf("%.9f\n", send_round(&s, size, count, window));
    fflush(stdout);
    say("e", 1);
    _exit(0);
}
