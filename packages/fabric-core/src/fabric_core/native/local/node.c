/* node.c - a node's life and its control thread: accept, time-outs, heartbeat, death of peers, freeing of links. */
#include "local_int.h"

#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define HALF_OPEN_MAX 128u    /* accepted, not yet up */
#define MAX_LINKS 4096u
#define FAULT_EVERY_NS 1000000000u    /* refused handshakes are told at most so often; all are counted */
#define RETRY_NS 5000000u     /* a full backlog is tried again after this */
#define STARVED_BEATS 30u     /* heartbeats beyond the two that a peer has, if it waits for a processor */

uint64_t fl_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void poke(int fd) {
    ssize_t r = write(fd, &(uint64_t){1}, 8);   /* non-blocking; a full eventfd is readable anyway */
    (void)r;
}

void fl_cmd(fl_link *l, uint32_t bits) {
    struct fab_local_node *n = l->node;         /* l may be freed as soon as its last bit is set */
    if (bits) atomic_fetch_or_explicit(&l->cmd, bits, memory_order_release);   /* what they refer to is visible */
    else atomic_store_explicit(&l->eng_done, true, memory_order_release);      /* the engine's last touch */
    if (!atomic_exchange_explicit(&n->cmd_pending, 1, memory_order_acq_rel)) poke(n->cmdfd);
}

static void raise_nic(fl_dom *d) {
    /* Sleep protocol (channel.h): seq_cst store of the news, then seq_cst load of "asleep?". */
    atomic_store_explicit(&d->ev_pending, 1, memory_order_seq_cst);
    if (atomic_load_explicit(&d->node->hdr->nic[d->nic].armed, memory_order_seq_cst)) poke(d->efd);
}

void fl_raise(fl_link *l, uint32_t bits) {
    atomic_fetch_or_explicit(&l->ev, bits, memory_order_release);    /* down_status etc. come before the bit */
    raise_nic(l->dom);
}

/* ---- what is refused ------------------------------------------------------------------------- */

void fl_refused(struct fab_local_node *n, int what) {
    atomic_fetch_add_explicit(&n->refused[what], 1, memory_order_relaxed); /* a count, nothing hangs on it */
}

void fl_refused_access(struct fab_local_node *n, int status) {
    if (status == -EKEYREVOKED) fl_refused(n, FL_R_REVOKED);
    else if (status == -EFAULT) fl_refused(n, FL_R_RANGE);
    else if (status == -EACCES) fl_refused(n, FL_R_RIGHTS);
}

void fl_refused_peer(struct fab_local_node *n, int status) {
    switch (status) {
    case -EACCES: fl_refused(n, FL_R_AUTH); break;
    case -ESTALE: fl_refused(n, FL_R_STALE); break;
    case -EUSERS: fl_refused(n, FL_R_LINKS); break;
    case -EPROTO: fl_refused(n, FL_R_MALFORMED); break;
    default: break;
    }
    uint64_t now = fl_now();
    if (status != -EACCES || (n->fault_at && now - n->fault_at < FAULT_EVERY_NS)) return;
    n->fault_at = now;
    atomic_store_explicit(&n->fault, -EKEYREJECTED, memory_order_relaxed); /* a number; ev_pending publishes it */
    raise_nic(&n->dom[0]);
}

/* ---- links, on the control thread ------------------------------------------------------------ */

static void close_fds(fl_link *l) {
    int *f[] = {&l->fd, &l->pidfd};
    for (int i = 0; i < 2; i++)
        if (*f[i] >= 0) {
            epoll_ctl(l->node->epfd, EPOLL_CTL_DEL, *f[i], NULL); /* by hand: a forked child may hold the file open */
            close(*f[i]);
            *f[i] = -1;
        }
}

static bool half_open(const fl_link *l) { return l->in && (l->st == FL_ST_HELLO || l->st == FL_ST_PROOF); }

static void set_closed(fl_link *l) {
    if (half_open(l)) l->node->half_open--;
    pthread_mutex_lock(&l->node->mu);
    l->st = FL_ST_CLOSED;
    pthread_mutex_unlock(&l->node->mu);
}

