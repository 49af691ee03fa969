/* Opening a domain: what a device must have, how large the queues are, and everything made in its order. */
#include "verbs_int.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/eventfd.h>

#define MOST_CQES 65536u
#define MOST_LINKS 1024u
#define MOST_IMMS 32768u
#define OTHER_CQES (FV_UD_RX + FV_UD_TX + 16 * FV_MSPARE) /* of the CQ for control, beside what links need */
#define LEAST_CQES (2 * OTHER_CQES) /* what a device must have: 19 peers' worth */
#define LEAST_SRQ 512u
#define LEAST_DEPTH 16u

static uint32_t least(uint32_t a, uint32_t b) { return a < b ? a : b; }

/* The sizes of the queues, which follow from what the device can do (enough: open_port); all bounds rest on these. */
static void sizes(fv_dom *d) {
    uint32_t cqes = least((uint32_t)d->attr.max_cqe, MOST_CQES), srq = (uint32_t)d->attr.max_srq_wr;
    uint32_t most = (cqes - OTHER_CQES) / FV_LINK_CQES; /* links both ways together: each has two queue pairs */
    most = least(most, (srq - 16 * FV_MSPARE) / FV_MRX);
    most = least(most, ((uint32_t)d->attr.max_qp - 1) / 2);
    uint32_t each = least(most, cqes / 2 / FV_GUARANTEED); /* outward ones: half of the CQ for writes is shared out */
    d->max_links = least(each, d->cfg.max_links ? d->cfg.max_links : MOST_LINKS);
    d->most_links = least(most, 2 * d->max_links);
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
    /* at once: a domain that cannot be opened further looks for events before it is freed, and must not wait for any */
    if (fcntl(d->channel->fd, F_SETFL, O_NONBLOCK)) return -errno;
    *what = "completion queues";
    int mcqes = (int)(OTHER_CQES + d->most_links * FV_LINK_CQES);
    d->scq = fv_ibv.create_cq(d->ctx, (int)d->scq_size, d, d->channel, 0);
    d->rcq = d->scq ? fv_ibv.create_cq(d->ctx, (int)d->wsrq_size, d, d->channel, 0) : NULL;
    d->mcq = d->rcq ? fv_ibv.create_cq(d->ctx, mcqes, d, d->channel, 0) : NULL;
    if (!d->mcq) return -errno;
    *what = "shared receive queues";
    struct ibv_srq_init_attr w = {.attr = {.max_wr = d->wsrq_size, .max_sge = 1}};
    struct ibv_srq_init_attr m = {.attr = {.max_wr = d->most_links * FV_MRX + 16 * FV_MSPARE, .max_sge = 1}};
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

/* Some drivers have reliable connections and nothing beside them. */
static int enough(const fv_dom *d, char *err, uint32_t cap) {
    const struct ibv_device_attr *a = &d->attr;
    const struct {
        const char *name;
        int has;
        uint32_t least;
    } needs[] = {{"max_srq", a->max_srq, 2}, {"max_srq_wr", a->max_srq_wr, LEAST_SRQ},
                 {"max_cq", a->max_cq, 3},   {"max_cqe", a->max_cqe, LEAST_CQES},
                 {"max_qp", a->max_qp, 5},   {"max_qp_wr", a->max_qp_wr, LEAST_DEPTH}};
    for (size_t i = 0; i < sizeof needs / sizeof *needs; i++)
        if (needs[i].has < (int)needs[i].least) {
            snprintf(err, cap,
                     "%s: its driver says %s = %d, and this backend needs %u (shared receive queues, datagrams): name "
                     "another NIC in FABRIC_VERBS_NICS, or take another backend",
                     d->cfg.device, needs[i].name, needs[i].has, needs[i].least);
            return -EOPNOTSUPP;
        }
    return 0;
}

/* Where what failed needs more words than the errno has, they are in `err`, and *what is NULL. */
static int open_port(fv_dom *d, const char **what, char *err, uint32_t cap) {
    *what = "device";
    int rc = fv_ibv.query_device(d->ctx, &d->attr);
    if (!rc) rc = (*what = "port", fv_query_port(d->ctx, (uint8_t)d->cfg.port, &d->port));
    if (rc) return rc < 0 ? -EIO : -rc;
    rc = enough(d, err, cap);
    if (rc) return (*what = NULL, rc);
    d->ethernet = d->port.link_layer == IBV_LINK_LAYER_ETHERNET;
    if (d->port.state != IBV_PORT_ACTIVE) return (*what = "port is not active", -ENETDOWN);
    if (d->port.active_mtu < IBV_MTU_512) return (*what = "MTU below 512 bytes", -EMSGSIZE);
    rc = fv_gid_open(d);
    if (!rc) return 0;
    *what = NULL;
    snprintf(err, cap, "%s: index %u of the GID table of port %u is empty: see `fabric devices`; FABRIC_VERBS_GID",
             d->cfg.device, d->cfg.gid_index, d->cfg.port);
    return rc;
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
    fv_node *lists[] = {&d->dest_queue, &d->dest_again, &d->dest_done, &d->grave, &d->busy, &d->tx_free, &d->held};
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++) fv_list_init(lists[i]);
    for (uint32_t i = 0; i < 256; i++) fv_list_init(&d->dests[i]);
    const char *what = NULL;
    errno = 0;
    d->ctx = fv_open_device(cfg->device, err, cap);
    int rc = d->ctx ? 0 : errno ? -errno : -ENODEV;
    if (!rc) rc = open_port(d, &what, err, cap);
    if (!rc) {
        sizes(d);
        rc = open_queues(d, &what);
    }
    if (!rc) rc = (what = "datagrams", fv_ud_open(d));
    if (!rc) rc = (what = "wait object", fv_sleep_setup(d));
    if (!rc) rc = (what = "thread", fv_dests_start(d));
    if (!rc) rc = (what = "address", fv_address_text(&d->self, cfg->incarnation, d->address, sizeof d->address));
    if (rc > 0) rc = (what = "first contact", fv_contact_start(d));
    d->cfg.key = NULL; /* the caller's; the contact keeps what it derived */
    if (rc) {
        const char *cure = rc == -ENOMEM ? "; mostly of what may be locked: `ulimit -l`" : "";
        if (what) snprintf(err, cap, "%s: %s: %s%s", cfg->device, what, strerror(-rc), cure);
        fv_domain_free(d);
        return rc;
    }
    *domain = d;
    return 0;
}
