/* hand.c - the control thread's side of one link: connect, handshake, probe, mapping of peer memory. */
#include "wire.h"

#include <fcntl.h>
#include <stddef.h>
#include <stdio.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#ifndef SO_PEERPIDFD
#    define SO_PEERPIDFD 77
#endif
#ifndef MADV_POPULATE_WRITE
#    define MADV_POPULATE_WRITE 23
#endif
#define POPULATE_MAX (1ull << 30)
#define POPULATE_STEP (4ull << 20)
#define ASK_MAX 64            /* questions without an answer: more could fill both sockets */

/* Same uid only; then watch the socket and, because a forked child can keep a dead peer's socket open, its process. */
static int watch(fl_link *l) {
    struct ucred u;
    socklen_t len = sizeof u, plen = sizeof l->pidfd;
    if (getsockopt(l->fd, SOL_SOCKET, SO_PEERCRED, &u, &len)) return -errno;
    if (u.uid != geteuid()) return -EACCES;
    l->pid = u.pid;
    if (getsockopt(l->fd, SOL_SOCKET, SO_PEERPIDFD, &l->pidfd, &plen) || plen != sizeof l->pidfd)
        l->pidfd = u.pid > 0 ? (int)syscall(SYS_pidfd_open, u.pid, 0) : -1;
    struct epoll_event e = {.events = EPOLLIN | EPOLLRDHUP, .data.ptr = l},
                       p = {.events = EPOLLIN, .data.u64 = (uintptr_t)l | 1};
    if (epoll_ctl(l->node->epfd, EPOLL_CTL_ADD, l->fd, &e)) return -errno;
    if (l->pidfd >= 0) epoll_ctl(l->node->epfd, EPOLL_CTL_ADD, l->pidfd, &p);
    return 0;
}

/* A wake-up is one write to a descriptor that the peer gave us: it must neither block nor raise SIGPIPE. */
static bool safe_wake_fd(int fd) {
    struct stat st;
    int f = fcntl(fd, F_GETFL);
    return f >= 0 && (f & O_NONBLOCK) && fstat(fd, &st) == 0 && !S_ISFIFO(st.st_mode) && !S_ISSOCK(st.st_mode) &&
           !S_ISREG(st.st_mode);
}

static int say_hello(fl_link *l) {
    fl_shm *s;
    int chan_fd, r = fl_shm_create("fabric-chan", sizeof(fl_chan), &s, &chan_fd);
    if (r) return r;
    pthread_mutex_lock(&l->node->mu);
    l->chan_shm = s;
    l->ch = s->at;
    pthread_mutex_unlock(&l->node->mu);
    fl_chan_views(l->ch, &l->imm, l->rec);
    fl_wire m = fl_wire_make(FL_HELLO);
    m.from_inc = l->node->inc;
    m.to_inc = l->want_inc;
    m.from_nic = l->dom->nic;
    m.to_nic = l->peer_nic;
    snprintf(m.from_name, sizeof m.from_name, "%s", l->node->name);
    r = fl_wire_send(l->fd, &m, (int[]){l->node->hdr_fd, chan_fd, l->dom->efd}, 3);
    close(chan_fd);
    return r;
}

void fl_start(fl_link *l, uint64_t now) {
    if (l->st == FL_ST_NEW) {
        l->deadline = now + l->node->connect_ns;
        l->fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        if (l->fd < 0) {
            fl_link_lost(l, -errno);
            return;
        }
    }
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    int r = snprintf(a.sun_path, sizeof a.sun_path, "%s/%s.sock", l->node->dir, l->peer_name) < (int)sizeof a.sun_path
                ? 0
                : -ENAMETOOLONG;
    if (!r && connect(l->fd, (struct sockaddr *)&a, sizeof a)) r = -errno;
    if (r == -EAGAIN || r == -EINTR) {
        l->st = FL_ST_CONNECT;
        return;
    }   /* its backlog is full: try again until the deadline */
    if (!r) r = watch(l);
    if (!r) r = say_hello(l);
    if (r) fl_link_lost(l, r == -ENOENT ? -ECONNREFUSED : r == -EPERM ? -EACCES : r);
    else l->st = FL_ST_HELLO;
}

