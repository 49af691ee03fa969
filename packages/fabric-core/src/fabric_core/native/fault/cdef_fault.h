/* Declarations only, no preprocessor lines: also read by cffi. Needs stdint and fab_domain_ops. */

/* What goes wrong, and how often. Shares are parts per million; all zero: nothing. Everything that is random comes from
 * `seed`, so the same calls meet the same faults. */
typedef struct fab_fault_plan {
    uint64_t seed;
    uint32_t reorder; /* 1: completions come out in random order */
    uint32_t drop_ppm; /* a request ends for the peer, but its completion stays back until it is cancelled */
    uint32_t fail_ppm; /* a request is not carried out, and ends with fail_status */
    uint32_t fail_late_ppm; /* a request is carried out, and ends with fail_status all the same */
    int32_t fail_status; /* a negative errno */
    uint32_t refuse_ppm; /* a post finds the queue full, and so do those of the next refuse_ns */
    uint32_t partial_ppm; /* a post takes a random part of what it is given */
    uint32_t rnr_ppm; /* a receive is not taken now */
    uint32_t cut_ppm; /* a post finds its link down, which stays so for cut_ns */
    uint64_t delay_ns; /* completions, immediates and messages come up to so much later */
    uint64_t refuse_ns, cut_ns;
    uint64_t kill_ops; /* the NIC goes down after so many requests; 0: not */
    uint64_t kill_ns; /* ... and after so long; 0: not */
    uint64_t revive_ns; /* and comes back so long after; 0: not by itself */
} fab_fault_plan;

typedef struct fab_fault_counts {
    uint64_t taken, ended; /* requests */
    uint64_t dropped, failed, failed_late, refused, partial, rnr, cuts, kills, revives;
    uint32_t open; /* requests taken and not yet ended */
    uint32_t held; /* completions held back now */
    uint32_t down; /* 1: the NIC is down */
    uint32_t pad;
} fab_fault_counts;

typedef struct fab_fault fab_fault;

/* A domain around another one, which it owns from now on (its close closes both). NULL: no memory, nothing taken. */
fab_fault *fab_fault_wrap(const fab_domain_ops *inner, void *ctx, const fab_fault_plan *plan);
const fab_domain_ops *fab_fault_ops(void);

/* From any thread, for whoever holds a reference: take effect at the domain's next poll, which they wake up for.
 * Names of peers: the address as peer_open got it, or a part of it; "" is everybody. */
void fab_fault_hold(fab_fault *f);
void fab_fault_release(fab_fault *f);
void fab_fault_kill(fab_fault *f);
void fab_fault_revive(fab_fault *f);
int fab_fault_cut(fab_fault *f, const char *peer, uint64_t for_ns); /* -ENOSPC: 16 cuts are in force */
void fab_fault_mend(fab_fault *f); /* ends all cuts */
void fab_fault_counts_get(fab_fault *f, fab_fault_counts *out);