void fl_link_lost(fl_link *l, int status) {
    bool was_up = l->st == FL_ST_UP;
    set_closed(l);
    if (!l->in && was_up) {
        /* The engine may be in a copy to this peer: the socket stays open until it has stopped (FL_CMD_CLOSE), because the
         * peer takes the end of the socket as the end of our writes. */
        epoll_ctl(l->node->epfd, EPOLL_CTL_DEL, l->fd, NULL);
        if (l->pidfd >= 0) epoll_ctl(l->node->epfd, EPOLL_CTL_DEL, l->pidfd, NULL);
    } else {
        close_fds(l);
    }
    l->down_status = status;
    if (!atomic_load_explicit(&l->eng_done, memory_order_acquire)) fl_raise(l, FL_EV_DOWN);
}

void fl_link_free(fl_link *l) {
    close_fds(l);
    if (l->peer_efd >= 0) close(l->peer_efd);
    if (l->maps)
        for (uint32_t i = 0; i < FL_MAPS; i++) fl_map_undo(l->node->gpu, &l->maps[i]);
    fl_shm_put(l->chan_shm);
    fl_shm_put(l->peer_shm);
    free(l->slots);
    free(l->rec[FL_MSG].owner);
    free(l->rec[FL_BNC].owner);
    free(l->maps);
    free(l);
}

/* Room for whoever comes now: of those that have said nothing yet the one that came first goes, else the first of all. */
static void drop_oldest(struct fab_local_node *n) {
    fl_link *silent = NULL, *first = NULL;
    pthread_mutex_lock(&n->mu);
    for (fl_link *l = n->links; l; l = l->all) { /* the newest come first */
        if (!half_open(l)) continue;
        first = l;
        if (l->st == FL_ST_HELLO) silent = l;
    }
    pthread_mutex_unlock(&n->mu);
    fl_refused(n, FL_R_HALF_OPEN);
    if (silent || first) fl_link_lost(silent ? silent : first, -ECONNABORTED);
}

static void accept_all(struct fab_local_node *n, uint64_t now) {
    for (int i = 0; i < 32; i++) {
        int fd = accept4(n->lfd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd < 0 && (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS)) {
            epoll_ctl(n->epfd, EPOLL_CTL_DEL, n->lfd,
                      NULL); /* or it would wake us without end; the next tick tries again */
            n->accept_off = true;
        }
        if (fd < 0) return;
        struct ucred u;
        socklen_t len = sizeof u;
        fl_link *l = NULL;
        bool foreign = getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &u, &len) || u.uid != geteuid();
        if (foreign) fl_refused(n, FL_R_UID);
        if (foreign || !(l = aligned_alloc(64, (sizeof *l + 63) / 64 * 64))) {
            close(fd);
            continue;
        }
        if (n->half_open >= HALF_OPEN_MAX) drop_oldest(n);
        memset(l, 0, sizeof *l);
        l->node = n;
        l->in = true;
        l->fd = fd;
        l->pidfd = l->peer_efd = -1;
        l->pid = u.pid;
        l->st = FL_ST_HELLO;
        l->deadline = now + n->connect_ns;
        atomic_init(&l->eng_done, true);
        fl_ring_init(&l->node_ring);
        n->half_open++;
        struct epoll_event e = {.events = EPOLLIN | EPOLLRDHUP, .data.ptr = l};
        bool ok = epoll_ctl(n->epfd, EPOLL_CTL_ADD, fd, &e) == 0;
        pthread_mutex_lock(&n->mu);
        l->all = n->links;
        n->links = l;
        pthread_mutex_unlock(&n->mu);
        if (ok) fl_incoming(l);   /* its hello is mostly there: it is not silent any more when the next one comes */
        else fl_link_lost(l, -ENOMEM);
    }
}

/* Whether the peer's control thread could run, but the kernel lets it wait: on a machine with too much to do that was seen for a
 * minute. Who was stopped, or hangs, is in another state; where processes cannot be looked at, nobody is. */
static bool starved(const fl_link *l) {
    char path[64], text[256];
    int tid = atomic_load_explicit(&l->ph->tid, memory_order_relaxed); /* constant; 0 from an earlier version */
    snprintf(path, sizeof path, "/proc/%d/task/%d/stat", (int)l->pid, tid);
    int fd = l->pid > 0 && tid > 0 ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0) return false;
    ssize_t k = read(fd, text, sizeof text - 1);
    close(fd);
    text[k > 0 ? k : 0] = 0;
    const char *name_end = strrchr(text, ')');
    return name_end && !strncmp(name_end, ") R", 3);
}

