/* fault.c - the table of a domain that goes wrong according to a plan, and the switch that a test holds.
 *
 * It keeps every promise of domain.h itself: one end per request, none while memory may be touched, one PEER_UP or
 * PEER_DOWN per peer_open. Its receiving half does not fail: what a peer was told has arrived must be told here too.
 * Memory is bounded; only its tables of requests and peers grow, to a limit. */
#include "fault_int.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>

/* ---- up and down ---------------------------------------------------------------------------------- */

/* Two ways for a NIC to die: what it holds ends first, or only when the engine cuts its links. */
static void begin_to_die(fab_fault *f) {
    if (f->state != FT_UP) return;
    f->state = FT_DYING;
    f->dying_since = f->now;
    f->flush = ft_rand(f) & 1;
    if (!f->flush) return;
    ft_end_dropped(f, FT_NONE);
    for (uint32_t i = 0; i < f->nslots; i++)
        if (f->slots[i].state == FT_INNER) f->inner->cancel(f->ctx, (uint64_t)f->slots[i].gen << 32 | i);
}

#define DIES_WITHIN_NS 100000000ull

static void die(fab_fault *f) {
    if (f->flush && f->inner_open && f->now - f->dying_since < DIES_WITHIN_NS) return;
    f->state = FT_DOWN;
    f->killed_at = f->now;
    atomic_store_explicit(&f->down, 1, memory_order_relaxed);
    FT_COUNT(f, FT_N_KILLS);
    fab_wc wc = {.kind = FAB_WC_NIC_DOWN, .status = -ENETDOWN, .peer = FAB_PEER_NONE, .count = 1};
    ft_hold(f, &wc, FT_NONE);
}

static bool holds(const fab_fault *f, uint32_t kind) {
    for (uint32_t i = 0; i < f->nheld; i++)
        if (f->held[i].wc.kind == kind) return true;
    return false;
}

static void revive(fab_fault *f) {
    if (f->state != FT_DOWN || holds(f, FAB_WC_NIC_DOWN)) return; /* in this order; tried again at the next poll */
    f->state = FT_UP;
    atomic_store_explicit(&f->down, 0, memory_order_relaxed);
    FT_COUNT(f, FT_N_REVIVES);
    fab_wc wc = {.kind = FAB_WC_NIC_UP, .peer = FAB_PEER_NONE, .count = 1};
    ft_hold(f, &wc, FT_NONE);
}

static void take_cuts(fab_fault *f) {
    fab_spin_lock(&f->cut_lock);
    for (uint32_t k = 0; k < f->nasked; k++) {
        for (uint32_t i = 0; i < f->npeers; i++)
            if (strstr(f->peers[i].addr, f->asked[k].peer)) ft_cut_peer(f, i, -ETIMEDOUT);
        ft_cut_add(f, f->asked[k].peer, f->asked[k].lasts);
    }
    f->nasked = 0;
    fab_spin_unlock(&f->cut_lock);
}

static void obey(fab_fault *f) {
    uint32_t cmd = atomic_exchange_explicit(&f->cmd, 0, memory_order_acquire);
    if (cmd & FT_CMD_MEND) f->ncuts = 0;
    if (cmd & FT_CMD_CUT) take_cuts(f);
    if (cmd & FT_CMD_KILL) begin_to_die(f);
    if (cmd & FT_CMD_REVIVE) {
        if (f->state == FT_DOWN && !holds(f, FAB_WC_NIC_DOWN)) revive(f);
        else if (f->state != FT_UP) atomic_fetch_or_explicit(&f->cmd, FT_CMD_REVIVE, memory_order_relaxed);
    }
}

static void follow_plan(fab_fault *f) {
    const fab_fault_plan *p = &f->plan;
    uint64_t taken = atomic_load_explicit(&f->count[FT_N_TAKEN], memory_order_relaxed);
    bool due = (p->kill_ops && taken >= p->kill_ops) || (p->kill_ns && f->now - f->begin >= p->kill_ns);
    if (due && !f->killed_by_plan) {
        f->killed_by_plan = true;
        begin_to_die(f);
    }
    if (f->state == FT_DYING) die(f);
    if (f->state == FT_DOWN && p->revive_ns && f->now - f->killed_at >= p->revive_ns) revive(f);
}

/* ---- poll ------------------------------------------------------------------------------------------ */

static void take_in(fab_fault *f, fab_wc *wc) {
    switch (wc->kind) {
    case FAB_WC_OP: ft_slot_ended(f, wc); break;
    case FAB_WC_PEER_UP:
    case FAB_WC_PEER_DOWN: ft_peer_event(f, wc); break;
    case FAB_WC_RECV:
        wc->peer = ft_peer_of(f, wc->peer);
        ft_hold(f, wc, FT_NONE);
        break;
    case FAB_WC_NIC_DOWN: /* its own bad luck, not ours */
        f->state = FT_DOWN;
        f->killed_at = f->now;
        atomic_store_explicit(&f->down, 1, memory_order_relaxed);
        ft_hold(f, wc, FT_NONE);
        break;
    case FAB_WC_NIC_UP:
        f->state = FT_UP;
        atomic_store_explicit(&f->down, 0, memory_order_relaxed);
        ft_hold(f, wc, FT_NONE);
        break;
    default: ft_hold(f, wc, FT_NONE);
    }
}

