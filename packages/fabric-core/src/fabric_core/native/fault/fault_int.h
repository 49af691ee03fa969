/* fault_int.h - what the files of the fault decorator share. Include it first. */
#ifndef FAB_FAULT_INT_H
#define FAB_FAULT_INT_H

#include "../common.h"

#include <fabric/domain.h>

#include "cdef_fault.h"

#define FT_SLOTS 65536u /* requests open at most: more are "full" */
#define FT_HELD 4096u   /* arrivals held back at most: then the inner domain is not polled, and holds its own back */
#define FT_CUTS 16u
#define FT_ADDR 256u

/* A request that was taken, until its completion was handed out. The inner domain knows it by its number here, so that
 * completions tell requests of one operation apart. */
enum { FT_FREE = 0, FT_INNER, FT_DROPPED, FT_ENDING };
typedef struct ft_slot {
    uint64_t id; /* the engine's */
    uint32_t peer, gen, next_free;
    uint8_t state, drop, late, cancelled;
} ft_slot;

/* A peer as the engine knows it. It outlives the inner one when a link is cut, and lasts until its last request ended. */
enum { FT_P_FREE = 0, FT_P_OPEN, FT_P_LOST, FT_P_CLOSED };
typedef struct ft_peer {
    uint32_t inner, open; /* the inner number; requests not yet ended */
    uint8_t state, inner_open;
    int32_t status; /* why it is lost */
    char addr[FT_ADDR];
} ft_peer;

typedef struct ft_held {
    fab_wc wc;
    uint64_t due;
    uint32_t slot; /* or FT_NONE */
} ft_held;
#define FT_NONE UINT32_MAX

typedef struct ft_cut {
    char peer[FT_ADDR];
    uint64_t until, lasts; /* until 0: begins at the next poll */
} ft_cut;

enum { FT_CMD_KILL = 1u, FT_CMD_REVIVE = 2u, FT_CMD_CUT = 4u, FT_CMD_MEND = 8u };
enum { FT_UP = 0, FT_DYING, FT_DOWN };

struct fab_fault {
    const fab_domain_ops *inner;
    void *ctx;
    fab_fault_plan plan;
    _Atomic uint32_t refs, cmd;
    _Atomic uint32_t cut_lock; /* guards `asked` and `nasked` */
    ft_cut asked[FT_CUTS];
    uint32_t nasked;
    int epfd, efd; /* the inner descriptor and ours in one, if the inner domain has one */
    /* the rest: under the group's lock */
    uint64_t rng, now, begin, refuse_until, killed_at, dying_since;
    bool owe; /* something was refused: the engine must look again, so nobody may sleep */
    bool flush; /* while dying: what the inner domain holds ends first */
    bool killed_by_plan;
    uint32_t state;
    ft_slot *slots;
    uint32_t nslots, free;
    ft_peer *peers;
    uint32_t npeers;
    ft_held *held; /* room for FT_HELD arrivals, an end of each slot, two events of each peer, some of the NIC */
    uint32_t nheld, narrived; /* narrived: of them, what is no end of a request */
    ft_cut cuts[2 * FT_CUTS]; /* asked for, and the plan's own */
    _Atomic uint32_t ncuts;
    uint32_t inner_open; /* slots in FT_INNER */
    _Atomic uint64_t count[11];
    _Atomic uint32_t open, nheld_seen, down;
};
enum {
    FT_N_TAKEN,
    FT_N_ENDED,
    FT_N_DROPPED,
    FT_N_FAILED,
    FT_N_LATE,
    FT_N_REFUSED,
    FT_N_PARTIAL,
    FT_N_RNR,
    FT_N_CUTS,
    FT_N_KILLS,
    FT_N_REVIVES
};
#define FT_COUNT(f, what) atomic_fetch_add_explicit(&(f)->count[what], 1, memory_order_relaxed)

static inline uint64_t ft_rand(fab_fault *f) { /* xorshift64* */
    f->rng ^= f->rng >> 12;
    f->rng ^= f->rng << 25;
    f->rng ^= f->rng >> 27;
    return f->rng * 0x2545f4914f6cdd1dull >> 16;
}
static inline bool ft_chance(fab_fault *f, uint32_t ppm) { return ppm && ft_rand(f) % 1000000u < ppm; }

/* request.c */
int ft_post(void *ctx, uint32_t peer, const fab_wr *wr, uint32_t n);
int ft_cancel(void *ctx, uint64_t id);
void ft_slot_ended(fab_fault *f, const fab_wc *wc); /* the inner domain says so */
void ft_slot_out(fab_fault *f, uint32_t i); /* its completion was handed out */
void ft_end_dropped(fab_fault *f, uint32_t peer); /* of one peer, or of all: FT_NONE */
void ft_hold(fab_fault *f, const fab_wc *wc, uint32_t slot);
void ft_unhold(fab_fault *f, uint32_t at);
bool ft_room(fab_fault *f, uint32_t slots, uint32_t peers); /* that so many can never overflow `held` */
/* link.c */
int ft_peer_open(void *ctx, const char *addr, size_t len, uint32_t *peer);
int ft_peer_close(void *ctx, uint32_t peer);
void ft_peer_event(fab_fault *f, fab_wc *wc); /* PEER_UP or PEER_DOWN of the inner domain: held, under our number */
uint32_t ft_peer_of(const fab_fault *f, uint32_t inner);
void ft_peer_settle(fab_fault *f, uint32_t peer); /* frees a closed one whose requests have all ended */
void ft_cut_peer(fab_fault *f, uint32_t peer, int32_t status);
void ft_cut_add(fab_fault *f, const char *peer, uint64_t lasts);
void ft_cuts_run(fab_fault *f);

#endif
