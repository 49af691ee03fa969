/* What a cluster would do: the real engine (sharding, posting, completion, fail-over) under virtual time, over NICs that only
 * cost time. The workload keeps `depth` transfers under way and submits one again that failed. */
#include "predict.h"

#define BEGIN_NS 1000000000ull
#define MEMORY (1ull << 40) /* registered, never touched: no bytes are carried */
#define MAX_PAGES 65536u

static void start_node(pred_world *w, uint32_t index) {
    pred_node *n = &w->nodes[index];
    n->world = w;
    n->index = index;
    n->step_at = PRED_NEVER;
    fab_engine_cfg cfg = {.imm_slots = 64,
                          .max_inflight = PRED_DEPTH,
                          .max_peers = PRED_PEERS + 1,
                          .busy = 1, /* a worker that never sleeps and is never helped */
                          .timeout_ns = 20000000000ull,
                          .shard_bytes = w->q.shard_bytes,
                          .clock = &w->now};
    uint64_t ops[FAB_MAX_NICS], ctx[FAB_MAX_NICS], cpus[16] = {0};
    for (uint32_t i = 0; i < w->q.nic.nics; i++) {
        n->nic[i].node = n;
        n->nic[i].index = i;
        ops[i] = (uint64_t)(uintptr_t)&pred_ops;
        ctx[i] = (uint64_t)(uintptr_t)&n->nic[i];
    }
    n->engine = fab_engine_new(&cfg);
    if (!n->engine || fab_group_open(n->engine, (uint32_t)w->q.nic.nics, ops, ctx, cpus, 0) != 0) abort();
    n->imm = (uint32_t)fab_imm_alloc(n->engine); /* a fresh engine's first is the same everywhere */
}

static int introduce(pred_world *w) {
    const fab_mr mr = {.addr = MEMORY, .len = MEMORY, .access = FAB_ACCESS_REMOTE_WRITE, .fd = -1};
    fab_engine *e = w->nodes[0].engine;
    fab_mr_keys keys[FAB_MAX_NICS];
    w->local = fab_mem_reg(e, 0, &mr, keys);
    if (w->local < 0) return (int)w->local;
    for (uint32_t k = 1; k < w->nnodes; k++) {
        char text[FAB_MAX_NICS][32];
        const char *addrs[FAB_MAX_NICS];
        uint64_t remote_keys[FAB_MAX_NICS], bases[FAB_MAX_NICS];
        int64_t rc = fab_mem_reg(w->nodes[k].engine, 0, &mr, keys);
        if (rc < 0) return (int)rc;
        for (uint32_t i = 0; i < w->q.nic.nics; i++) {
            fab_group_address(w->nodes[k].engine, 0, i, text[i], sizeof text[i]);
            addrs[i] = text[i];
            remote_keys[i] = keys[i].remote_key;
            bases[i] = keys[i].remote_base;
        }
        int64_t peer = fab_peer_add(e, 0, (uint32_t)w->q.nic.nics, addrs);
        if (peer < 0) return (int)peer;
        w->remote[k - 1] = fab_remote_add(e, 0, (uint32_t)peer, MEMORY, FAB_ACCESS_REMOTE_WRITE,
                                          (uint32_t)w->q.nic.nics, remote_keys, bases);
        if (w->remote[k - 1] < 0) return (int)w->remote[k - 1];
    }
    return 0;
}

/* ---- the workload ----------------------------------------------------------------------------------------- */

static bool more(const pred_world *w) {
    const fab_sim_question *q = &w->q;
    return q->until_ns ? w->now < BEGIN_NS + q->until_ns : w->submitted < q->warm + q->count;
}