/* What is due, in order of age or, if the plan says so, some of it in a random order. What happens to links and the NIC
 * itself is told in its order. */
static uint32_t hand_out(fab_fault *f, fab_wc *wc, uint32_t cap) {
    uint32_t n = 0, want = cap;
    if (f->plan.reorder && f->nheld) want = 1 + (uint32_t)(ft_rand(f) % f->nheld);
    if (f->plan.reorder && f->nheld > 1)
        for (uint32_t i = f->nheld - 1; i > 0; i--) {
            uint32_t k = (uint32_t)(ft_rand(f) % (i + 1));
            if (f->held[i].wc.kind > FAB_WC_RECV || f->held[k].wc.kind > FAB_WC_RECV) continue;
            ft_held swap = f->held[i];
            f->held[i] = f->held[k];
            f->held[k] = swap;
        }
    uint32_t kept = 0;
    for (uint32_t i = 0; i < f->nheld; i++) {
        bool prompt = f->held[i].wc.kind > FAB_WC_RECV;
        if (n < cap && (prompt || (n < want && f->held[i].due <= f->now))) {
            wc[n++] = f->held[i].wc;
            if (f->held[i].slot != FT_NONE) ft_slot_out(f, f->held[i].slot);
            else f->narrived--;
        } else {
            f->held[kept++] = f->held[i];
        }
    }
    f->nheld = kept;
    atomic_store_explicit(&f->nheld_seen, kept, memory_order_relaxed);
    return n;
}

static int op_poll(void *ctx, fab_wc *wc, uint32_t cap, uint64_t now_ns) {
    fab_fault *f = ctx;
    if (!f->begin) f->begin = now_ns;
    f->now = now_ns;
    if (f->now >= f->refuse_until) f->owe = false;
    ft_cuts_run(f);
    obey(f);
    follow_plan(f);
    fab_wc in[256];
    uint32_t room = f->narrived < FT_HELD ? FT_HELD - f->narrived : 0, want = room < 256 ? room : 256;
    int n = want ? f->inner->poll(f->ctx, in, want, now_ns) : 0;
    if (n < 0) return n;
    for (int i = 0; i < n; i++) take_in(f, &in[i]);
    if (f->state == FT_DYING) die(f);
    return (int)hand_out(f, wc, cap);
}

/* ---- the rest of the table --------------------------------------------------------------------------- */

static int op_caps(void *ctx, fab_domain_caps *out) {
    fab_fault *f = ctx;
    return f->inner->caps(f->ctx, out);
}
static int op_address(void *ctx, char *buf, size_t cap) {
    fab_fault *f = ctx;
    return f->inner->address(f->ctx, buf, cap);
}
static int op_mr_reg(void *ctx, const fab_mr *mr, fab_mr_keys *out) {
    fab_fault *f = ctx;
    return f->inner->mr_reg(f->ctx, mr, out);
}
static int op_mr_dereg(void *ctx, uint64_t key) {
    fab_fault *f = ctx;
    return f->inner->mr_dereg(f->ctx, key);
}

static int op_post_recv(void *ctx, uint64_t id, uint64_t addr, uint64_t len) {
    fab_fault *f = ctx;
    if (ft_chance(f, f->plan.rnr_ppm)) {
        f->owe = true;
        FT_COUNT(f, FT_N_RNR);
        return -EAGAIN;
    }
    return f->inner->post_recv(f->ctx, id, addr, len);
}

static int op_wait_fd(void *ctx) { return ((fab_fault *)ctx)->epfd; }

static int op_arm(void *ctx, int on) {
    fab_fault *f = ctx;
    if (on && f->efd >= 0) {
        uint64_t drained;
        ssize_t rc = read(f->efd, &drained, sizeof drained);
        (void)rc;
    }
    /* The order counts: a command is stored before efd is written, and looked for after efd was read. */
    bool awake = f->nheld || f->owe || atomic_load_explicit(&f->cmd, memory_order_seq_cst) || f->state == FT_DYING ||
                 (f->state == FT_DOWN && f->plan.revive_ns) || (f->plan.kill_ns && !f->killed_by_plan);
    if (on && awake) return 1;
    return f->inner->arm(f->ctx, on);
}

static void op_close(void *ctx) {
    fab_fault *f = ctx;
    f->inner->close(f->ctx);
    fab_fault_release(f);
}

static int op_counters(void *ctx, fab_counter *out, uint32_t cap) {
    fab_fault *f = ctx;
    if (f->inner->struct_size < offsetof(fab_domain_ops, post_pages) || !f->inner->counters) return 0;
    return f->inner->counters(f->ctx, out, cap);
}

