/* The domain of the live network: NAME.NIC#INCARNATION, incarnation in hexadecimal. */
#include "live.h"

#include <inttypes.h>
#include <stdio.h>
#include <sys/eventfd.h>

#define LOCK(nic)        \
    live_nic *nic = ctx; \
    pthread_mutex_lock(&live_world)
#define UNLOCK pthread_mutex_unlock(&live_world)

static int caps(void *ctx, fab_domain_caps *out) {
    const live_nic *nic = ctx;
    *out = (fab_domain_caps){.max_send = 1u << 20,
                             .bandwidth = nic->model->gbps * 125000 * nic->model->payload_permille,
                             .numa_node = UINT32_MAX};
    return 0;
}

static int address(void *ctx, char *buf, size_t cap) {
    const live_nic *nic = ctx;
    int n = snprintf(buf, cap, "%s.%" PRIu32 "#%" PRIx64, nic->name, nic->index, nic->inc);
    return n < 0 || (size_t)n >= cap ? -ENOSPC : n;
}

static int mr_reg(void *ctx, const fab_mr *mr, fab_mr_keys *out) {
    if (mr->device_kind) return -EOPNOTSUPP;
    LOCK(nic);
    uint32_t i = 0;
    while (i < nic->nmrs && nic->mrs[i].live) i++;
    if (i == nic->mrs_cap) {
        uint32_t more = nic->mrs_cap ? 2 * nic->mrs_cap : 16;
        live_mr *grown = i < 1u << 23 ? realloc(nic->mrs, more * sizeof *grown) : NULL;
        if (!grown) {
            UNLOCK;
            return -ENOMEM;
        }
        nic->mrs = grown;
        nic->mrs_cap = more;
    }
    if (i == nic->nmrs) nic->mrs[nic->nmrs++] = (live_mr){.gen = sim_next(&nic->rand) & 0xffff};
    uint64_t gen = nic->mrs[i].gen + 1;
    nic->mrs[i] = (live_mr){mr->addr, mr->len, gen, mr->access, 1};
    *out = (fab_mr_keys){gen << 24 | i, gen << 24 | i, mr->addr};
    UNLOCK;
    return 0;
}

static int mr_dereg(void *ctx, uint64_t local_key) {
    LOCK(nic);
    uint32_t i = (uint32_t)local_key & 0xffffffu;
    if (i < nic->nmrs && nic->mrs[i].gen == local_key >> 24) nic->mrs[i].live = 0; /* none lands: we hold the lock */
    UNLOCK;
    return 0;
}

static live_nic *look_up(const char *name, uint32_t index) {
    for (live_nic *nic = live_all; nic; nic = nic->next)
        if (nic->index == index && strcmp(nic->name, name) == 0) return nic;
    return NULL;
}

/* NAME, NAME.NIC or NAME.NIC#INCARNATION */
static bool parse(const char *addr, size_t len, char *name, uint32_t *index, uint64_t *inc) {
    char text[LIVE_NAME + 32];
    if (len >= sizeof text) return false;
    memcpy(text, addr, len);
    text[len] = 0;
    *index = 0;
    *inc = 0;
    char *end, *hash = strchr(text, '#');
    if (hash) {
        *hash = 0;
        *inc = strtoull(hash + 1, &end, 16);
        if (end == hash + 1 || *end) return false;
    }
    char *dot = strchr(text, '.');
    if (dot) {
        *dot = 0;
        *index = (uint32_t)strtoul(dot + 1, &end, 10);
        if (end == dot + 1 || *end) return false;
    }
    if (!*text || strlen(text) >= LIVE_NAME) return false;
    memcpy(name, text, strlen(text) + 1);
    return true;
}

static int peer_open(void *ctx, const char *addr, size_t len, uint32_t *peer) {
    char name[LIVE_NAME];
    uint32_t index;
    uint64_t inc;
    if (!parse(addr, len, name, &index, &inc)) return -EINVAL;
    LOCK(nic);
    if (nic->nlinks == nic->links_cap) {
        uint32_t more = nic->links_cap ? 2 * nic->links_cap : 16;
        live_link *grown = realloc(nic->links, more * sizeof *grown);
        if (!grown) {
            UNLOCK;
            return -ENOMEM;
        }
        nic->links = grown;
        nic->links_cap = more;
    }
    *peer = nic->nlinks++;
    live_nic *to = look_up(name, index);
    int32_t status = !to ? -ECONNREFUSED : inc && to->inc != inc ? -ESTALE : 0;
    nic->links[*peer] = (live_link){.to = status ? NULL : to, .status = status};
    live_tell(
        nic,
        &(fab_wc){.kind = status ? FAB_WC_PEER_DOWN : FAB_WC_PEER_UP, .peer = *peer, .status = status, .count = 1});
    UNLOCK;
    return 0;
}

