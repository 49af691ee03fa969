/* Opening and closing a domain, its table of functions, and how it sleeps. */
#include "verbs_int.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/timerfd.h>
#include <unistd.h>

#define MOST_CQES 65536u
#define MOST_LINKS 1024u
#define MOST_IMMS 32768u
#define MOST_BYTES (1ull << 30) /* of one write */

/* ---- small ops ------------------------------------------------------------------------------------ */

static int op_caps(void *ctx, fab_domain_caps *out) {
    const fv_dom *d = ctx;
    uint64_t most = d->port.max_msg_sz < MOST_BYTES ? d->port.max_msg_sz : MOST_BYTES;
    *out = (fab_domain_caps){
        .max_write = most, .max_send = FV_MAX_SEND, .bandwidth = d->cfg.bandwidth, .numa_node = d->cfg.numa};
    return 0;
}

static int op_address(void *ctx, char *buf, size_t cap) {
    int n = snprintf(buf, cap, "%s", ((fv_dom *)ctx)->address);
    return n < 0 || (size_t)n >= cap ? -ENOSPC : n;
}

/* Completion events are counted by the library and must be given back, or destroying the queue would wait for them. */
static void take_cq_events(fv_dom *d) {
    struct ibv_cq *cq;
    void *context;
    uint64_t n;
    while (!fv_ibv.get_cq_event(d->channel, &cq, &context)) fv_ibv.ack_cq_events(cq, 1);
    ssize_t rung = read(d->wake_fd, &n, sizeof n), due = read(d->timer_fd, &n, sizeof n);
    (void)(rung + due); /* nothing there: fine */
}

static int op_poll(void *ctx, fab_wc *wc, uint32_t cap, uint64_t now) {
    fv_dom *d = ctx;
    if (d->armed) { /* after a sleep */
        d->armed = false;
        take_cq_events(d);
        d->events_due = 0;
    }
    if (fab_wc_ready(&d->wcq) < cap) fv_progress(d, now, cap);
    if (d->broken && !fab_wc_ready(&d->wcq)) return -ENODEV;
    return (int)fab_wc_take(&d->wcq, wc, cap);
}

static int op_counters(void *ctx, fab_counter *out, uint32_t cap) {
    static const char *const names[FV_R_COUNT] = {"malformed", "auth",    "revoked", "cq_errors",
                                                  "stray",     "mended",  "asked",   "events",
                                                  "full",      "credits", "stalls",  "lost_receives"};
    fv_dom *d = ctx;
    uint32_t n = 0;
    for (; n < FV_R_COUNT && n < cap; n++) {
        memset(out[n].name, 0, sizeof out[n].name);
        snprintf(out[n].name, sizeof out[n].name, "%s", names[n]);
        out[n].value = atomic_load_explicit(&d->counts[n], memory_order_relaxed); /* counts */
    }
    return (int)n;
}

int fab_verbs_describe(void *domain, char *buf, uint32_t cap) {
    const fv_dom *d = domain;
    return snprintf(buf, cap,
                    "device %s\nport %u\ngid_index %u\nmtu %u\nscq %u\nw_srq %u\nmax_links %u\nlinks %u\ngranted %u\n"
                    "depth %u\nchain %u\ninline %u\nmax_write %llu\nposted %u\n",
                    d->cfg.device, d->cfg.port, d->cfg.gid_index, 128u << d->port.active_mtu, d->scq_size, d->wsrq_size,
                    d->max_links, d->nlinks, d->w_granted, d->cfg.depth, d->cfg.chain, d->inline_bytes,
                    (unsigned long long)d->port.max_msg_sz, d->w_posted);
}

/* ---- sleep ------------------------------------------------------------------------------------------ */

void fv_wake(fv_dom *d) {
    uint64_t one = 1;
    if (d->wake_fd < 0) return;
    ssize_t rc = write(d->wake_fd, &one, sizeof one);
    (void)rc; /* full: it is readable already */
}

static int op_wait_fd(void *ctx) { return ((fv_dom *)ctx)->ep_fd; }