static int submit(pred_world *w, pred_slot *slot) {
    const fab_sim_question *q = &w->q;
    fab_engine *e = w->nodes[0].engine;
    uint64_t to = (uint64_t)w->remote[w->submitted % q->peers], from = (uint64_t)w->local;
    uint64_t flag = (uint64_t)(uintptr_t)&slot->flag;
    int64_t handle;
    slot->flag = 0;
    slot->submit_at = PRED_NEVER;
    sim_cpu_take(&w->nodes[0].cpu, w->now, q->nic.prepare_ns);
    w->first_post = PRED_NEVER;
    if (q->op == FAB_OP_PAGED) {
        handle = fab_submit_paged(e, from, w->pages, q->size, 0, to, w->pages, q->size, 0, (uint32_t)q->pages, q->size,
                                  w->nodes[0].imm, -1, 0, flag);
    } else if (q->op == FAB_OP_SCATTER) {
        fab_target targets[PRED_PEERS];
        for (uint32_t i = 0; i < q->peers; i++)
            targets[i] = (fab_target){.remote = (uint64_t)w->remote[i], .loff = i * q->size, .len = q->size};
        handle = fab_submit_many(e, FAB_OP_SCATTER, from, targets, q->peers, w->nodes[0].imm, -1, 0, flag);
    } else {
        handle = fab_submit_write(e, from, 0, to, 0, q->size, w->nodes[0].imm, -1, 0, flag);
    }
    if (handle < 0) return (int)handle;
    fab_transfer_release(e, (uint64_t)handle); /* its flag tells */
    slot->busy = true;
    w->submitted++;
    if (w->nodes[0].step_at > w->now) w->nodes[0].step_at = w->now;
    return 0;
}

static void count_in(fab_sim_span *span, uint64_t at) {
    if (!span->ops++) span->first_ns = at;
    span->last_ns = at;
}

static void measure(pred_world *w, uint64_t at) {
    const fab_sim_question *q = &w->q;
    fab_sim_answer *out = w->out;
    if (w->ended < q->warm) return;
    const pred_node *n = w->nodes;
    if (!out->all.ops) { /* the clocks of work begin with the first; until the last, they are what is reported */
        w->posting = 0;
        for (uint32_t k = 0; k < w->nnodes; k++) {
            w->nodes[k].cpu.busy = 0;
            for (uint32_t i = 0; i < q->nic.nics; i++)
                w->nodes[k].nic[i].port.wire_ps = w->nodes[k].nic[i].port.work_ps = 0;
        }
    }
    count_in(&out->all, at);
    if (out->all.ops > 1) w->posting += w->last_post - w->first_post;
    out->sender_ns = n->cpu.busy;
    for (uint32_t k = 1; k < w->nnodes; k++)
        if (n[k].cpu.busy > out->receiver_ns) out->receiver_ns = n[k].cpu.busy;
    for (uint32_t i = 0; i < q->nic.nics; i++) {
        if (n->nic[i].port.wire_ps / 1000 > out->wire_ns) out->wire_ns = n->nic[i].port.wire_ps / 1000;
        if (n->nic[i].port.work_ps / 1000 > out->nic_ns) out->nic_ns = n->nic[i].port.work_ps / 1000;
    }
    for (uint32_t i = 0; i < 3; i++)
        if (at >= BEGIN_NS + q->from[i] && at < BEGIN_NS + q->to[i]) count_in(&out->span[i], at);
}

static void look(pred_world *w) {
    uint64_t at = w->nodes[0].cpu.until > w->now ? w->nodes[0].cpu.until : w->now;
    for (uint32_t i = 0; i < w->q.depth; i++) {
        pred_slot *slot = &w->slot[i];
        if (!slot->busy || !slot->flag) continue;
        slot->busy = false;
        if (slot->flag >> 32) {
            w->out->failed++;
        } else {
            w->out->done++;
            measure(w, at);
        }
        w->ended++;
        slot->submit_at = at + w->q.nic.enqueue_ns;
    }
}

/* ---- time ------------------------------------------------------------------------------------------------- */

static void step(pred_world *w, pred_node *n) {
    fab_group *g = n->engine->groups[0];
    n->step_at = PRED_NEVER;
    if (!fab_group_try(g)) abort(); /* one thread: somebody kept the lock */
    uint32_t did = fab_step(g, w->now);
    fab_group_unlock(g);
    for (uint32_t i = 0; i < w->q.nic.nics;
         i++) { /* a busy worker looks again at once, and then sees nothing until ... */
        uint64_t head = did ? w->now : pred_head(&n->nic[i]);
        if (head < n->step_at) n->step_at = head;
    }
    if (n == w->nodes) look(w);
}

static uint64_t ready(const pred_node *n) {
    return n->step_at == PRED_NEVER || n->step_at > n->cpu.until ? n->step_at : n->cpu.until;
}

/* Nothing will happen any more: was something left undone (C1)? */
static bool unfinished(const pred_world *w) {
    for (uint32_t i = 0; i < w->q.depth; i++)
        if (w->slot[i].busy) return true;
    return false;
}

