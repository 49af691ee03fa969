/* The predictor's world: engines without threads over NICs that cost time and carry no bytes. */
#ifndef FAB_SIM_PREDICT_H
#define FAB_SIM_PREDICT_H

#include "../engine_internal.h"
#include "cost.h"

#define PRED_NEVER UINT64_MAX
#define PRED_DEPTH 256u
#define PRED_PEERS 255u

typedef struct pred_world pred_world;
typedef struct pred_node pred_node;

typedef struct pred_entry { /* a completion, and from when on it can be seen */
    uint64_t at;
    fab_wc wc;
} pred_entry;

typedef struct pred_nic {
    pred_node *node;
    uint32_t index, used; /* requests that it holds */
    bool down;
    sim_port port;
    pred_entry *ring; /* by time; `first` and `count` of a ring of `cap`, a power of two */
    uint32_t first, count, cap;
    uint32_t links[PRED_PEERS], nlinks; /* link to node */
} pred_nic;

struct pred_node {
    pred_world *world;
    uint32_t index;
    fab_engine *engine;
    pred_nic nic[FAB_MAX_NICS];
    sim_cpu cpu;
    uint64_t step_at;
    uint32_t imm;
};

typedef struct pred_slot { /* one of the transfers under way at a time */
    uint64_t flag;         /* bumped by the engine */
    uint64_t submit_at;    /* when the worker gets it; PRED_NEVER: it has it, or no more are wanted */
    bool busy;
} pred_slot;

struct pred_world {
    uint64_t now;
    fab_sim_question q;
    fab_sim_answer *out;
    pred_node *nodes; /* the sender first */
    uint32_t nnodes;
    int64_t local, remote[PRED_PEERS];
    pred_slot slot[PRED_DEPTH];
    uint32_t *pages;
    uint64_t submitted, ended, posting;
    uint64_t first_post, last_post; /* of the transfer under way */
    bool lost;
};

extern const fab_domain_ops pred_ops;
void pred_push(pred_nic *nic, uint64_t at, const fab_wc *wc);
uint64_t pred_head(const pred_nic *nic); /* when its next completion can be seen */
void pred_lose(pred_nic *nic);

#endif
