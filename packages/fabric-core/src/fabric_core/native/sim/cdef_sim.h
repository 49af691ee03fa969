/* Declarations, also read by cffi, which skips the preprocessor's lines. */
#ifndef FAB_CDEF_SIM_H
#define FAB_CDEF_SIM_H

#include <stddef.h>
#include <stdint.h>

#include "fabric/domain.h"

typedef struct fab_sim_option {
    const char *name, *help;
    uint64_t calm, lo, hi;
    uint32_t calm_percent; /* seeds that leave it calm, in 100 */
} fab_sim_option;

typedef struct fab_sim_report {
    uint64_t seed, hash;
    uint64_t transfers, done, failed, cancelled, fired, messages, writes, bytes, requests, imms, strays, events, steps,
        lost_peers, virtual_ns;
    uint64_t faults[16];
    int32_t violated;
    char violation[512]; /* the first one: checker, time, what */
} fab_sim_report;

uint32_t fab_sim_option_count(void);
const fab_sim_option *fab_sim_option_at(uint32_t index);
void fab_sim_expand(uint64_t seed, uint64_t *values); /* one value for each option */
const char *fab_sim_fault_name(uint32_t index);       /* of report.faults; NULL at the end */
/* Runs one seed to its end. `trace`: where the last events are told, or NULL. 0, or -EINVAL for values that make no sense. */
int fab_sim_run(uint64_t seed, const uint64_t *values, fab_sim_report *out, char *trace, size_t trace_cap);

/* ---- predictions: the engine over NICs that cost time and carry no bytes --------------------------------------- */
typedef struct fab_sim_nic_model {
    const char *name, *help;
    uint64_t nics, gbps; /* of one GPU; nominal, of each NIC (0: no limit) */
    uint64_t payload_permille; /* what is left of it for payload */
    uint64_t latency_ns; /* one way */
    uint64_t post_ns; /* the worker, for each request */
    uint64_t doorbell_ns, chain; /* ... and for each chain of so many */
    uint64_t nic_ns; /* the NIC, for each request */
    uint64_t done_ns; /* the worker, for each completion or immediate */
    uint64_t enqueue_ns; /* from a submit until the worker has it */
    uint64_t prepare_ns; /* the worker, for each transfer */
    uint64_t queue; /* requests that a NIC holds */
} fab_sim_nic_model;

typedef struct fab_sim_question {
    fab_sim_nic_model nic;
    uint32_t op, peers, depth; /* FAB_OP_WRITE, _PAGED or _SCATTER; receivers; transfers under way at a time */
    uint32_t lost_nic; /* of the sender, from lose_ns on (0: never) */
    uint64_t size, pages; /* bytes of a write, a page or a target; pages of a transfer */
    uint64_t shard_bytes; /* the engine: a write from this size on is spread over all NICs */
    uint64_t warm, count; /* transfers before the measured ones, and those */
    uint64_t lose_ns, until_ns; /* until_ns > 0: goes on until then, whatever `count` says */
    uint64_t from[3], to[3]; /* spans of time to look at apart from that */
} fab_sim_question;

typedef struct fab_sim_span {
    uint64_t ops, first_ns, last_ns; /* transfers that were done; when the first and the last of them were */
} fab_sim_span;

typedef struct fab_sim_answer {
    uint64_t done, failed, writes, arrived, requests, virtual_ns;
    fab_sim_span all, span[3]; /* after `warm`; of from and to */
    uint64_t posting_ns; /* from a transfer's first request to its last, in the mean (depth 1) */
    uint64_t sender_ns, receiver_ns, wire_ns, nic_ns; /* at work within `all`: workers, the busiest NIC's two halves */
} fab_sim_answer;

const fab_sim_nic_model *fab_sim_nic_at(uint32_t index); /* NULL at the end; 0 costs nothing */
/* 0, -EINVAL for a question without sense, -ETIMEDOUT for a transfer that never ended, or what the engine refused. */
int fab_sim_predict(const fab_sim_question *question, fab_sim_answer *out);

/* ---- the backend "sim": NICs of this process, in real time ------------------------------------------------------- */
const fab_domain_ops *fab_sim_live_ops(void);
/* 0, or -EINVAL (name, model), -EADDRINUSE, -ENOMEM. `out` goes to an engine, which closes it, or to fab_sim_live_close. */
int fab_sim_live_open(const char *name, uint32_t index, uint64_t inc, uint64_t seed, uint32_t model, void **out);
void fab_sim_live_close(void *domain);

#endif
