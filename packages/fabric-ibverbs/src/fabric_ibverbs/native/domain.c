/* A domain's table of functions, how it sleeps, and how it is closed. open.c opens it. */
#include "verbs_int.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/timerfd.h>
#include <unistd.h>

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
        fv_woken(d);
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
                    "depth %u\nchain %u\ninline %u\nmax_write %llu\nposted %u\nmost_links %u\nlink_cqes %u\nmcq %d\n",
                    d->cfg.device, d->cfg.port, d->cfg.gid_index, 128u << d->port.active_mtu, d->scq_size, d->wsrq_size,
                    d->max_links, d->nlinks, d->w_granted, d->cfg.depth, d->cfg.chain, d->inline_bytes,
                    (unsigned long long)d->port.max_msg_sz, d->w_posted, d->most_links, FV_LINK_CQES, d->mcq->cqe);
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
int fv_sleep_setup(fv_dom *d) {
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

/* Also one that was opened in part. */
void fv_domain_free(fv_dom *d) {
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
    fv_domain_free(d);
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