static const fab_domain_ops table = {
    .abi_version = FAB_ABI_VERSION,
    .struct_size = sizeof(fab_domain_ops),
    .caps = op_caps,
    .address = op_address,
    .mr_reg = op_mr_reg,
    .mr_dereg = op_mr_dereg,
    .peer_open = ft_peer_open,
    .peer_close = ft_peer_close,
    .post = ft_post,
    .post_recv = op_post_recv,
    .poll = op_poll,
    .cancel = ft_cancel,
    .wait_fd = op_wait_fd,
    .arm = op_arm,
    .close = op_close,
    .counters = op_counters,
};

const fab_domain_ops *fab_fault_ops(void) { return &table; }

/* ---- life and control ----------------------------------------------------------------------------------- */

/* One descriptor out of two: the inner domain's, and ours for commands. -1 if the inner domain has to be polled anyway. */
static int join(fab_fault *f) {
    int fd = f->inner->wait_fd(f->ctx);
    if (fd < 0) return 0;
    f->efd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    f->epfd = epoll_create1(EPOLL_CLOEXEC);
    struct epoll_event theirs = {.events = EPOLLIN}, ours = {.events = EPOLLIN};
    if (f->efd < 0 || f->epfd < 0 || epoll_ctl(f->epfd, EPOLL_CTL_ADD, fd, &theirs) ||
        epoll_ctl(f->epfd, EPOLL_CTL_ADD, f->efd, &ours))
        return -errno;
    return 0;
}

fab_fault *fab_fault_wrap(const fab_domain_ops *inner, void *ctx, const fab_fault_plan *plan) {
    fab_fault *f = calloc(1, sizeof *f);
    if (!f) return NULL;
    f->inner = inner;
    f->ctx = ctx;
    f->plan = *plan;
    f->rng = (plan->seed + 1) * 0x9e3779b97f4a7c15ull | 1;
    f->free = FT_NONE;
    f->epfd = f->efd = -1;
    atomic_init(&f->refs, 1);
    if (!ft_room(f, 0, 0) || join(f)) {
        fab_fault_release(f);
        return NULL;
    }
    return f;
}

void fab_fault_hold(fab_fault *f) { atomic_fetch_add_explicit(&f->refs, 1, memory_order_relaxed); }

void fab_fault_release(fab_fault *f) {
    if (atomic_fetch_sub_explicit(&f->refs, 1, memory_order_acq_rel) != 1) return;
    if (f->epfd >= 0) close(f->epfd);
    if (f->efd >= 0) close(f->efd);
    free(f->slots);
    free(f->peers);
    free(f->held);
    free(f);
}

static void command(fab_fault *f, uint32_t bits) {
    atomic_fetch_or_explicit(&f->cmd, bits, memory_order_seq_cst);
    if (f->efd >= 0) {
        ssize_t rc = write(f->efd, &(uint64_t){1}, 8);
        (void)rc;
    }
}

void fab_fault_kill(fab_fault *f) { command(f, FT_CMD_KILL); }
void fab_fault_revive(fab_fault *f) { command(f, FT_CMD_REVIVE); }
void fab_fault_mend(fab_fault *f) { command(f, FT_CMD_MEND); }

int fab_fault_cut(fab_fault *f, const char *peer, uint64_t for_ns) {
    if (strlen(peer) >= FT_ADDR) return -EINVAL;
    fab_spin_lock(&f->cut_lock);
    /* beside these the plan may add as many of its own: there is room */
    int rc = f->nasked + atomic_load_explicit(&f->ncuts, memory_order_relaxed) >= FT_CUTS ? -ENOSPC : 0;
    if (!rc) {
        ft_cut *cut = &f->asked[f->nasked++];
        memcpy(cut->peer, peer, strlen(peer) + 1);
        cut->lasts = for_ns;
    }
    fab_spin_unlock(&f->cut_lock);
    if (!rc) command(f, FT_CMD_CUT);
    return rc;
}

void fab_fault_counts_get(fab_fault *f, fab_fault_counts *out) {
    uint64_t n[11];
    for (int i = 0; i < 11; i++) n[i] = atomic_load_explicit(&f->count[i], memory_order_relaxed);
    *out = (fab_fault_counts){
        .taken = n[FT_N_TAKEN],
        .ended = n[FT_N_ENDED],
        .dropped = n[FT_N_DROPPED],
        .failed = n[FT_N_FAILED],
        .failed_late = n[FT_N_LATE],
        .refused = n[FT_N_REFUSED],
        .partial = n[FT_N_PARTIAL],
        .rnr = n[FT_N_RNR],
        .cuts = n[FT_N_CUTS],
        .kills = n[FT_N_KILLS],
        .revives = n[FT_N_REVIVES],
        .open = atomic_load_explicit(&f->open, memory_order_relaxed),
        .held = atomic_load_explicit(&f->nheld_seen, memory_order_relaxed),
        .down = atomic_load_explicit(&f->down, memory_order_relaxed),
    };
}
