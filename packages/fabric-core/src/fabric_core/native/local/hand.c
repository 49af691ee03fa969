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
    if (u.uid != geteuid()) {
        fl_refused(l->node, FL_R_UID);
        return -EACCES;
    }
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

/* A message in which this side says who it is, with a fresh nonce. */
static int introduce(const struct fab_local_node *n, fl_wire *m) {
    m->from_inc = n->inc;
    m->flags = n->has_key ? FL_WIRE_AUTH : 0;
    snprintf(m->from_name, sizeof m->from_name, "%s", n->name);
    fl_sign_process(m);
    return fl_random(m->nonce, sizeof m->nonce);
}

static int say_hello(fl_link *l) {
    fl_wire m = fl_wire_make(FL_HELLO);
    int r = introduce(l->node, &m);
    m.to_inc = l->want_inc;
    m.from_nic = l->dom->nic;
    m.to_nic = l->peer_nic;
    fl_script_begin(&l->script, &m, l->peer_name);
    return r ? r : fl_wire_send(l->fd, &m, NULL, 0);
}

static void refuse(const fl_link *l, int status) {
    fl_wire m = fl_wire_make(FL_REFUSE);
    m.status = status;
    fl_wire_send(l->fd, &m, NULL, 0);
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

static void on_hello(fl_link *l, const fl_wire *m) {
    struct fab_local_node *n = l->node;
    fl_wire w = fl_wire_make(FL_CHALLENGE);
    int r = introduce(n, &w);
    if (r) {
    } else if (m->flags != w.flags || (n->has_key && !fl_same_process(m, l->pid))) {
        r = -EACCES;
    } else if (m->to_inc && m->to_inc != n->inc) {
        r = -ESTALE;
    } else if (m->to_nic >= n->nics || atomic_load(&n->dom[m->to_nic].closed)) {
        r = -ECONNREFUSED;
    } else if (n->links_up >= n->max_links) {
        r = -EUSERS;
    }
    if (!r) {
        w.to_inc = m->from_inc;
        w.from_nic = m->to_nic;
        fl_script_begin(&l->script, m, n->name);
        fl_script_answer(&l->script, &w);
        fl_prove(n, &l->script, true, w.mac);
        r = fl_wire_send(l->fd, &w, NULL, 0);
        l->st = FL_ST_PROOF;
    }
    if (!r) return;
    fl_refused_peer(n, r);
    refuse(l, r);
    fl_link_lost(l, r);
}

static void on_proof(fl_link *l, const fl_wire *m, int *fds, int nfds) {
    struct fab_local_node *n = l->node;
    fl_script *s = &l->script;
    fl_shm *hdr = NULL, *chan = NULL;
    fl_dom *d = &n->dom[s->nic[1]];
    int r = fl_verify(n, s, false, m); /* before anything that came along is looked at */
    if (!r && (nfds != 3 || !safe_wake_fd(fds[2]))) r = -EPROTO;
    if (!r && atomic_load(&d->closed)) r = -ECONNREFUSED;
    if (!r && n->links_up >= n->max_links) r = -EUSERS;
    if (!r) r = fl_shm_attach(fds[0], sizeof(fl_node_hdr), false, &hdr);
    if (!r) r = fl_shm_attach(fds[1], sizeof(fl_chan), true, &chan);
    if (!r && ((fl_node_hdr *)hdr->at)->inc != s->inc[0]) r = -EPROTO;
    if (r) {
        fl_refused_peer(n, r);
        refuse(l, r);
        fl_shm_put(hdr);
        fl_shm_put(chan);
        fl_link_lost(l, r);
        return;
    }
    l->peer_efd = fds[2];
    fds[2] = -1;
    l->peer_shm = hdr;
    l->ph = hdr->at;
    l->peer_nic = s->nic[0];
    memcpy(l->peer_name, s->name[0], FL_NAME_MAX);
    l->beat_at = fl_now();
    n->half_open--;
    n->links_up++;
    l->counted = true;
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
    fl_wire w = fl_wire_make(FL_WELCOME);
    w.from_inc = n->inc;
    w.to_inc = s->inc[0];
    w.scratch = (uintptr_t)n->hdr->scratch;
    /* Last: from here on the peer writes, and a deregistration must find the link to wait for it (mr.c). */
    r = fl_wire_send(l->fd, &w, (int[]){n->hdr_fd, d->efd}, 2);
    if (r) fl_link_lost(l, r);
}

static void on_map(fl_link *l, const fl_wire *m) {
    fl_wire w = fl_wire_make(FL_MAPPED);
    w.key = m->key;
    fl_share s;
    w.status = fl_mr_share(l->node, l->dom->nic, m->key, &s);
    w.off = s.off;
    w.len = s.len;
    w.flags = s.cuda ? FL_WIRE_CUDA : 0;
    memcpy(w.ipc, s.ipc.bytes, sizeof w.ipc);
    fl_refused_access(l->node, w.status);
    int r = fl_wire_send(l->fd, &w, &s.fd, s.fd >= 0);
    if (s.fd >= 0) close(s.fd);
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
        struct iovec mine = {&nonce, 8}, theirs = {(void *)(uintptr_t)(scratch + 8 * (uint64_t)at), 8};
        if (process_vm_writev(l->pid, &mine, 1, &theirs, 1, 0) != 8) return false;
        if (atomic_load_explicit(&l->ph->scratch[at], memory_order_relaxed) == nonce) return true;
    }
    return false;
}