/* One pass over a link; returns when it wants the next one. */
static uint64_t service(fl_link *l, uint64_t now, bool tick, bool fresh) {
    struct fab_local_node *n = l->node;
    uint32_t cmd = atomic_exchange_explicit(&l->cmd, 0, memory_order_acquire);
    if (cmd & FL_CMD_CLOSE) {
        if (l->st != FL_ST_CLOSED) set_closed(l);
        close_fds(l);
        return UINT64_MAX;
    }
    if (l->st == FL_ST_NEW || l->st == FL_ST_CONNECT) fl_start(l, now);
    if (l->st != FL_ST_UP) {
        if (l->st == FL_ST_CLOSED) return UINT64_MAX;
        if (now >= l->deadline) {
            fl_link_lost(l, -ETIMEDOUT);
            return UINT64_MAX;
        }
        return l->st == FL_ST_CONNECT && now + RETRY_NS < l->deadline ? now + RETRY_NS : l->deadline;
    }
    if (cmd & FL_CMD_MAP || (tick && !l->in)) fl_ask_maps(l);
    uint64_t next = l->populating && fl_populate(l) ? now : UINT64_MAX;
    if (!tick) return next;
    uint64_t b = atomic_load_explicit(&l->ph->beat, memory_order_relaxed); /* only its movement matters */
    if (b != l->beat || fresh) {
        l->beat = b;
        l->beat_at = now;
        l->waited = 0;
    } else if (now - l->beat_at > 2 * n->heartbeat_ns) {
        if (l->waited++ == STARVED_BEATS || !starved(l)) {
            fl_link_lost(l, -ETIMEDOUT);
            return UINT64_MAX;
        }
        l->beat_at = now - n->heartbeat_ns; /* it is looked at again when it has had the time to beat */
    }
    if (!l->in) fl_stale_maps(l);
    return next;
}

static uint64_t pass(struct fab_local_node *n) {
    uint64_t now = fl_now(), next;
    bool tick = now >= n->next_tick, fresh = false;
    if (tick) {
        atomic_fetch_add_explicit(&n->hdr->beat, 1, memory_order_relaxed);
        /* If it was us who stood still (stopped, starved), what we did not see says nothing about the peers. */
        fresh = now > n->next_tick + n->heartbeat_ns / 4;
        n->next_tick = now + n->heartbeat_ns / 4;
        if (n->accept_off) {
            struct epoll_event e = {.events = EPOLLIN, .data.u64 = 0};
            if (!epoll_ctl(n->epfd, EPOLL_CTL_ADD, n->lfd, &e)) n->accept_off = false;
        }
    }
    next = n->next_tick;
    atomic_exchange_explicit(&n->cmd_pending, 0,
                             memory_order_acq_rel); /* before the links are looked at: a later command pokes again */
    pthread_mutex_lock(&n->mu);
    fl_link *l = n->links; /* others only put in front, only this thread takes out */
    pthread_mutex_unlock(&n->mu);
    for (fl_link *after; l; l = after) {
        after = l->all;
        uint64_t t = service(l, now, tick, fresh);
        if (t < next) next = t;
        if (l->st == FL_ST_CLOSED && atomic_load_explicit(&l->eng_done, memory_order_acquire)) {
            pthread_mutex_lock(&n->mu);
            for (fl_link **p = &n->links; *p; p = &(*p)->all)
                if (*p == l) {
                    *p = l->all;
                    break;
                }
            pthread_mutex_unlock(&n->mu);
            if (l->counted) n->links_up--;
            if (!l->in) atomic_fetch_sub_explicit(&n->links_out, 1, memory_order_relaxed); /* a count */
            fl_link_free(l);
        }
    }
    return next;
}

static void *control(void *arg) {
    struct fab_local_node *n = arg;
    atomic_store_explicit(&n->hdr->tid, (int)syscall(SYS_gettid), memory_order_relaxed);
    while (!atomic_load_explicit(&n->stop, memory_order_acquire)) {
        uint64_t next = pass(n), now = fl_now(), buf;
        struct epoll_event e[64];
        int ms = next <= now ? 0 : (int)((next - now) / 1000000 + 1), k = epoll_wait(n->epfd, e, 64, ms);
        for (int i = 0; i < k; i++) { /* links are freed in pass() only, so that no pointer here is stale */
            uint64_t tag = e[i].data.u64;
            fl_link *l = (fl_link *)(uintptr_t)(tag & ~(uint64_t)3);
            if (tag == 0) accept_all(n, fl_now());
            else if (tag == 2) {
                if (read(n->cmdfd, &buf, 8) < 0) continue;
            } else if (l->st == FL_ST_CLOSED) continue;
            else if (tag & 1) {
                fl_incoming(l);
                if (l->st != FL_ST_CLOSED) fl_link_lost(l, -ECONNRESET);
            } else fl_incoming(l);
        }
    }
    return NULL;
}