/* ---- receiving side ------------------------------------------------------------------------- */

static void on_hello(fl_link *l, const fl_wire *m, int *fds, int nfds) {
    struct fab_local_node *n = l->node;
    fl_shm *hdr = NULL, *chan = NULL;
    int r = nfds != 3 || m->from_nic >= FAB_MAX_NICS || !safe_wake_fd(fds[2]) ? -EPROTO
            : m->to_inc && m->to_inc != n->inc                                ? -ESTALE
            : m->to_nic >= n->nics || atomic_load(&n->dom[m->to_nic].closed)  ? -ECONNREFUSED
                                                                              : 0;
    if (!r) r = fl_shm_attach(fds[0], sizeof(fl_node_hdr), false, &hdr);
    if (!r) r = fl_shm_attach(fds[1], sizeof(fl_chan), true, &chan);
    if (!r && ((fl_node_hdr *)hdr->at)->inc != m->from_inc) r = -EPROTO;
    fl_wire w = fl_wire_make(r ? FL_REFUSE : FL_WELCOME);
    w.status = r;
    w.from_inc = n->inc;
    w.to_inc = m->from_inc;
    w.scratch = (uintptr_t)n->hdr->scratch;
    if (r) {
        atomic_fetch_add_explicit(&n->malformed, r == -EPROTO, memory_order_relaxed);
        fl_wire_send(l->fd, &w, NULL, 0);
        fl_shm_put(hdr);
        fl_shm_put(chan);
        fl_link_lost(l, r);
        return;
    }
    l->peer_efd = fds[2];
    fds[2] = -1;
    l->peer_shm = hdr;
    l->ph = hdr->at;
    l->peer_nic = m->from_nic;
    snprintf(l->peer_name, sizeof l->peer_name, "%.*s", FL_NAME_MAX, m->from_name);
    l->beat_at = fl_now();
    n->half_open--;
    fl_dom *d = &n->dom[m->to_nic];
    fl_chan_views(chan->at, &l->imm, l->rec);
    pthread_mutex_lock(&n->mu);      /* hands the link to the engine */
    l->chan_shm = chan;
    l->ch = chan->at;
    l->dom = d;
    l->st = FL_ST_UP;
    atomic_store_explicit(&l->eng_done, false, memory_order_relaxed); /* under mu, as the engine takes it under mu */
    l->in_next = d->in_new;
    d->in_new = l;
    pthread_mutex_unlock(&n->mu);
    fl_raise(l, 0);
    /* Last: from here on the peer writes, and a deregistration must find the link to wait for it (mr.c). */
    r = fl_wire_send(l->fd, &w, (int[]){n->hdr_fd, d->efd}, 2);
    if (r) fl_link_lost(l, r);
}

static void on_map(fl_link *l, const fl_wire *m) {
    fl_wire w = fl_wire_make(FL_MAPPED);
    w.key = m->key;
    int fd = fl_mr_share(l->node, l->dom->nic, m->key, &w.off, &w.len);
    w.status = fd < 0 ? fd : 0;
    int r = fl_wire_send(l->fd, &w, &fd, fd >= 0);
    if (fd >= 0) close(fd);
    if (r) fl_link_lost(l, r == -EAGAIN ? -ETIMEDOUT : -ECONNRESET); /* it asks and does not read the answers */
}

/* ---- connecting side ------------------------------------------------------------------------ */

/* The pid that the kernel names may be another process in another namespace: believe it only if a word written there
 * with process_vm_writev is seen in the shared header. */