static void set_timer(fv_dom *d, uint64_t at) {
    struct itimerspec t = {.it_value = {(time_t)(at / 1000000000u), (long)(at % 1000000000u)}};
    if (!at) t.it_value.tv_nsec = 1;
    if (at == UINT64_MAX) t.it_value = (struct timespec){0, 0}; /* never */
    timerfd_settime(d->timer_fd, TFD_TIMER_ABSTIME, &t, NULL);
}

/* Asks for an event, and then looks whether one was missed. */
static int op_arm(void *ctx, int on) {
    fv_dom *d = ctx;
    if (!on) return 0;
    d->armed = true;
    if (ibv_req_notify_cq(d->rcq, 0) || ibv_req_notify_cq(d->scq, 0) || ibv_req_notify_cq(d->mcq, 0)) return 1;
    d->now = fv_clock();
    uint64_t due = d->contact_due;
    if ((!fv_list_empty(&d->grave) || d->ncut) && d->now + FV_GRAVE_NS < due) due = d->now + FV_GRAVE_NS;
    if (fv_cqs_drain(d, UINT32_MAX) || fab_wc_ready(&d->wcq) || !fv_list_empty(&d->busy) || d->contact_due <= d->now ||
        atomic_load_explicit(&d->dests_done, memory_order_relaxed) || d->broken)
        return 1;
    set_timer(d, due);
    return 0;
}

static int watch(fv_dom *d, int fd) {
    struct epoll_event e = {.events = EPOLLIN, .data.fd = fd};
    return epoll_ctl(d->ep_fd, EPOLL_CTL_ADD, fd, &e) ? -errno : 0;
}

static int nonblocking(int fd) {
    int flags = fcntl(fd, F_GETFL);
    return flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) ? -errno : 0;
}

/* One descriptor for four: completions, asynchronous events, our own bell, and the contact's timer. */
static int sleep_setup(fv_dom *d) {
    d->ep_fd = epoll_create1(EPOLL_CLOEXEC);
    d->timer_fd = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
    if (d->ep_fd < 0 || d->wake_fd < 0 || d->timer_fd < 0) return -errno;
    int rc = nonblocking(d->channel->fd);
    if (!rc) rc = nonblocking(d->ctx->async_fd);
    if (!rc) rc = watch(d, d->channel->fd);
    if (!rc) rc = watch(d, d->ctx->async_fd);
    if (!rc) rc = watch(d, d->wake_fd);
    return rc ? rc : watch(d, d->timer_fd);
}

/* ---- close -------------------------------------------------------------------------------------------- */

static void shut(int fd) {
    if (fd >= 0) close(fd);
}

static void free_all(fv_dom *d) {
    if (d->contact) d->capi->destroy(d->contact);
    fv_links_free(d); /* from here on nobody writes our memory, and we read none */
    fv_dests_stop(d);
    fv_ud_close(d);
    fv_mrs_free(d);
    fv_chan_free(d);
    if (d->channel && d->mcq) take_cq_events(d);
    if (d->wsrq) fv_ibv.destroy_srq(d->wsrq);
    if (d->msrq) fv_ibv.destroy_srq(d->msrq);
    if (d->scq) fv_ibv.destroy_cq(d->scq);
    if (d->rcq) fv_ibv.destroy_cq(d->rcq);
    if (d->mcq) fv_ibv.destroy_cq(d->mcq);
    if (d->channel) fv_ibv.destroy_comp_channel(d->channel);
    if (d->pd) fv_ibv.dealloc_pd(d->pd);
    shut(d->ep_fd);
    shut(d->wake_fd);
    shut(d->timer_fd);
    if (d->ctx) fv_ibv.close_device(d->ctx);
    pthread_mutex_destroy(&d->dest_mu);
    pthread_cond_destroy(&d->dest_cond);
    free((char *)(uintptr_t)d->cfg.device);
    free(d->wcq.wc);
    free(d);
}

