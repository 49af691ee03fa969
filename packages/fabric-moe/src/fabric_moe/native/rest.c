/* The second phase of a dispatch: once the counts of all ranks are here, what was not sent early goes to its exact place. What a
 * rank's shared memory does not hold goes in turns, each when that rank gives credit. The arithmetic is that of routing.py.
 *
 * Counts come from other ranks: each is read once, checked, and only then used. */
#include "proxy.h"

#include <errno.h>
#include <string.h>

static const uint8_t *block_of(const moe_rank *r, uint32_t slot, uint32_t source) {
    const moe_shape *c = &r->shape;
    return (const uint8_t *)(uintptr_t)c->inbound + slot * c->in_stride + source * c->counts_stride;
}

/* One source's row of the matrix. Without `row`, what of it comes before ours at each rank is added up. */
static int read_source(moe_rank *r, uint32_t slot, uint32_t q, int64_t *row, int64_t *early, moe_trouble *out) {
    const moe_shape *c = &r->shape;
    moe_slot *s = &r->slots[slot];
    moe_head head;
    memcpy(&head, block_of(r, slot, q), sizeof head);
    const volatile uint32_t *counts = (const volatile uint32_t *)(const void *)(block_of(r, slot, q) + MOE_HEAD);
    if (head.magic != MOE_MAGIC || head.generation != c->generation || head.step != s->number || head.rank != q) {
        moe_says(out, MOE_OTHER_STEP, 0);
        out->rank = q;
        out->generation = head.generation;
        out->step = head.step;
        return MOE_OTHER_STEP;
    }
    uint64_t most = 0, total = 0; /* sums come back for all of them, into memory that is made for stage_rows */
    bool wrong = head.private_rows > c->private_max || (q == c->rank && head.private_rows != s->window);
    for (uint32_t d = 0; d < c->ranks; d++) {
        uint32_t n = counts[d];
        most = n > most ? n : most;
        total += n;
        if (q == c->rank && n != moe_rows_for(s, d)) wrong = true; /* ours: nobody else may write there */
        if (row) row[d] = n;
        else if (q < c->rank && n > head.private_rows) s->begin[d] += n - head.private_rows;
    }
    if (early) early[q] = head.private_rows;
    if (!wrong && most <= c->max_tokens && total <= c->stage_rows) return MOE_OK;
    moe_says(out, MOE_BAD_COUNTS, 0);
    out->rank = q;
    out->private_rows = head.private_rows;
    out->most = most;
    out->total = total;
    return MOE_BAD_COUNTS;
}

int moe_heads(moe_rank *r, uint32_t slot, int64_t *counts, int64_t *private_rows, moe_trouble *out) {
    const moe_shape *c = &r->shape;
    moe_slot *s = &r->slots[slot];
    if (!counts) memset(s->begin, 0, c->ranks * sizeof *s->begin);
    for (uint32_t q = 0; q < c->ranks; q++) {
        int64_t *row = counts ? counts + (size_t)q * c->ranks : NULL;
        if (!r->alive[q]) { /* what lies there is of another generation, or nothing */
            if (row) memset(row, 0, c->ranks * sizeof *row);
            if (private_rows) private_rows[q] = 0;
            continue;
        }
        int rc = read_source(r, slot, q, row, private_rows, out);
        if (rc) return rc;
    }
    return MOE_OK;
}

/* Our rows in the shared memory of d: where they begin there, all turns end to end; and how many. */
static uint64_t above(const moe_slot *s, uint32_t d) {
    uint64_t rows = moe_rows_for(s, d);
    return rows > s->window ? rows - s->window : 0;
}

static bool has_turn(const moe_rank *r, const moe_slot *s, uint32_t d, uint64_t turn) {
    uint64_t first = (uint64_t)s->begin[d], rows = above(s, d);
    return rows && turn >= first / r->shape.shared && turn <= (first + rows - 1) / r->shape.shared;
}

static void target(const moe_rank *r, uint32_t slot, uint32_t d, fab_target *to) {
    const moe_shape *c = &r->shape;
    const moe_slot *s = &r->slots[slot];
    uint64_t first = (uint64_t)s->begin[d], end = first + above(s, d), base = s->turn[d] * c->shared;
    uint64_t low = first > base ? first : base, high = end < base + c->shared ? end : base + c->shared;
    uint64_t row = (uint64_t)s->starts[d] + s->window + (low - first);
    uint64_t place = (uint64_t)c->ranks * c->private_max + (low - base);
    to->remote = r->remotes[d];
    to->loff = slot * c->out_stride + c->out_rows + row * c->row_bytes;
    to->roff = slot * c->in_stride + c->in_rows + place * c->row_bytes;
    to->len = (high - low) * c->row_bytes;
}

/* What was sent to d is followed by its next turn, if it has one of ours. */
static void sent(const moe_rank *r, moe_slot *s, uint32_t d) { s->due[d] = has_turn(r, s, d, ++s->turn[d]) ? 2 : 0; }