/* ---- open and close -------------------------------------------------------------------------- */

static void node_free(struct fab_local_node *n) {
    if (n->thread_on) {
        atomic_store_explicit(&n->stop, 1, memory_order_release);
        poke(n->cmdfd);
        pthread_join(n->thread, NULL);
    }
    struct stat st;
    if (n->path[0] && stat(n->path, &st) == 0 && st.st_ino == n->path_ino && st.st_dev == n->path_dev) unlink(n->path);
    for (fl_link *l = n->links, *after; l; l = after) {
        after = l->all;
        fl_link_free(l);
    }
    for (uint32_t i = 0; i < n->nics; i++) {
        fl_dom *d = &n->dom[i];
        if (d->efd >= 0) close(d->efd);
        fl_gpu_free(d->gpu);
        free(d->recvs);
        free(d->liov);
        free(d->riov);
        free(d->peers);
    }
    if (n->mr)
        for (uint32_t i = 0; i < FL_MRS; i++)
            if (n->mr[i].fd >= 0) close(n->mr[i].fd);
    free(n->mr);
    fl_shm_put(n->hdr_shm);
    int fds[] = {n->lfd, n->epfd, n->cmdfd, n->hdr_fd};
    for (int i = 0; i < 4; i++)
        if (fds[i] >= 0) close(fds[i]);
    pthread_mutex_destroy(&n->mu);
    pthread_mutex_destroy(&n->mr_mu);
    pthread_mutex_destroy(&n->quiesce_mu);
    explicit_bzero(n->key, sizeof n->key);
    free(n);
}

void fl_node_unref(struct fab_local_node *n) {
    if (n->pid != getpid()) return; /* a forked child: the node is its parent's, and its thread does not exist here */
    if (atomic_fetch_sub_explicit(&n->refs, 1, memory_order_acq_rel) == 1) node_free(n);
}

static int dom_init(fl_dom *d, struct fab_local_node *n, uint32_t nic, int64_t seed) {
    d->node = n;
    d->nic = nic;
    fl_ring_init(&d->active);
    fl_ring_init(&d->ins);
    d->rng = seed < 0 ? 0 : ((uint64_t)seed * 8 + nic + 1) * 0x9e3779b97f4a7c15ull | 1;
    d->efd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (d->efd < 0) return -errno;
    d->recvs = calloc(FL_RECVS, sizeof *d->recvs);
    d->liov = calloc(IOV_MAX, sizeof *d->liov);
    d->riov = calloc(IOV_MAX, sizeof *d->riov);
    return d->recvs && d->liov && d->riov ? 0 : -ENOMEM;
}

static int node_setup(struct fab_local_node *n, const fab_local_cfg *c) {
    int r = fl_random(&n->inc, sizeof n->inc);
    if (!r)
        r = fl_random(&n->gen_seed,
                      sizeof n->gen_seed); /* so that a key of an earlier incarnation is hardly ever valid */
    if (!n->inc) n->inc = 1;
    if (!r) r = fl_shm_create("fabric-node", sizeof(fl_node_hdr), &n->hdr_shm, &n->hdr_fd);
    if (r) return r;
    n->hdr = n->hdr_shm->at;
    n->hdr->inc = n->inc;
    n->mr = calloc(FL_MRS, sizeof *n->mr);
    if (!n->mr) return -ENOMEM;
    for (uint32_t i = 0; i < FL_MRS; i++) {
        n->mr[i].fd = -1;
        n->mr[i].next_free = i + 1 < FL_MRS ? i + 1 : UINT32_MAX;
    }
    for (uint32_t i = 0; i < n->nics && !r; i++) r = dom_init(&n->dom[i], n, i, c->shuffle_seed);
    for (uint32_t i = 0; i < n->nics && !r && n->gpu >= 0; i++)
        r = fl_gpu_new(n->gpu, c->gpu_linger_ns, &n->dom[i].gpu);
    if (r) return r;
    n->epfd = epoll_create1(EPOLL_CLOEXEC);
    n->cmdfd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    struct epoll_event e = {.events = EPOLLIN, .data.u64 = 2};
    if (n->epfd < 0 || n->cmdfd < 0 || epoll_ctl(n->epfd, EPOLL_CTL_ADD, n->cmdfd, &e)) return -errno;
    return 0;
}