/* Our descriptors go out only here, after the other proved itself. */
static int say_proof(fl_link *l) {
    fl_shm *s;
    int chan_fd, r = fl_shm_create("fabric-chan", sizeof(fl_chan), &s, &chan_fd);
    if (r) return r;
    pthread_mutex_lock(&l->node->mu);
    l->chan_shm = s;
    l->ch = s->at;
    pthread_mutex_unlock(&l->node->mu);
    fl_chan_views(l->ch, &l->imm, l->rec);
    fl_wire m = fl_wire_make(FL_PROOF);
    fl_prove(l->node, &l->script, false, m.mac);
    r = fl_wire_send(l->fd, &m, (int[]){l->node->hdr_fd, chan_fd, l->dom->efd}, 3);
    close(chan_fd);
    return r;
}

static void on_challenge(fl_link *l, const fl_wire *m) {
    struct fab_local_node *n = l->node;
    fl_script_answer(&l->script, m);
    int r = fl_verify(n, &l->script, true, m);
    if (!r && n->has_key && !fl_same_process(m, l->pid)) r = -EACCES;
    if (!r && m->to_inc != n->inc) r = -EPROTO;
    if (!r && l->want_inc && m->from_inc != l->want_inc) r = -ESTALE;
    if (!r) {
        l->st = FL_ST_PROOF; /* before there is a channel: from then on others read it (mr.c) */
        r = say_proof(l);
    }
    if (!r) return;
    fl_refused_peer(n, r);
    refuse(l, r);
    fl_link_lost(l, r);
}

static void on_refuse(fl_link *l, const fl_wire *m) {
    int status = m->status < 0 && m->status > -4096 ? m->status : -EPROTO;
    /* Whoever we challenged found our proof wrong: both sides count it. */
    if (l->in) fl_refused_peer(l->node, status);
    fl_link_lost(l, status);
}