static bool probe_cma(const fl_link *l, uint64_t scratch) {
    if (l->node->path_mode == FL_PATH_BOUNCE || l->pid <= 0) return false;
    for (int i = 0; i < 3; i++) {
        uint64_t nonce;
        if (fl_random(&nonce, sizeof nonce)) return false;
        uint32_t at =
            (uint32_t)(nonce % FL_SCRATCH); /* peers share the words: another may overwrite ours, hence three tries */
        struct iovec mine = {&nonce, 8}, theirs = {(void *)(uintptr_t)(scratch + 8 * at), 8};
        if (process_vm_writev(l->pid, &mine, 1, &theirs, 1, 0) != 8) return false;
        if (atomic_load_explicit(&l->ph->scratch[at], memory_order_relaxed) == nonce) return true;
    }
    return false;
}

static void on_welcome(fl_link *l, const fl_wire *m, int *fds, int nfds) {
    struct fab_local_node *n = l->node;
    int r = nfds != 2 || !safe_wake_fd(fds[1]) ? -EPROTO : l->want_inc && m->from_inc != l->want_inc ? -ESTALE : 0;
    fl_shm *hdr = NULL;
    if (!r) r = fl_shm_attach(fds[0], sizeof(fl_node_hdr), false, &hdr);
    if (!r && ((fl_node_hdr *)hdr->at)->inc != m->from_inc) r = -EPROTO;
    if (r) {
        fl_shm_put(hdr);
        fl_link_lost(l, r);
        return;
    }
    l->peer_shm = hdr;
    l->ph = hdr->at;
    l->peer_efd = fds[1];
    fds[1] = -1;
    l->direct = hdr->own && l->pid == getpid() && n->path_mode == FL_PATH_AUTO;
    l->cma = probe_cma(l, m->scratch);
    l->beat_at = fl_now();
    pthread_mutex_lock(&n->mu);
    l->st = FL_ST_UP;
    pthread_mutex_unlock(&n->mu);
    fl_raise(l, FL_EV_UP);
}

static int map_in(fl_map *e, int fd, uint64_t off, uint64_t len) {
    struct stat st;
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), lead = off & (page - 1);
    if (fstat(fd, &st)) return -errno;
    if (!len || off + len < off || (uint64_t)st.st_size < off + len) return -EFAULT;
    size_t raw_len = lead + len;
    char *raw = mmap(NULL, raw_len, PROT_READ | PROT_WRITE, MAP_SHARED, fd, (off_t)(off - lead));
    if (raw == MAP_FAILED) return -errno;
    e->raw = raw;
    e->raw_len = raw_len;
    e->at = raw + lead;
    e->len = len;
    e->populated = 0;
    return 0;
}

/* Page faults taken here are not taken by the engine. One step at a time: a fresh GiB takes long, and meanwhile the death
 * of another peer must be noticed. Returns whether there is more to do. */
bool fl_populate(fl_link *l) {
    for (uint32_t i = 0; i < FL_MAPS && l->populating; i++) {
        fl_map *e = &l->maps[i];
        if (atomic_load_explicit(&e->state, memory_order_relaxed) != FL_MAP_ASKED || !e->raw) continue;
        size_t left = e->raw_len - e->populated, step = left < POPULATE_STEP ? left : POPULATE_STEP;
        bool ok = e->populated < POPULATE_MAX && !madvise((char *)e->raw + e->populated, step, MADV_POPULATE_WRITE);
        e->populated += step;
        if (ok && step < left) return true;
        l->populating--;
        /* Release: whoever sees READY sees the mapping. */
        atomic_store_explicit(&e->state, FL_MAP_READY, memory_order_release);
        fl_raise(l, 0);
        break;
    }
    return l->populating;
}

static bool on_mapped(fl_link *l, const fl_wire *m, const int *fds, int nfds) {
    fl_map *e = &l->maps[(uint32_t)m->key & (FL_MAPS - 1)];
    if (atomic_load_explicit(&e->state, memory_order_relaxed) != FL_MAP_ASKED || e->key != m->key || e->raw)
        return false;
    e->err = m->status ? m->status : nfds != 1 ? -EPROTO : map_in(e, fds[0], m->off, m->len);
    if (!e->err) {
        l->populating++; /* pass() goes on with it */
    } else {
        atomic_store_explicit(&e->state, FL_MAP_FAILED, memory_order_release); /* release: err is visible */
        fl_raise(l, 0);
    }
    fl_ask_maps(l);
    return true;
}