/* Says goodbye, and gives the datagrams that say so a moment to leave. */
static void op_close(void *ctx) {
    fv_dom *d = ctx;
    d->closed = true;
    d->now = fv_clock();
    d->capi->farewell(d->contact);
    for (uint64_t until = d->now + 20000000u; d->ud_nfree < FV_UD_TX && d->now < until; d->now = fv_clock())
        fv_cqs_drain(d, UINT32_MAX);
    free_all(d);
}

static const fab_domain_ops ops = {
    .abi_version = FAB_ABI_VERSION,
    .struct_size = sizeof(fab_domain_ops),
    .caps = op_caps,
    .address = op_address,
    .mr_reg = fv_mr_reg,
    .mr_dereg = fv_mr_dereg,
    .peer_open = fv_peer_open,
    .peer_close = fv_peer_close,
    .post = fv_post,
    .post_recv = fv_post_recv,
    .poll = op_poll,
    .cancel = fv_cancel,
    .wait_fd = op_wait_fd,
    .arm = op_arm,
    .close = op_close,
    .counters = op_counters,
};
uintptr_t fab_verbs_ops(void) { return (uintptr_t)&ops; }
void fab_verbs_close(void *domain) { op_close(domain); }

/* ---- open ------------------------------------------------------------------------------------------------ */

static uint32_t least(uint32_t a, uint32_t b) { return a < b ? a : b; }

/* The sizes of the queues, which follow from what the device can do; all bounds rest on these. */
static void sizes(fv_dom *d) {
    uint32_t cqes = least((uint32_t)d->attr.max_cqe, MOST_CQES), srq = (uint32_t)d->attr.max_srq_wr;
    uint32_t links = (cqes - FV_UD_RX - FV_UD_TX - 16 * FV_MSPARE) / FV_LINK_CQES; /* both ways together */
    links = least(links, srq / FV_MRX);
    links = least(links, (uint32_t)d->attr.max_qp / 4);
    links = least(links, cqes / 2 / FV_GUARANTEED); /* outward ones: half of the CQ for writes is shared out */
    d->max_links = least(links, d->cfg.max_links ? d->cfg.max_links : MOST_LINKS);
    d->cfg.depth = least(d->cfg.depth, (uint32_t)d->attr.max_qp_wr);
    while (d->cfg.depth & (d->cfg.depth - 1)) d->cfg.depth &= d->cfg.depth - 1;
    d->scq_size = least(cqes, d->max_links * d->cfg.depth);
    d->wsrq_size = least(least(cqes, srq), least(MOST_IMMS, FV_WSPARE + d->max_links * (FV_WINDOW_MAX + FV_WCREDITS)));
    d->cfg.chain = d->cfg.chain < 1 ? 1 : least(d->cfg.chain, FV_CHAIN);
    d->inline_bytes = d->cfg.inline_bytes;
}

static int open_queues(fv_dom *d, const char **what) {
    *what = "memory";
    d->by_out = calloc(d->max_links, sizeof(fv_link *));
    d->by_in = calloc(d->max_links, sizeof(fv_link *));
    if (!d->by_out || !d->by_in) return -ENOMEM;
    *what = "protection domain";
    d->pd = fv_ibv.alloc_pd(d->ctx);
    if (!d->pd) return -errno;
    *what = "completion channel";
    d->channel = fv_ibv.create_comp_channel(d->ctx);
    if (!d->channel) return -errno;
    *what = "completion queues";
    int mcqes = (int)(FV_UD_RX + FV_UD_TX + 16 * FV_MSPARE + 2 * d->max_links * FV_LINK_CQES);
    mcqes = mcqes < d->attr.max_cqe ? mcqes : d->attr.max_cqe;
    d->scq = fv_ibv.create_cq(d->ctx, (int)d->scq_size, d, d->channel, 0);
    d->rcq = d->scq ? fv_ibv.create_cq(d->ctx, (int)d->wsrq_size, d, d->channel, 0) : NULL;
    d->mcq = d->rcq ? fv_ibv.create_cq(d->ctx, mcqes, d, d->channel, 0) : NULL;
    if (!d->mcq) return -errno;
    *what = "shared receive queues";
    struct ibv_srq_init_attr w = {.attr = {.max_wr = d->wsrq_size, .max_sge = 1}};
    struct ibv_srq_init_attr m = {
        .attr = {.max_wr = least(2 * d->max_links * FV_MRX + 16 * FV_MSPARE, (uint32_t)d->attr.max_srq_wr),
                 .max_sge = 1}};
    d->wsrq = fv_ibv.create_srq(d->pd, &w);
    d->msrq = d->wsrq ? fv_ibv.create_srq(d->pd, &m) : NULL;
    if (!d->msrq) return -errno;
    d->m_spare = FV_MSPARE;
    int rc = fv_wsrq_fill(d);
    if (!rc) rc = fv_mrx_grow(d, d->m_spare);
    fv_srq_watch(d->wsrq, FV_WSPARE); /* a device that cannot tell does without */
    fv_srq_watch(d->msrq, FV_MSPARE);
    return rc;
}