static void on_welcome(fl_link *l, const fl_wire *m, int *fds, int nfds) {
    struct fab_local_node *n = l->node;
    int r = nfds != 2 || !safe_wake_fd(fds[1]) || m->from_inc != l->script.inc[1] ? -EPROTO : 0;
    fl_shm *hdr = NULL;
    if (!r) r = fl_shm_attach(fds[0], sizeof(fl_node_hdr), false, &hdr);
    if (!r && ((fl_node_hdr *)hdr->at)->inc != m->from_inc) r = -EPROTO;
    if (r) {
        fl_refused_peer(n, r);
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

static int map_in(fl_map *e, int fd, uint64_t off, uint64_t len, bool forced) {
    struct stat st;
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), lead = off & (page - 1);
    if (fstat(fd, &st)) return -errno;
    /* If it could shrink, our writes would end in SIGBUS. Where mapping is forced, that was asked for (mr.c). */
    int seals = fcntl(fd, F_GET_SEALS);
    if (!forced && (seals < 0 || !(seals & F_SEAL_SHRINK))) return -EPROTO;
    if (!len || off + len < off || (uint64_t)st.st_size < off + len) return -EFAULT;
    size_t raw_len = lead + len;
    char *raw = mmap(NULL, raw_len, PROT_READ | PROT_WRITE, MAP_SHARED, fd, (off_t)(off - lead));
    if (raw == MAP_FAILED) return -errno;
    e->raw = raw;
    e->raw_len = raw_len;
    e->at = raw + lead;
    e->len = len;
    e->populated = 0;
    e->cuda = e->inside = e->pinned = false;
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
        fl_map_pin(l->node->gpu, e);
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
    bool cuda = m->flags & FL_WIRE_CUDA;
    fc_ipc ipc;
    memcpy(ipc.bytes, m->ipc, sizeof ipc.bytes);
    e->err = m->status < 0 && m->status > -4096 ? m->status
             : m->status                        ? -EPROTO
             : nfds != (cuda ? 0 : 1)           ? -EPROTO
             : cuda                             ? fl_gpu_map(l->node->gpu, e, &ipc, m->off, m->len)
                                                : map_in(e, fds[0], m->off, m->len, l->node->path_mode == FL_PATH_MAP);
    if (!e->err && !cuda) {
        l->populating++; /* pass() goes on with it */
    } else {             /* release: the mapping, or err, is visible */
        atomic_store_explicit(&e->state, e->err ? FL_MAP_FAILED : FL_MAP_READY, memory_order_release);
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
            fl_map_undo(l->node->gpu, e);
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

/* What came in, in the order of a handshake; false: it has no place here. */
static bool take(fl_link *l, const fl_wire *m, int *fds, int nfds) {
    if (l->in && l->st == FL_ST_HELLO && m->type == FL_HELLO) on_hello(l, m);
    else if (l->in && l->st == FL_ST_PROOF && m->type == FL_PROOF) on_proof(l, m, fds, nfds);
    else if (l->in && l->st == FL_ST_UP && m->type == FL_MAP) on_map(l, m);
    else if (!l->in && l->st == FL_ST_HELLO && m->type == FL_CHALLENGE) on_challenge(l, m);
    else if (!l->in && l->st == FL_ST_PROOF && m->type == FL_WELCOME) on_welcome(l, m, fds, nfds);
    else if (m->type == FL_REFUSE && (l->st == FL_ST_PROOF || (!l->in && l->st == FL_ST_HELLO))) on_refuse(l, m);
    else return !l->in && l->st == FL_ST_UP && m->type == FL_MAPPED && on_mapped(l, m, fds, nfds);
    return true;
}

void fl_incoming(fl_link *l) {
    for (int k = 0; k < 16 && l->st != FL_ST_CLOSED;
         k++) { /* level-triggered: what is left comes again, others go between */
        fl_wire m;
        /* Only where some are due: a PROOF's are closed unread if it is wrong. */
        bool fds_due = l->in ? l->st == FL_ST_PROOF : l->st == FL_ST_PROOF || l->st == FL_ST_UP;
        int fds[FL_FDS], nfds, r = fl_wire_recv(l->fd, &m, fds_due, fds, &nfds);
        if (r == -EAGAIN) return;
        if (r == 0 || (r < 0 && r != -EBADMSG && r != -EPROTO)) {
            fl_link_lost(l, -ECONNRESET);
            return;
        }
        bool ok = r > 0 && take(l, &m, fds, nfds);
        fl_close_fds(fds, nfds); /* those that were taken are -1 */
        if (ok) continue;
        fl_refused(l->node, r == -EPROTO ? FL_R_VERSION : FL_R_MALFORMED);
        if (l->st == FL_ST_UP) continue; /* nonsense from a peer that is connected: dropped, counted */
        if (r == -EPROTO) refuse(l, -EPROTO);
        fl_link_lost(l, -EPROTO);
    }
}