/* All that is due, in as few scatters as the others' immediates allow. */
static int send_due(moe_rank *r, uint32_t slot) {
    moe_slot *s = &r->slots[slot];
    uint32_t ranks = r->shape.ranks;
    for (uint32_t d = 0; d < ranks; d++) {
        if (s->due[d] != 1) continue;
        uint32_t imm = moe_imm(r, d, slot, MOE_ROWS), n = 0;
        for (uint32_t k = d; k < ranks; k++)
            if (s->due[k] == 1 && moe_imm(r, k, slot, MOE_ROWS) == imm) target(r, slot, k, &r->targets[n++]);
        int rc = moe_submit(r, slot, n, imm, &s->trouble);
        if (rc) return rc;
        for (uint32_t k = d; k < ranks; k++)
            if (s->due[k] == 1 && moe_imm(r, k, slot, MOE_ROWS) == imm) sent(r, s, k);
    }
    return MOE_OK;
}

static bool waits_for_credit(const moe_rank *r, const moe_slot *s) {
    for (uint32_t d = 0; d < r->shape.ranks; d++)
        if (s->due[d] == 2) return true;
    return false;
}

int moe_owes(moe_rank *r, uint32_t slot) {
    pthread_mutex_lock(&r->lock);
    const moe_slot *s = &r->slots[slot];
    bool owes = s->state == MOE_WAITING || s->state == MOE_SENDING;
    for (uint32_t d = 0; s->state == MOE_SENT && d < r->shape.ranks; d++) owes = owes || s->due[d];
    pthread_mutex_unlock(&r->lock);
    return owes;
}

static int expect_credit(moe_rank *r, uint32_t slot) {
    moe_slot *s = &r->slots[slot];
    if (s->credited || !waits_for_credit(r, s)) return MOE_OK;
    /* no peers: whoever waits for rows notices a loss */
    int64_t rc = r->api->expect(r->engine, r->credits[slot], 1, UINT64_C(1) << 60, NULL, 0);
    if (rc == -EAGAIN) return moe_says(&s->trouble, MOE_FULL, rc);
    if (rc < 0) return moe_says(&s->trouble, MOE_REFUSED, rc);
    s->credited = (uint64_t)rc;
    r->api->expect_bell(r->engine, s->credited, moe_ring, &s->credit);
    return MOE_OK;
}

/* Whose shared memory is free for the turn that we wait for. */
static void hear_credits(moe_rank *r, uint32_t slot) {
    const moe_shape *c = &r->shape;
    moe_slot *s = &r->slots[slot];
    fab_outcome ended = {.phase = FAB_PENDING};
    if (!s->credited || r->api->expect_outcome(r->engine, s->credited, &ended) || ended.phase == FAB_PENDING) return;
    r->api->expect_release(r->engine, s->credited);
    s->credited = 0;
    const uint8_t *at = (const uint8_t *)(uintptr_t)c->inbound + slot * c->in_stride + c->in_credits;
    for (uint32_t d = 0; ended.phase == FAB_DONE && d < c->ranks; d++) {
        moe_head head;
        memcpy(&head, at + (size_t)d * MOE_HEAD, sizeof head);
        if (s->due[d] == 2 && head.magic == MOE_MAGIC && head.generation == c->generation && head.step == s->number &&
            head.turn == s->turn[d])
            s->due[d] = 1;
    }
    if (ended.phase != FAB_DONE) memset(s->due, 0, c->ranks); /* the group is being closed */
}

static int begin_rest(moe_rank *r, uint32_t slot) {
    moe_slot *s = &r->slots[slot];
    int rc = moe_heads(r, slot, NULL, NULL, &s->trouble);
    if (rc) return rc;
    for (uint32_t d = 0; d < r->shape.ranks; d++) {
        s->turn[d] = 0;
        s->due[d] = 0;
        if (!r->alive[d] || !above(s, d)) continue;
        uint64_t first = (uint64_t)s->begin[d] / r->shape.shared;
        s->turn[d] = first;
        s->due[d] = first ? 2 : 1;
    }
    s->state = MOE_SENDING;
    return MOE_OK;
}

int moe_advance(moe_rank *r, uint32_t slot) {
    moe_slot *s = &r->slots[slot];
    if (s->state == MOE_FAILED) return s->trouble.code;
    if (s->state == MOE_IDLE || (s->state == MOE_WAITING && (!s->here || !s->packed))) return MOE_NOT_YET;
    if (r->stopped) return moe_says(&s->trouble, MOE_REFUSED, -ESHUTDOWN);
    int rc = s->state == MOE_WAITING ? begin_rest(r, slot) : MOE_OK;
    if (!rc) hear_credits(r, slot);
    if (!rc) rc = send_due(r, slot);
    if (!rc) rc = expect_credit(r, slot);
    if (!rc) s->state = MOE_SENT;
    else if (rc != MOE_FULL) s->state = MOE_FAILED; /* a part of it was sent: not once more */
    return rc;
}