static int peer_close(void *ctx, uint32_t peer) {
    LOCK(nic);
    if (peer < nic->nlinks && !nic->links[peer].closed) {
        nic->links[peer].closed = 1;
        nic->links[peer].to = NULL;
        live_link_fail(nic, peer, -ECANCELED);
        for (uint32_t i = nic->ncq; i-- > 0;) {
            const fab_wc *wc = &nic->cq[i];
            if ((wc->kind == FAB_WC_PEER_UP || wc->kind == FAB_WC_PEER_DOWN) && wc->peer == peer)
                nic->cq[i] = nic->cq[--nic->ncq];
        }
    }
    UNLOCK;
    return 0;
}

static int post(void *ctx, uint32_t peer, const fab_wr *wr, uint32_t n) {
    LOCK(nic);
    const live_link *l = peer < nic->nlinks ? &nic->links[peer] : NULL;
    if (!l || !l->to) {
        int32_t status = l && l->status ? l->status : -ECONNRESET;
        UNLOCK;
        return status;
    }
    uint32_t take = 0;
    while (take < n && live_send(nic, peer, &wr[take])) take++;
    UNLOCK;
    return (int)take;
}

static int post_recv(void *ctx, uint64_t id, uint64_t addr, uint64_t len) {
    LOCK(nic);
    int rc = nic->nrecvs < LIVE_RECEIVE_QUEUE ? 0 : -EAGAIN;
    if (!rc) nic->recvs[nic->nrecvs++] = (live_recv){id, addr, len};
    UNLOCK;
    return rc;
}

static int poll(void *ctx, fab_wc *wc, uint32_t cap, uint64_t now_ns) {
    LOCK(nic);
    live_advance(nic, now_ns);
    int n = live_take(nic, wc, cap);
    UNLOCK;
    return n;
}

static int cancel(void *ctx, uint64_t id) {
    LOCK(nic);
    for (uint32_t i = nic->nsending; i-- > 0;)
        if (nic->sending[i].wr.id == id) live_end(nic, i, -ECANCELED);
    UNLOCK;
    return 0;
}

static int wait_fd(void *ctx) { return ((live_nic *)ctx)->fd; }

static int arm(void *ctx, int on) {
    LOCK(nic);
    uint64_t seen;
    ssize_t rc = read(nic->fd, &seen, sizeof seen);
    (void)rc; /* EAGAIN: it was not readable */
    int busy = nic->ncq || nic->nsending; /* what it sends is done in its own polls */
    nic->armed = on && !busy;
    UNLOCK;
    return on && busy;
}

static void close_nic(void *ctx) {
    LOCK(nic);
    for (live_nic **at = &live_all; *at; at = &(*at)->next)
        if (*at == nic) {
            *at = nic->next;
            break;
        }
    for (live_nic *other = live_all; other; other = other->next)
        for (uint32_t i = 0; i < other->nlinks; i++)
            if (other->links[i].to == nic) live_link_lost(other, i, -ECONNRESET);
    UNLOCK;
    close(nic->fd);
    free(nic->sending);
    free(nic->cq);
    free(nic->links);
    free(nic->mrs);
    free(nic);
}

const fab_domain_ops live_ops = {
    .abi_version = FAB_ABI_VERSION,
    .struct_size = sizeof(fab_domain_ops),
    .caps = caps,
    .address = address,
    .mr_reg = mr_reg,
    .mr_dereg = mr_dereg,
    .peer_open = peer_open,
    .peer_close = peer_close,
    .post = post,
    .post_recv = post_recv,
    .poll = poll,
    .cancel = cancel,
    .wait_fd = wait_fd,
    .arm = arm,
    .close = close_nic,
};

const fab_domain_ops *fab_sim_live_ops(void) { return &live_ops; }

int fab_sim_live_open(const char *name, uint32_t index, uint64_t inc, uint64_t seed, uint32_t model, void **out) {
    const fab_sim_nic_model *m = fab_sim_nic_at(model);
    if (!m || !*name || strlen(name) >= LIVE_NAME || strpbrk(name, ".#, ")) return -EINVAL;
    live_nic *nic = calloc(1, sizeof *nic);
    if (!nic) return -ENOMEM;
    memcpy(nic->name, name, strlen(name) + 1);
    nic->index = index;
    nic->inc = inc;
    nic->model = m;
    uint64_t who = index; /* the name tells NICs apart, not the incarnation, which is another one each time */
    for (const char *at = name; *at; at++) who = sim_mix(who ^ (unsigned char)*at);
    nic->rand = sim_rand_of(seed, who);
    nic->fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    int rc = nic->fd < 0 ? -errno : 0;
    pthread_mutex_lock(&live_world);
    if (!rc && look_up(name, index)) rc = -EADDRINUSE;
    if (!rc) {
        nic->next = live_all;
        live_all = nic;
    }
    UNLOCK;
    if (rc) {
        if (nic->fd >= 0) close(nic->fd);
        free(nic);
        return rc;
    }
    *out = nic;
    return 0;
}

void fab_sim_live_close(void *domain) { close_nic(domain); }