static int node_start(struct fab_local_node *n) {
    struct epoll_event e = {.events = EPOLLIN, .data.u64 = 0};
    if (epoll_ctl(n->epfd, EPOLL_CTL_ADD, n->lfd, &e)) return -errno;
    sigset_t all, old; /* signals belong to the program's own threads */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    n->next_tick = fl_now();
    int r = pthread_create(&n->thread, NULL, control, n);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    n->thread_on = r == 0;
    return -r;
}

static bool name_ok(const char *s) {
    size_t n = s ? strspn(s, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-") : 0;
    return n && n <= FL_NAME_MAX && !s[n];
}

int fab_local_open(const fab_local_cfg *c, fab_local_node **out, char *err, size_t cap) {
    char none[1];
    if (!err || !cap) {
        err = none;
        cap = 1;
    }
    err[0] = 0;
    const char *bad = !c || !out                              ? "no configuration was given"
                      : !name_ok(c->name)                     ? "a name is 1 to 64 of A-Z a-z 0-9 _ -"
                      : c->nics < 1 || c->nics > FAB_MAX_NICS ? "the number of NICs is 1 to 8"
                      : c->path > FL_PATH_BOUNCE              ? "the path is 0 auto, 1 map, 2 cma or 3 bounce"
                      : !c->dir || c->dir[0] != '/' || strlen(c->dir) >= sizeof((fab_local_node *)0)->dir
                          ? "the socket directory must be an absolute path of less than 96 bytes"
                          : NULL;
    if (bad) {
        snprintf(err, cap, "%s", bad);
        return -EINVAL;
    }
    size_t size = (sizeof(fab_local_node) + 63) / 64 * 64;
    fab_local_node *n = aligned_alloc(64, size);
    if (!n) {
        snprintf(err, cap, "out of memory");
        return -ENOMEM;
    }
    memset(n, 0, size);
    snprintf(n->name, sizeof n->name, "%s", c->name);
    snprintf(n->dir, sizeof n->dir, "%s", c->dir);
    n->nics = c->nics;
    n->path_mode = c->path;
    n->connect_ns = c->connect_timeout_ns ? c->connect_timeout_ns : 2000000000u;
    n->heartbeat_ns = c->heartbeat_ns ? c->heartbeat_ns : 1000000000u;
    n->max_links = c->max_links ? c->max_links : MAX_LINKS;
    n->gpu = (int)c->gpu - 1;
    n->has_key = c->key != NULL;
    if (c->key) memcpy(n->key, c->key, sizeof n->key);
    n->pid = getpid();
    n->lfd = n->epfd = n->cmdfd = n->hdr_fd = -1;
    for (uint32_t i = 0; i < FAB_MAX_NICS; i++) n->dom[i].efd = -1;
    pthread_mutex_init(&n->mu, NULL);
    pthread_mutex_init(&n->mr_mu, NULL);
    pthread_mutex_init(&n->quiesce_mu, NULL);
    atomic_init(&n->refs, c->nics);
    int r = fl_check_dir(c->dir, err, cap);
    if (!r) r = node_setup(n, c);
    if (!r) r = fl_claim(n, err, cap);
    if (!r) r = node_start(n);
    if (r) {
        if (!err[0]) snprintf(err, cap, "cannot open the local node %s: %s", c->name, strerror(-r));
        node_free(n);
        return r;
    }
    *out = n;
    return 0;
}

void *fab_local_domain(fab_local_node *n, uint32_t nic) { return n && nic < n->nics ? &n->dom[nic] : NULL; }
uint64_t fab_local_malformed(fab_local_node *n) {
    return atomic_load_explicit(&n->refused[FL_R_MALFORMED], memory_order_relaxed) +
           atomic_load_explicit(&n->refused[FL_R_VERSION], memory_order_relaxed);
}
