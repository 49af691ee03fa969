/* Opening and closing a domain, its table of functions, and how it sleeps. */
#include "efa_int.h"

#include <poll.h>
#include <stdio.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

#define CQ_SIZE 32768u /* more than all our own operations, and those that peers may have on the way to us at a time */

uint64_t fe_clock(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

uint64_t fe_random(void) {
    uint64_t v = 0;
    if (getrandom(&v, sizeof v, 0) != (ssize_t)sizeof v) abort(); /* only before the system has any entropy */
    return v;
}

/* The engine's calls: a registration that waits comes first, or polls in a row would never let it in. */
void fe_lock_politely(fe_dom *d) { pthread_mutex_lock(&d->mu); }

void fe_wake(fe_dom *d) {
    uint64_t one = 1;
    if (!d->armed || d->wake_fd < 0) return;
    ssize_t rc = write(d->wake_fd, &one, sizeof one);
    (void)rc; /* full: it is readable already */
}

/* ---- small ops --------------------------------------------------------------------------------------- */

static int op_caps(void *ctx, fab_domain_caps *out) {
    const fe_dom *d = ctx;
    *out = (fab_domain_caps){.max_write = d->max_write, .max_send = FE_MAX_SEND, .numa_node = UINT32_MAX};
    if (d->info->nic && d->info->nic->link_attr) out->bandwidth = d->info->nic->link_attr->speed / 8;
    return 0;
}

static int op_address(void *ctx, char *buf, size_t cap) {
    int n = snprintf(buf, cap, "%s", ((fe_dom *)ctx)->address);
    return n < 0 || (size_t)n >= cap ? -ENOSPC : n;
}

static void hush(fe_dom *d);

static int op_poll(void *ctx, fab_wc *wc, uint32_t cap, uint64_t now) {
    fe_dom *d = ctx;
    if (atomic_load_explicit(&d->want, memory_order_relaxed)) { /* a hint: who waits gets the mutex now */
        struct timespec yield = {0, 0};
        clock_nanosleep(CLOCK_MONOTONIC, 0, &yield, NULL);
    }
    if (pthread_mutex_trylock(&d->mu)) return 0; /* a registration is under way: nothing blocks the worker (C8) */
    if (d->loud) hush(d);
    if (fab_wc_ready(&d->wcq) < cap) fe_progress(d, now);
    uint32_t n = fab_wc_take(&d->wcq, wc, cap);
    pthread_mutex_unlock(&d->mu);
    return (int)n;
}

static int op_counters(void *ctx, fab_counter *out, uint32_t cap) {
    static const char *const names[FE_R_COUNT] = {"malformed", "session",   "auth", "revoked",
                                                  "rights",    "cq_errors", "stray"};
    fe_dom *d = ctx;
    uint32_t n = 0;
    for (; n < FE_R_COUNT && n < cap; n++) {
        memset(out[n].name, 0, sizeof out[n].name);
        snprintf(out[n].name, sizeof out[n].name, "%s", names[n]);
        out[n].value = atomic_load_explicit(&d->refused[n], memory_order_relaxed); /* counts */
    }
    return (int)n;
}

/* ---- sleep ------------------------------------------------------------------------------------------- */

static int op_wait_fd(void *ctx) { return ((fe_dom *)ctx)->ep_fd; }

static void set_timer(fe_dom *d, uint64_t at) {
    struct itimerspec t = {.it_value = {(time_t)(at / 1000000000u), (long)(at % 1000000000u)}};
    if (at != UINT64_MAX && !at) t.it_value.tv_nsec = 1;
    if (at == UINT64_MAX) t.it_value = (struct timespec){0, 0}; /* never */
    timerfd_settime(d->timer_fd, TFD_TIMER_ABSTIME, &t, NULL); /* what had expired is forgotten */
    d->timer_set = at != UINT64_MAX;
}

/* While somebody polls, the provider's descriptor must wake nobody: a thread that sleeps beside the poller would be woken by
 * every packet, and take the core from it. It is taken out and not only masked: what is in a set costs each packet a call
 * through that set, under its lock, which on one host is the sender's time. */
static void listen_to_provider(fe_dom *d, bool on) {
    if (d->cq_fd < 0 || d->listening == on) return;
    struct epoll_event e = {.events = EPOLLIN, .data.fd = d->cq_fd};
    if (epoll_ctl(d->ep_fd, on ? EPOLL_CTL_ADD : EPOLL_CTL_DEL, d->cq_fd, &e) == 0) d->listening = on;
}

/* Some providers' descriptors, once readable, stay so (net 1.17): a sleep on one is a loop. Such a one is looked at by the
 * clock instead, until something came again: soon after something came, then less and less often. */
static void listen_or_not(fe_dom *d) {
    struct pollfd fd = {.fd = d->cq_fd, .events = POLLIN};
    bool vain = d->events == d->seen;
    d->seen = d->events;
    /* What comes after a pause waits for a fifth of that pause, or 4 ms. */
    if (!vain) d->look_ns = FE_DEAF_MIN_NS;
    else if (d->look_ns < FE_DEAF_NS) d->look_ns += d->look_ns / 4;
    if (!vain) d->vain = d->vain > FE_VAIN / 2 ? FE_VAIN / 2 : 0;
    else if (!d->deaf && d->cq_fd >= 0 && poll(&fd, 1, 0) > 0) d->vain++;
    d->deaf = d->blind || d->vain >= FE_VAIN;
    listen_to_provider(d, !d->deaf);
}

/* Nobody sleeps on us: nothing of ours may look readable, now or later. */
static void hush(fe_dom *d) {
    uint64_t n;
    if (d->armed) {
        ssize_t rc = read(d->wake_fd, &n, sizeof n);
        (void)rc; /* nothing there: fine */
    }
    if (d->timer_set) set_timer(d, UINT64_MAX);
    listen_to_provider(d, false);
    d->armed = d->loud = false;
}

/* Whether there is something already. Else we are armed. */
static bool arm_or_ready(fe_dom *d) {
    uint64_t n, due = d->contact_due, now = fe_clock();
    struct fid *fids[1] = {&d->cq->fid};
    ssize_t rc = read(d->wake_fd, &n, sizeof n);
    (void)rc; /* nothing there: fine */
    bool soon = !fe_list_empty(&d->stuck) || !fe_list_empty(&d->busy) || d->retrying; /* the provider may have room */
    if (soon && now + FE_RETRY_NS < due) due = now + FE_RETRY_NS;
    bool match = !fe_list_empty(&d->held) && d->recv_head != d->recv_tail;
    if (fab_wc_ready(&d->wcq) || !fe_list_empty(&d->inbox) || match || d->failing) return true;
    if (!d->blind && fi_trywait(d->fabric, fids, 1) != 0) return true;
    listen_or_not(d);
    if (d->deaf && now + d->look_ns < due) due = now + d->look_ns;
    set_timer(d, due);
    d->armed = true;
    return false;
}

static int op_arm(void *ctx, int on) {
    fe_dom *d = ctx;
    if (pthread_mutex_trylock(&d->mu)) { /* a registration is under way */
        if (!on) d->loud = true; /* the next poll sees to it */
        return on;
    }
    d->armed = d->armed && !on;
    int ready = on && arm_or_ready(d);
    if (!on) hush(d);
    pthread_mutex_unlock(&d->mu);
    return ready;
}

static int watch(fe_dom *d, int fd) {
    struct epoll_event e = {.events = EPOLLIN, .data.fd = fd};
    return epoll_ctl(d->ep_fd, EPOLL_CTL_ADD, fd, &e) ? -errno : 0;
}

/* One descriptor for three: the provider's, ours, and the contact's timer, which must not be late. A provider without one
 * (shm) is looked at by the clock while we sleep, so that an idle engine costs little there too. */
static int sleep_setup(fe_dom *d, bool wait_object) {
    if (!wait_object || fi_control(&d->cq->fid, FI_GETWAIT, &d->cq_fd)) {
        d->cq_fd = -1;
        d->blind = d->deaf = true;
    }
    d->ep_fd = epoll_create1(EPOLL_CLOEXEC);
    d->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    d->timer_fd = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
    if (d->ep_fd < 0 || d->wake_fd < 0 || d->timer_fd < 0) return -errno;
    int rc = d->cq_fd < 0 ? 0 : watch(d, d->cq_fd);
    d->listening = d->cq_fd >= 0 && !rc;
    if (!rc) rc = watch(d, d->wake_fd);
    return rc ? rc : watch(d, d->timer_fd);
}

/* ---- close ----------------------------------------------------------------------------------------------- */

static void shut(int fd) {
    if (fd >= 0) close(fd);
}

static void free_all(fe_dom *d) {
    for (uint32_t i = 0; i < d->npeers; i++)
        if (d->peers[i] && d->peers[i]->ep) {
            fi_close(&d->peers[i]->ep->fid);
            d->peers[i]->ep = NULL;
        }
    if (d->contact) d->capi->destroy(d->contact);
    for (uint32_t i = 0; d->ins && i < d->max_peers; i++) fe_in_free(d, i);
    free(d->ins);
    if (d->ep) fi_close(&d->ep->fid); /* from here on nobody writes our memory, and we read none */
    fe_mr_free_all(d);
    fe_peers_free(d);
    if (d->av) fe_dest_free_all(d);
    if (d->scratch_mr) fi_close(&d->scratch_mr->fid);
    free(d->scratch);
    fe_pool_free(&d->small);
    fe_pool_free(&d->big);
    fe_pool_free(&d->rx);
    shut(d->ep_fd);
    shut(d->wake_fd);
    shut(d->timer_fd);
    if (d->cq) fi_close(&d->cq->fid);
    if (d->av) fi_close(&d->av->fid);
    if (d->domain) fi_close(&d->domain->fid);
    if (d->fabric) fi_close(&d->fabric->fid);
    if (d->info) fe_fi.freeinfo(d->info);
    pthread_mutex_destroy(&d->mu);
    free(d->wcq.wc);
    free(d);
}

/* Says goodbye, and gives the datagrams that say so a moment to leave. */
static void op_close(void *ctx) {
    fe_dom *d = ctx;
    pthread_mutex_lock(&d->mu);
    d->closed = true;
    d->now = fe_clock();
    d->capi->farewell(d->contact);
    uint64_t until = d->now + 20000000u;
    do {
        d->now = fe_clock();
        fe_cq_drain(d);
        fe_chan_flush(d);
    } while (!fe_list_empty(&d->stuck) && d->now < until);
    pthread_mutex_unlock(&d->mu);
    free_all(d);
}

static const fab_domain_ops ops = {
    .abi_version = FAB_ABI_VERSION,
    .struct_size = sizeof(fab_domain_ops),
    .caps = op_caps,
    .address = op_address,
    .mr_reg = fe_mr_reg,
    .mr_dereg = fe_mr_dereg,
    .peer_open = fe_peer_open,
    .peer_close = fe_peer_close,
    .post = fe_post,
    .post_recv = fe_post_recv,
    .poll = op_poll,
    .cancel = fe_cancel,
    .wait_fd = op_wait_fd,
    .arm = op_arm,
    .close = op_close,
    .counters = op_counters,
};
uintptr_t fab_efa_ops(void) { return (uintptr_t)&ops; }
void fab_efa_close(void *domain) { op_close(domain); }

/* ---- open ------------------------------------------------------------------------------------------------- */

static void read_info(fe_dom *d, const fab_efa_cfg *cfg) {
    const struct fi_info *i = d->info;
    uint64_t mode = (uint64_t)i->domain_attr->mr_mode;
    d->local_mr = mode & FI_MR_LOCAL;
    d->virt_addr = mode & FI_MR_VIRT_ADDR;
    d->prov_key = mode & FI_MR_PROV_KEY;
    d->mr_endpoint = mode & FI_MR_ENDPOINT;
    d->hmem = i->caps & FI_HMEM;
    d->rx_cq_data = i->mode & FI_RX_CQ_DATA;
    d->rxm = strstr(i->fabric_attr->prov_name, "ofi_rxm") != NULL;
    bool sockets = fe_hangs(i->fabric_attr->prov_name);
    d->gathers = sockets;
    d->own_ep = sockets && cfg->strict_seed < 0;
    d->connected = d->own_ep && strncmp(i->fabric_attr->prov_name, "shm", 3) != 0;
    d->apart = strncmp(i->fabric_attr->prov_name, "shm", 3) == 0 && !cfg->unguarded;
    d->delivery = sockets ? FI_DELIVERY_COMPLETE : 0; /* a NIC's acknowledgement says as much */
    d->mr_unlocked = i->domain_attr->threading == FI_THREAD_SAFE && !sockets;
    d->max_write = i->ep_attr->max_msg_size >= 1ull << 62 ? 0 : i->ep_attr->max_msg_size;
    if (sockets && (!d->max_write || d->max_write > FE_PIECE)) d->max_write = FE_PIECE;
    uint64_t tx = i->tx_attr->size ? i->tx_attr->size : 256, rx = i->rx_attr->size ? i->rx_attr->size : 256;
    d->tx_limit = (uint32_t)(tx > 4096 ? 4096 : tx);
    if (!d->own_ep && d->tx_limit > 4 * FE_CHAN) d->tx_limit -= FE_CHAN; /* room for datagrams */
    d->rx_limit = (uint32_t)(rx < FE_RX ? rx : FE_RX);
    if (cfg->strict_seed >= 0) {
        d->rng = (uint64_t)cfg->strict_seed * 0x9e3779b97f4a7c15u + 0x2545f4914f6cdd1du;
        d->local_mr = true; /* a desc with everything, as efa-direct wants it */
        d->max_write = 1000003;
    }
}

static int open_all(fe_dom *d, const fab_efa_cfg *cfg, char *err, uint32_t cap) {
    const char *what = "fi_getinfo";
    int rc = fe_info_get(cfg->provider, cfg->domain, cfg->source, &d->info);
    if (!rc) {
        read_info(d, cfg);
        rc = d->info->domain_attr->cq_data_size < 4 ? (what = "remote CQ data of 4 bytes", -FI_ENOSYS) : 0;
    }
    if (!rc) rc = (what = "fi_fabric", fe_fi.fabric(d->info->fabric_attr, &d->fabric, NULL));
    if (!rc) rc = (what = "fi_domain", fi_domain(d->fabric, d->info, &d->domain, NULL));
    struct fi_cq_attr ca = {.format = FI_CQ_FORMAT_DATA, .size = CQ_SIZE, .wait_obj = FI_WAIT_FD};
    if (!rc && fi_cq_open(d->domain, &ca, &d->cq, NULL)) { /* no wait object: to be polled */
        ca.wait_obj = FI_WAIT_NONE;
        rc = (what = "fi_cq_open", fi_cq_open(d->domain, &ca, &d->cq, NULL));
    }
    struct fi_av_attr aa = {.type = FI_AV_TABLE};
    if (!rc) rc = (what = "fi_av_open", fi_av_open(d->domain, &aa, &d->av, NULL));
    if (!rc) rc = (what = "fi_endpoint", fe_ep_open(d, &d->ep));
    size_t len = sizeof d->name;
    if (!rc) rc = (what = "fi_getname", fi_getname(&d->ep->fid, d->name, &len));
    d->name_len = (uint32_t)len;
    if (!rc) rc = (what = "wait object", sleep_setup(d, ca.wait_obj == FI_WAIT_FD));
    d->scratch = aligned_alloc(4096, 4096);
    if (!rc && !d->scratch) rc = -ENOMEM;
    if (!rc) rc = (what = "fi_mr_reg", fe_mr_raw(d, d->scratch, 4096, FI_WRITE | FI_SEND | FI_RECV, &d->scratch_mr));
    if (!rc) {
        d->scratch_desc = fi_mr_desc(d->scratch_mr);
        if (d->local_mr && !d->scratch_desc) d->local_mr = false; /* strict, on a provider that has no descs */
        rc =
            (what = "address", fe_address_text(d, d->name, d->name_len, d->incarnation, d->address, sizeof d->address));
        rc = rc > 0 ? 0 : rc;
    }
    if (!rc) rc = (what = "first contact", fe_contact_start(d, cfg));
    if (rc) fe_fail(err, cap, what, rc);
    return rc;
}

const void *fab_efa_contact_of(uintptr_t table) { return fab_contact_of(table); }

int fab_efa_open(const fab_efa_cfg *cfg, void **domain, char *err, uint32_t cap) {
    const fab_contact_api *capi = cfg->contact;
    if (!fe_fi.version || !capi || capi->version != 1 || capi->struct_size < sizeof *capi) {
        snprintf(err, cap, "%s", capi ? "libfabric is not loaded" : "this fabric-core has no contact for backends");
        return -EINVAL;
    }
    fe_dom *d = calloc(1, sizeof *d);
    if (!d) return -ENOMEM;
    pthread_mutex_init(&d->mu, NULL);
    d->capi = capi;
    d->incarnation = cfg->incarnation;
    d->connect_ns = cfg->connect_ns;
    d->heartbeat_ns = cfg->heartbeat_ns;
    d->max_peers = cfg->max_peers ? cfg->max_peers : 1024;
    d->nic = cfg->nic;
    d->look_ns = FE_DEAF_NS;
    d->cq_fd = d->ep_fd = d->wake_fd = d->timer_fd = -1;
    d->now = fe_clock();
    fe_pool_init(&d->small, FE_SMALL, FE_CTX_TX);
    fe_pool_init(&d->big, FE_BIG, FE_CTX_TX);
    fe_pool_init(&d->rx, FE_BIG, FE_CTX_RX);
    fe_node *lists[] = {&d->inbox, &d->stuck, &d->busy, &d->held};
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++) fe_list_init(lists[i]);
    for (uint32_t i = 0; i < 256; i++) fe_list_init(&d->dests[i]);
    d->by_out = calloc(d->max_peers, sizeof(fe_peer *));
    d->ins = calloc(d->max_peers, sizeof(fe_in *));
    int rc = d->by_out && d->ins ? open_all(d, cfg, err, cap) : -ENOMEM;
    if (rc) {
        free_all(d);
        return rc;
    }
    fe_rx_fill(d);
    *domain = d;
    return 0;
}

int fab_efa_describe(void *domain, char *buf, uint32_t cap) {
    const fe_dom *d = domain;
    const struct fi_info *i = d->info;
    char mode[256];
    snprintf(mode, sizeof mode, "%s", fe_fi.tostr(&i->domain_attr->mr_mode, FI_TYPE_MR_MODE));
    return snprintf(buf, cap,
                    "provider %s\ndomain %s\nmr_mode %s\ncq_data_size %zu\ninject_size %zu\ntx_size %zu\nrx_size %zu\n"
                    "max_msg_size %zu\niov_limit %zu\nrma_iov_limit %zu\nmode 0x%llx\nwait_fd %d\nown_ep %d\nhmem %d\n"
                    "threading %d\ndata_progress %d\n",
                    i->fabric_attr->prov_name, i->domain_attr->name, mode, i->domain_attr->cq_data_size,
                    i->tx_attr->inject_size, i->tx_attr->size, i->rx_attr->size, i->ep_attr->max_msg_size,
                    i->tx_attr->iov_limit, i->tx_attr->rma_iov_limit, (unsigned long long)i->mode, d->ep_fd >= 0,
                    d->own_ep, d->hmem, i->domain_attr->threading, i->domain_attr->data_progress);
}
