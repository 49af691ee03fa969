/* request.c - requests on their way through: handed on or not, ended or held back; each ends exactly once (C1), and never
 * while the inner domain may still touch its memory (C7). */
#include "fault_int.h"

/* ---- slots ---------------------------------------------------------------------------------------- */

static bool grow(fab_fault *f) {
    uint32_t more = f->nslots ? f->nslots * 2 : 256;
    if (more > FT_SLOTS) return false;
    if (!ft_room(f, more, f->npeers)) return false;
    ft_slot *slots = realloc(f->slots, more * sizeof *slots);
    if (!slots) return false;
    memset(slots + f->nslots, 0, (more - f->nslots) * sizeof *slots);
    for (uint32_t i = f->nslots; i < more; i++) slots[i].next_free = i + 1 < more ? i + 1 : FT_NONE;
    f->free = f->nslots; /* only called when the list is empty */
    f->slots = slots;
    f->nslots = more;
    return true;
}

static uint32_t take_slot(fab_fault *f, const fab_wr *wr, uint32_t peer) {
    if (f->free == FT_NONE && !grow(f)) return FT_NONE;
    uint32_t i = f->free;
    ft_slot *s = &f->slots[i];
    f->free = s->next_free;
    *s = (ft_slot){.id = wr->id, .peer = peer, .gen = s->gen + 1, .state = FT_INNER};
    f->inner_open++;
    return i;
}

static void give_slot(fab_fault *f, uint32_t i) {
    f->slots[i].state = FT_FREE;
    f->slots[i].next_free = f->free;
    f->free = i;
}

/* The request counts: from here on it ends exactly once. */
static void accepted(fab_fault *f, uint32_t slot) {
    f->peers[f->slots[slot].peer].open++;
    FT_COUNT(f, FT_N_TAKEN);
    atomic_fetch_add_explicit(&f->open, 1, memory_order_relaxed);
}

void ft_hold(fab_fault *f, const fab_wc *wc, uint32_t slot) {
    uint64_t later = f->plan.delay_ns && wc->kind <= FAB_WC_RECV ? ft_rand(f) % (f->plan.delay_ns + 1) : 0;
    f->held[f->nheld++] = (ft_held){.wc = *wc, .due = f->now + later, .slot = slot};
    f->narrived += slot == FT_NONE;
    atomic_store_explicit(&f->nheld_seen, f->nheld, memory_order_relaxed);
}

void ft_unhold(fab_fault *f, uint32_t at) {
    f->narrived -= f->held[at].slot == FT_NONE;
    memmove(&f->held[at], &f->held[at + 1], (--f->nheld - at) * sizeof *f->held);
    atomic_store_explicit(&f->nheld_seen, f->nheld, memory_order_relaxed);
}

bool ft_room(fab_fault *f, uint32_t slots, uint32_t peers) {
    ft_held *held = realloc(f->held, ((size_t)FT_HELD + slots + 2 * (size_t)peers + 8) * sizeof *held);
    if (held) f->held = held;
    return held != NULL;
}

static void end(fab_fault *f, uint32_t i, int32_t status) {
    ft_slot *s = &f->slots[i];
    if (s->state == FT_INNER) f->inner_open--;
    s->state = FT_ENDING;
    fab_wc wc = {.kind = FAB_WC_OP, .id = s->id, .status = status, .peer = s->peer, .count = 1};
    ft_hold(f, &wc, i);
}

void ft_slot_out(fab_fault *f, uint32_t i) {
    uint32_t peer = f->slots[i].peer;
    give_slot(f, i);
    f->peers[peer].open--;
    FT_COUNT(f, FT_N_ENDED);
    atomic_fetch_sub_explicit(&f->open, 1, memory_order_relaxed);
    ft_peer_settle(f, peer);
}

/* ---- ends ------------------------------------------------------------------------------------------- */

/* What the engine is told of an end: a NIC or link that went down tells so, not that we cancelled. */
static int32_t told(fab_fault *f, const ft_slot *s, int32_t status) {
    const ft_peer *p = &f->peers[s->peer];
    if (s->cancelled) return status;
    if (f->state != FT_UP) return status || ft_rand(f) & 1 ? -ENETDOWN : 0; /* a dead NIC may lose what it knew */
    if (p->state == FT_P_LOST && status == -ECANCELED) return p->status;
    return status;
}

void ft_slot_ended(fab_fault *f, const fab_wc *wc) {
    uint32_t i = (uint32_t)wc->id;
    /* Ours are all different, so a domain that merges completions has nothing to merge; a wrong number is its bug, shown
     * to the engine as it is, which counts it. */
    if (i >= f->nslots || f->slots[i].state != FT_INNER || f->slots[i].gen != wc->id >> 32 || wc->count != 1) {
        ft_hold(f, wc, FT_NONE);
        return;
    }
    ft_slot *s = &f->slots[i];
    if (s->drop && !s->cancelled && f->state == FT_UP && f->peers[s->peer].state == FT_P_OPEN) {
        s->state = FT_DROPPED;
        f->inner_open--;
        FT_COUNT(f, FT_N_DROPPED);
        return;
    }
    int32_t status = told(f, s, s->drop ? -ECANCELED : wc->status);
    if (s->late && !status) {
        status = f->plan.fail_status;
        FT_COUNT(f, FT_N_LATE);
    }
    end(f, i, status);
}