static int run(pred_world *w) {
    const fab_sim_question *q = &w->q;
    for (;;) {
        uint64_t at = PRED_NEVER;
        pred_node *next = NULL;
        pred_slot *slot = NULL;
        bool going_on = more(w);
        for (uint32_t i = 0; i < q->depth && going_on; i++)
            if (!w->slot[i].busy && w->slot[i].submit_at < at) at = (slot = &w->slot[i])->submit_at;
        for (uint32_t k = 0; k < w->nnodes; k++)
            if (ready(&w->nodes[k]) < at) at = ready(next = &w->nodes[k]);
        if (at == PRED_NEVER) return unfinished(w) ? -ETIMEDOUT : 0;
        if (q->lose_ns && !w->lost && BEGIN_NS + q->lose_ns <= at) {
            w->now = BEGIN_NS + q->lose_ns > w->now ? BEGIN_NS + q->lose_ns : w->now;
            w->lost = true;
            pred_lose(&w->nodes[0].nic[q->lost_nic]);
            continue;
        }
        if (at > w->now) w->now = at;
        if (next) {
            step(w, next);
        } else if (more(w)) {
            int rc = submit(w, slot);
            if (rc) return rc;
        }
    }
}

static bool sound(const fab_sim_question *q) {
    const fab_sim_nic_model *m = &q->nic;
    return q->op >= FAB_OP_WRITE && q->op <= FAB_OP_SCATTER && q->peers >= 1 && q->peers <= PRED_PEERS &&
           q->depth >= 1 && q->depth <= PRED_DEPTH && q->pages >= 1 && q->pages <= MAX_PAGES && q->count >= 2 &&
           q->size <= MEMORY / q->pages && q->size <= MEMORY / q->peers && m->nics >= 1 && m->nics <= FAB_MAX_NICS &&
           q->lost_nic < m->nics && m->queue >= 1 && m->queue <= 1u << 20 && m->payload_permille >= 1 &&
           m->payload_permille <= 1000 && m->gbps <= 1000000 &&
           m->latency_ns + m->enqueue_ns + m->prepare_ns + m->post_ns >= 1 && m->latency_ns <= BEGIN_NS &&
           m->enqueue_ns <= BEGIN_NS && m->prepare_ns <= BEGIN_NS && m->post_ns <= BEGIN_NS &&
           m->doorbell_ns <= BEGIN_NS && m->nic_ns <= BEGIN_NS && m->done_ns <= BEGIN_NS;
}

int fab_sim_predict(const fab_sim_question *question, fab_sim_answer *out) {
    if (!sound(question)) return -EINVAL;
    memset(out, 0, sizeof *out);
    pred_world *w = calloc(1, sizeof *w);
    if (!w) return -ENOMEM;
    w->q = *question;
    w->out = out;
    w->now = BEGIN_NS;
    w->nnodes = 1 + w->q.peers;
    w->nodes = calloc(w->nnodes, sizeof *w->nodes);
    w->pages = malloc(w->q.pages * sizeof *w->pages);
    if (!w->nodes || !w->pages) abort();
    for (uint32_t i = 0; i < w->q.pages; i++) w->pages[i] = i;
    for (uint32_t i = 0; i < w->nnodes; i++) start_node(w, i);
    for (uint32_t i = 0; i < w->q.depth; i++) w->slot[i].submit_at = BEGIN_NS + w->q.nic.enqueue_ns;
    int rc = introduce(w);
    if (!rc) rc = run(w);
    for (uint32_t k = 1; k < w->nnodes; k++) {
        int64_t count = fab_imm_count(w->nodes[k].engine, w->nodes[k].imm);
        out->arrived += count > 0 ? (uint64_t)count : 0;
    }
    uint64_t each = w->q.op == FAB_OP_PAGED ? w->q.pages : w->q.op == FAB_OP_SCATTER ? w->q.peers : 1;
    out->writes = out->done * each;
    out->virtual_ns = w->now - BEGIN_NS;
    if (out->all.ops > 1) out->posting_ns = w->posting / (out->all.ops - 1);
    for (uint32_t i = 0; i < w->nnodes; i++) {
        fab_engine_close(w->nodes[i].engine, 0);
        fab_engine_free(w->nodes[i].engine);
        for (uint32_t k = 0; k < FAB_MAX_NICS; k++) free(w->nodes[i].nic[k].ring);
    }
    free(w->nodes);
    free(w->pages);
    free(w);
    return rc;
}
