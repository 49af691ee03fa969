/* When the stages of a request happen: the cost models of real NICs, and what a simulated run makes of one.
 *
 * The constants are fitted to the paper's tables; docs/simulator.md says which row gave which constant, and which rows
 * are predicted. A request costs the worker post_ns, and doorbell_ns for each chain of requests that one doorbell covers;
 * then the NIC, for whichever is longer of nic_ns and the time of its bytes on the wire; then latency_ns on the way. The
 * completion takes latency_ns back and costs the worker done_ns, as an immediate costs the receiver's. */
#include "sim.h"

static const fab_sim_nic_model models[] = {
    {.name = "none", .help = "no costs", .nics = 1, .payload_permille = 1000, .chain = 1, .queue = 512},
    {.name = "efa-p5",
     .help = "EFA, 4 x 100 Gbit/s for a GPU",
     .nics = 4,
     .gbps = 100,
     .payload_permille = 918,
     .latency_ns = 15400,
     .post_ns = 443,
     .chain = 1,
     .done_ns = 32,
     .enqueue_ns = 980,
     .prepare_ns = 440,
     .queue = 512},
    {.name = "efa-p5en",
     .help = "EFA, 2 x 200 Gbit/s for a GPU",
     .nics = 2,
     .gbps = 200,
     .payload_permille = 918,
     .latency_ns = 15400,
     .post_ns = 443,
     .chain = 1,
     .done_ns = 32,
     .enqueue_ns = 980,
     .prepare_ns = 440,
     .queue = 512},
    {.name = "cx7",
     .help = "ConnectX-7, 1 x 400 Gbit/s for a GPU",
     .nics = 1,
     .gbps = 400,
     .payload_permille = 918,
     .latency_ns = 5380,
     .post_ns = 33,
     .doorbell_ns = 102,
     .chain = 4,
     .done_ns = 32,
     .enqueue_ns = 980,
     .prepare_ns = 440,
     .queue = 512},
};
#define MODELS (sizeof models / sizeof *models)

const fab_sim_nic_model *fab_sim_nic_at(uint32_t index) { return index < MODELS ? &models[index] : NULL; }

uint64_t sim_cpu_take(sim_cpu *cpu, uint64_t now, uint64_t ns) {
    if (cpu->until < now) cpu->until = now;
    cpu->busy += ns;
    return cpu->until += ns;
}

static uint64_t later(uint64_t a, uint64_t b) { return a > b ? a : b; }

uint64_t sim_cost_post(const fab_sim_nic_model *m, sim_cpu *cpu, sim_port *from, sim_port *to, uint64_t now,
                       uint64_t len) {
    uint64_t ring = from->chained % later(m->chain, 1) ? 0 : m->doorbell_ns;
    from->chained++;
    uint64_t posted_ps = 1000 * sim_cpu_take(cpu, now, m->post_ns + ring);
    uint64_t rate = m->gbps * m->payload_permille; /* bits in a microsecond */
    uint64_t wire_ps = rate ? (uint64_t)((unsigned __int128)len * 8000000 / rate) : 0;
    from->wire_ps += wire_ps;
    from->work_ps += 1000 * m->nic_ns;
    uint64_t takes = later(wire_ps, 1000 * m->nic_ns);
    from->out_ps = later(from->out_ps, posted_ps) + takes;
    /* a port takes in as fast as it sends: several senders at once share it */
    to->in_ps = later(from->out_ps + 1000 * m->latency_ns, to->in_ps + takes);
    return to->in_ps / 1000;
}

void sim_cost(sim_world *w, sim_nic *from, sim_nic *to, const fab_wr *wr, sim_stages *out) {
    const sim_options *o = &w->opt;
    sim_rand *r = &w->net;
    uint64_t dice = sim_next(r); /* one draw for the cheap decisions */
    uint64_t land = w->now + o->latency_ns, back = 0;
    if (o->nic_model) {
        const fab_sim_nic_model *m = fab_sim_nic_at((uint32_t)o->nic_model);
        land = sim_cost_post(m, &from->node->cpu, &from->port, &to->port, w->now, wr->len);
        back = m->latency_ns;
    }
    land += ((dice & 0xffffffffu) * (o->jitter_ns + 1)) >> 32;
    if (o->skew_ns && from->node->nnics > 1) land += o->skew_ns * from->index / (from->node->nnics - 1);
    if (o->slow_permille && sim_permille(r, o->slow_permille)) land += sim_below(r, o->slow_ns);
    out->read = land;
    if (o->early_read_percent && sim_percent(r, o->early_read_percent))
        out->read = w->now + sim_below(r, land - w->now + 1);
    out->land = land;
    /* half of them at once: completion and immediate are then two entries that may swap in the queues */
    out->done = land + back + (dice >> 32 & 1 ? 0 : sim_below(r, o->late_done_ns));
    out->imm = land + (dice >> 33 & 1 ? 0 : sim_below(r, o->late_imm_ns));
}

void sim_cost_polled(sim_nic *nic, uint32_t completions) {
    const sim_world *w = nic->node->world;
    const fab_sim_nic_model *m = fab_sim_nic_at((uint32_t)w->opt.nic_model);
    if (m->done_ns) sim_cpu_take(&nic->node->cpu, w->now, m->done_ns * completions);
}
