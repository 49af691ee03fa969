/* link.c - peers under numbers of our own: a link that is cut is closed inside, while the engine still has to hear of it. */
#include "fault_int.h"

static bool new_peer(fab_fault *f, uint32_t *out) {
    uint32_t i = 0;
    while (i < f->npeers && f->peers[i].state != FT_P_FREE) i++;
    if (i == f->npeers) {
        uint32_t more = f->npeers ? f->npeers * 2 : 16;
        if (!ft_room(f, f->nslots, more)) return false;
        ft_peer *peers = realloc(f->peers, more * sizeof *peers);
        if (!peers) return false;
        memset(peers + f->npeers, 0, (more - f->npeers) * sizeof *peers);
        f->peers = peers;
        f->npeers = more;
    }
    *out = i;
    return true;
}

static void tell_down(fab_fault *f, uint32_t peer, int32_t status) {
    f->peers[peer].state = FT_P_LOST;
    f->peers[peer].status = status;
    fab_wc wc = {.kind = FAB_WC_PEER_DOWN, .status = status, .peer = peer, .count = 1};
    ft_hold(f, &wc, FT_NONE);
}

static bool is_cut(const fab_fault *f, const char *addr) {
    for (uint32_t i = 0; i < f->ncuts; i++)
        if (strstr(addr, f->cuts[i].peer)) return true;
    return false;
}

int ft_peer_open(void *ctx, const char *addr, size_t len, uint32_t *peer) {
    fab_fault *f = ctx;
    if (f->state != FT_UP) return -ENETDOWN;
    if (len >= FT_ADDR) return -EINVAL;
    uint32_t i;
    if (!new_peer(f, &i)) return -ENOMEM;
    ft_peer *p = &f->peers[i];
    memset(p, 0, sizeof *p);
    memcpy(p->addr, addr, len);
    if (is_cut(f, p->addr)) {
        tell_down(f, i, -EHOSTUNREACH);
    } else {
        int rc = f->inner->peer_open(f->ctx, addr, len, &p->inner);
        if (rc < 0) return rc;
        p->state = FT_P_OPEN;
        p->inner_open = 1;
    }
    *peer = i;
    return 0;
}

static void close_inner(fab_fault *f, ft_peer *p) {
    if (!p->inner_open) return;
    p->inner_open = 0;
    f->inner->peer_close(f->ctx, p->inner);
}

void ft_peer_settle(fab_fault *f, uint32_t peer) {
    ft_peer *p = &f->peers[peer];
    if (p->state == FT_P_CLOSED && !p->open) p->state = FT_P_FREE;
}

int ft_peer_close(void *ctx, uint32_t peer) {
    fab_fault *f = ctx;
    if (peer >= f->npeers || f->peers[peer].state == FT_P_FREE || f->peers[peer].state == FT_P_CLOSED) return -EINVAL;
    ft_peer *p = &f->peers[peer];
    ft_end_dropped(f, peer);
    close_inner(f, p);
    p->state = FT_P_CLOSED;
    for (uint32_t i = 0; i < f->nheld;) { /* nothing about a peer that the engine has closed */
        uint32_t kind = f->held[i].wc.kind;
        if (f->held[i].wc.peer == peer && (kind == FAB_WC_PEER_UP || kind == FAB_WC_PEER_DOWN)) ft_unhold(f, i);
        else i++;
    }
    ft_peer_settle(f, peer);
    return 0;
}

uint32_t ft_peer_of(const fab_fault *f, uint32_t inner) {
    for (uint32_t i = 0; i < f->npeers; i++)
        if (f->peers[i].inner_open && f->peers[i].inner == inner) return i;
    return FAB_PEER_NONE;
}

void ft_peer_event(fab_fault *f, fab_wc *wc) {
    uint32_t peer = ft_peer_of(f, wc->peer);
    if (peer == FAB_PEER_NONE) return; /* of a link that we cut meanwhile */
    if (wc->kind == FAB_WC_PEER_DOWN) {
        close_inner(f, &f->peers[peer]); /* its number is dead: whoever gets it next must not be taken for this one */
        ft_end_dropped(f, peer);
        tell_down(f, peer, wc->status);
        return;
    }
    wc->peer = peer;
    ft_hold(f, wc, FT_NONE);
}

/* ---- cuts ----------------------------------------------------------------------------------------------- */

void ft_cut_peer(fab_fault *f, uint32_t peer, int32_t status) {
    ft_peer *p = &f->peers[peer];
    if (p->state != FT_P_OPEN) return;
    FT_COUNT(f, FT_N_CUTS);
    for (uint32_t i = 0; i < f->nheld;) /* it is down before the engine heard that it is up: only DOWN is told */
        if (f->held[i].wc.peer == peer && f->held[i].wc.kind == FAB_WC_PEER_UP) ft_unhold(f, i);
        else i++;
    tell_down(f, peer, status);
    ft_end_dropped(f, peer);
    close_inner(f, p); /* what it carries ends with -ECANCELED, which told() turns into the reason */
}

void ft_cut_add(fab_fault *f, const char *peer, uint64_t lasts) {
    if (f->ncuts == 2 * FT_CUTS || !lasts) return;
    ft_cut *cut = &f->cuts[f->ncuts++];
    memcpy(cut->peer, peer, strlen(peer) + 1);
    cut->until = f->now + lasts < f->now ? UINT64_MAX : f->now + lasts;
}

void ft_cuts_run(fab_fault *f) {
    for (uint32_t i = 0; i < f->ncuts;)
        if (f->now >= f->cuts[i].until) f->cuts[i] = f->cuts[--f->ncuts];
        else i++;
}
