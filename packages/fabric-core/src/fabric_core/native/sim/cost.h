/* What a NIC and the processor that drives it cost, in virtual time. Used by the simulated network (net.c, when a run names
 * a model) and by the predictor (predict.c): the engine above is the same real one, only time is a model's. */
#ifndef FAB_SIM_COST_H
#define FAB_SIM_COST_H

#include "cdef_sim.h"

/* A worker: busy until then with what it has begun, and for so long in all. */
typedef struct sim_cpu {
    uint64_t until, busy;
} sim_cpu;

/* A NIC's two directions. Picoseconds, since a short request's time on the wire is no whole number of nanoseconds. */
typedef struct sim_port {
    uint64_t out_ps, in_ps; /* free again */
    uint64_t wire_ps, work_ps; /* sent for so long; worked on requests for so long */
    uint32_t chained; /* requests since the last doorbell; a new call of post() begins with 0 */
} sim_port;

/* Takes the worker for `ns` from `now` or from when it is free; returns when it is free again. */
uint64_t sim_cpu_take(sim_cpu *cpu, uint64_t now, uint64_t ns);

/* Posts a request of `len` bytes: the worker builds it and rings the doorbell if it is the first of a chain; the NIC works on
 * it and sends it. Returns when the last byte has landed; the sender can know it `latency_ns` later. */
uint64_t sim_cost_post(const fab_sim_nic_model *m, sim_cpu *cpu, sim_port *from, sim_port *to, uint64_t now,
                       uint64_t len);

#endif