static int open_port(fv_dom *d, const char **what) {
    *what = "device";
    int rc = fv_ibv.query_device(d->ctx, &d->attr);
    if (!rc) rc = (*what = "port", fv_query_port(d->ctx, (uint8_t)d->cfg.port, &d->port));
    if (rc) return -rc;
    d->ethernet = d->port.link_layer == IBV_LINK_LAYER_ETHERNET;
    if (d->port.state != IBV_PORT_ACTIVE) return (*what = "port is not active", -ENETDOWN);
    if (d->port.active_mtu < IBV_MTU_512) return (*what = "MTU below 512 bytes", -EMSGSIZE);
    *what = "GID";
    return fv_gid_open(d);
}

const void *fab_verbs_contact_of(uintptr_t table) { return fab_contact_of(table); }

int fab_verbs_open(const fab_verbs_cfg *cfg, void **domain, char *err, uint32_t cap) {
    const fab_contact_api *capi = cfg->contact;
    if (!fv_ibv.handle || !capi || capi->version != 1 || capi->struct_size < sizeof *capi) {
        snprintf(err, cap, "%s", capi ? "libibverbs is not loaded" : "this fabric-core has no contact for backends");
        return -EINVAL;
    }
    fv_dom *d = calloc(1, sizeof *d);
    if (!d) return -ENOMEM;
    d->cfg = *cfg;
    d->cfg.device = strdup(cfg->device);
    d->capi = capi;
    d->ep_fd = d->timer_fd = -1;
    d->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    d->now = fv_clock();
    pthread_mutex_init(&d->dest_mu, NULL);
    pthread_cond_init(&d->dest_cond, NULL);
    pthread_mutex_init(&d->mrs.mu, NULL);
    fv_node *lists[] = {&d->dest_queue, &d->dest_done, &d->grave, &d->busy, &d->tx_free, &d->held};
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++) fv_list_init(lists[i]);
    for (uint32_t i = 0; i < 256; i++) fv_list_init(&d->dests[i]);
    const char *what = NULL;
    errno = 0;
    d->ctx = fv_open_device(cfg->device, err, cap);
    int rc = d->ctx ? 0 : errno ? -errno : -ENODEV;
    if (!rc) rc = open_port(d, &what);
    if (!rc) {
        sizes(d);
        rc = open_queues(d, &what);
    }
    if (!rc) rc = (what = "datagrams", fv_ud_open(d));
    if (!rc) rc = (what = "wait object", sleep_setup(d));
    if (!rc) rc = (what = "thread", fv_dests_start(d));
    if (!rc) rc = (what = "address", fv_address_text(&d->self, cfg->incarnation, d->address, sizeof d->address));
    if (rc > 0) rc = (what = "first contact", fv_contact_start(d));
    d->cfg.key = NULL; /* the caller's; the contact keeps what it derived */
    if (rc) {
        if (what) snprintf(err, cap, "%s: %s: %s", cfg->device, what, strerror(-rc));
        free_all(d);
        return rc;
    }
    *domain = d;
    return 0;
}