void fl_ask_maps(fl_link *l) {
    if (l->st != FL_ST_UP || l->in) return;
    uint32_t asked = 0;
    for (uint32_t i = 0; i < FL_MAPS; i++)
        asked += atomic_load_explicit(&l->maps[i].state, memory_order_relaxed) == FL_MAP_ASKED;
    for (uint32_t i = 0; i < FL_MAPS; i++) {
        fl_map *e = &l->maps[i];
        uint32_t s =
            atomic_load_explicit(&e->state, memory_order_acquire); /* WANTED, DROP: the engine's fields are visible */
        if (s == FL_MAP_DROP) {
            munmap(e->raw, e->raw_len);
            e->raw = NULL;
            atomic_store_explicit(&e->state, FL_MAP_FREE, memory_order_release); /* gives the entry back */
            fl_raise(l, 0);
        } else if (s == FL_MAP_WANTED && asked < ASK_MAX) {
            fl_wire m = fl_wire_make(FL_MAP);
            m.key = e->key;
            if (fl_wire_send(l->fd, &m, NULL, 0)) continue; /* stays wanted: the next tick tries again */
            asked++;
            atomic_store_explicit(&e->state, FL_MAP_ASKED, memory_order_relaxed); /* only this thread acts on it */
        }
    }
}

/* What the peer deregistered is not kept mapped: its memory would never be freed. The engine lets go of it (no copy runs
 * then), this thread unmaps. */
void fl_stale_maps(fl_link *l) {
    for (uint32_t i = 0; i < FL_MAPS; i++) {
        fl_map *e = &l->maps[i];
        if (atomic_load_explicit(&e->state, memory_order_acquire) ==
                FL_MAP_READY && /* READY becomes nothing but DROP: key stays */
            atomic_load_explicit(&l->ph->mr[(uint32_t)e->key & (FL_MRS - 1)].gen, memory_order_relaxed) !=
                (uint32_t)(e->key >> 32)) {
            fl_raise(l, FL_EV_SWEEP);
            return;
        }
    }
}

void fl_incoming(fl_link *l) {
    for (int k = 0; k < 16 && l->st != FL_ST_CLOSED;
         k++) { /* level-triggered: what is left comes again, others go between */
        fl_wire m;
        int fds[FL_FDS], nfds, r = fl_wire_recv(l->fd, &m, fds, &nfds);
        if (r == -EAGAIN) return;
        if (r == 0 || (r < 0 && r != -EBADMSG && r != -EPROTO)) {
            fl_link_lost(l, -ECONNRESET);
            return;
        }
        bool ok = r > 0;
        if (!ok) {
        } else if (l->in && l->st == FL_ST_HELLO && m.type == FL_HELLO) {
            on_hello(l, &m, fds, nfds);
        } else if (l->in && l->st == FL_ST_UP && m.type == FL_MAP) {
            on_map(l, &m);
        } else if (!l->in && l->st == FL_ST_HELLO && m.type == FL_WELCOME) {
            on_welcome(l, &m, fds, nfds);
        } else if (!l->in && l->st == FL_ST_HELLO && m.type == FL_REFUSE) {
            fl_link_lost(l, m.status < 0 && m.status > -4096 ? m.status : -EPROTO);
        } else {
            ok = !l->in && l->st == FL_ST_UP && m.type == FL_MAPPED && on_mapped(l, &m, fds, nfds);
        }
        fl_close_fds(fds, nfds); /* those that were taken are -1 */
        if (ok) continue;
        atomic_fetch_add_explicit(&l->node->malformed, 1, memory_order_relaxed);
        if (l->st != FL_ST_HELLO) continue; /* nonsense from a peer that is connected: dropped, counted */
        if (r == -EPROTO) {
            fl_wire w = fl_wire_make(FL_REFUSE);
            w.status = -EPROTO;
            fl_wire_send(l->fd, &w, NULL, 0);
        }
        fl_link_lost(l, -EPROTO);
    }
}