void ft_end_dropped(fab_fault *f, uint32_t peer) {
    for (uint32_t i = 0; i < f->nslots; i++)
        if (f->slots[i].state == FT_DROPPED && (peer == FT_NONE || f->slots[i].peer == peer))
            end(f, i, told(f, &f->slots[i], -ECANCELED));
}

int ft_cancel(void *ctx, uint64_t id) {
    fab_fault *f = ctx;
    for (uint32_t i = 0; i < f->nslots; i++) {
        ft_slot *s = &f->slots[i];
        if (s->id != id || s->state == FT_FREE || s->state == FT_ENDING) continue;
        s->cancelled = 1;
        if (s->state == FT_DROPPED) end(f, i, -ECANCELED);
        else f->inner->cancel(f->ctx, (uint64_t)s->gen << 32 | i);
    }
    return 0;
}

/* ---- post --------------------------------------------------------------------------------------------- */

#define RUN 64u

/* Hands n requests on; returns how many were taken, or why the first was refused. */
static int hand_on(fab_fault *f, uint32_t peer, const fab_wr *wr, uint32_t n) {
    fab_wr run[RUN];
    uint32_t slot[RUN], made = 0;
    for (; made < n && made < RUN; made++) {
        slot[made] = take_slot(f, &wr[made], peer);
        if (slot[made] == FT_NONE) break;
        ft_slot *s = &f->slots[slot[made]];
        s->drop = ft_chance(f, f->plan.drop_ppm);
        s->late = !s->drop && ft_chance(f, f->plan.fail_late_ppm);
        run[made] = wr[made];
        run[made].id = (uint64_t)s->gen << 32 | slot[made];
    }
    int taken = made ? f->inner->post(f->ctx, f->peers[peer].inner, run, made) : 0;
    for (uint32_t i = made; i-- > 0;) {
        if ((int)i < taken) continue;
        f->inner_open--;
        give_slot(f, slot[i]);
    }
    for (uint32_t i = 0; i < made && (int)i < taken; i++) accepted(f, slot[i]);
    return taken;
}

static int full(fab_fault *f) {
    f->owe = true;
    FT_COUNT(f, FT_N_REFUSED);
    return 0;
}

int ft_post(void *ctx, uint32_t peer, const fab_wr *wr, uint32_t n) {
    fab_fault *f = ctx;
    if (f->state == FT_DOWN) return -ENETDOWN;
    if (peer >= f->npeers || (f->peers[peer].state != FT_P_OPEN && f->peers[peer].state != FT_P_LOST)) return -EINVAL;
    if (f->peers[peer].state == FT_P_LOST) return f->peers[peer].status;
    const uint64_t limit = f->killed_by_plan ? 0 : f->plan.kill_ops;
    const uint64_t taken_so_far = atomic_load_explicit(&f->count[FT_N_TAKEN], memory_order_relaxed);
    if (f->state == FT_DYING || f->now < f->refuse_until || (limit && taken_so_far >= limit)) return full(f);
    if (ft_chance(f, f->plan.refuse_ppm)) {
        f->refuse_until = f->now + f->plan.refuse_ns;
        return full(f);
    }
    if (ft_chance(f, f->plan.cut_ppm) && f->ncuts < FT_CUTS) {
        ft_cut_add(f, f->peers[peer].addr, f->plan.cut_ns);
        ft_cut_peer(f, peer, -ETIMEDOUT);
        return full(f);
    }
    if (limit && n > limit - taken_so_far) n = (uint32_t)(limit - taken_so_far);
    if (n > 1 && ft_chance(f, f->plan.partial_ppm)) {
        n = 1 + (uint32_t)(ft_rand(f) % (n - 1));
        f->owe = true;
        FT_COUNT(f, FT_N_PARTIAL);
    }
    uint32_t done = 0;
    while (done < n) {
        uint32_t run = 0; /* up to the next request that is not to be carried out */
        bool fails = false;
        while (done + run < n && run < RUN && !(fails = ft_chance(f, f->plan.fail_ppm))) run++;
        if (run) {
            int taken = hand_on(f, peer, wr + done, run);
            if (taken < 0) return done ? (int)done : taken; /* tried again, it is the first */
            done += (uint32_t)taken;
            if ((uint32_t)taken < run) break;
        }
        if (!fails) continue;
        uint32_t slot = take_slot(f, &wr[done], peer);
        if (slot == FT_NONE) break;
        accepted(f, slot);
        end(f, slot, f->plan.fail_status);
        FT_COUNT(f, FT_N_FAILED);
        done++;
    }
    if (done < n) f->owe = true;
    return (int)done;
}
