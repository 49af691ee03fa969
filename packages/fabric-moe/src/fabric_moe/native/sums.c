/* Combine: for each source a head and its sums, side by side in the memory that is sent, all in one scatter. */
#include "proxy.h"

#include <errno.h>
#include <string.h>

/* Where the block for rank s begins, of our memory and of its. */
static uint64_t ours(const moe_rank *r, uint32_t slot, uint32_t s, int64_t first) {
    const moe_shape *c = &r->shape;
    return slot * c->out_stride + c->out_sums + (uint64_t)r->place[s] * MOE_HEAD + (uint64_t)first * c->sum_bytes;
}

static uint64_t theirs(const moe_rank *r, uint32_t slot, uint32_t from, int64_t before) {
    const moe_shape *c = &r->shape;
    return slot * c->in_stride + c->in_sums + (uint64_t)from * MOE_HEAD + (uint64_t)before * c->sum_bytes;
}

int moe_weigh_all(moe_rank *r, uint32_t slot, const moe_sums *sums, const uint8_t *y, int from, size_t hidden,
                  const int64_t *at, const float *weights, size_t k, float *acc, int to, moe_trouble *out) {
    const moe_shape *c = &r->shape;
    uint8_t *memory = (uint8_t *)(uintptr_t)c->outbound;
    if ((uint64_t)sums->starts[c->ranks] > c->stage_rows) return moe_says(out, MOE_REFUSED, -ERANGE);
    for (uint32_t s = 0; s < c->ranks; s++) {
        if (!r->alive[s]) continue;
        int64_t first = sums->starts[s];
        size_t rows = (size_t)(sums->starts[s + 1] - first);
        uint8_t *to_rows = memory + ours(r, slot, s, first) + MOE_HEAD;
        moe_weigh(y, from, hidden, at + (size_t)first * k, weights ? weights + (size_t)first * k : NULL, rows, k, acc,
                  to_rows, c->sum_bytes, to);
    }
    return MOE_OK;
}

void moe_sums_target(const moe_rank *r, uint32_t slot, const moe_sums *sums, uint32_t s, fab_target *to) {
    uint64_t rows = (uint64_t)(sums->starts[s + 1] - sums->starts[s]);
    to->loff = ours(r, slot, s, sums->starts[s]);
    to->roff = theirs(r, slot, r->shape.rank, sums->before[s]);
    to->len = MOE_HEAD + rows * r->shape.sum_bytes;
}

int moe_send_sums(moe_rank *r, uint32_t slot, const moe_sums *sums, moe_trouble *out) {
    const moe_shape *c = &r->shape;
    moe_head head = {.magic = MOE_MAGIC, .generation = c->generation, .step = r->slots[slot].number, .rank = c->rank};
    head.flags = sums->flags;
    if ((uint64_t)sums->starts[c->ranks] > c->stage_rows) return moe_says(out, MOE_REFUSED, -ERANGE);
    for (uint32_t s = 0; s < c->ranks; s++)
        if (r->alive[s])
            memcpy((uint8_t *)(uintptr_t)c->outbound + ours(r, slot, s, sums->starts[s]), &head, sizeof head);
    return moe_send_all(r, slot, MOE_SUMS, sums, out);
}

int moe_check_sums(moe_rank *r, uint32_t slot, uint8_t *flags, moe_trouble *out) {
    const moe_shape *c = &r->shape;
    const moe_slot *s = &r->slots[slot];
    for (uint32_t d = 0; d < c->ranks; d++) {
        flags[d] = 0;
        if (!r->alive[d]) continue;
        moe_head head;
        memcpy(&head, (const uint8_t *)(uintptr_t)c->inbound + theirs(r, slot, d, s->starts[d]), sizeof head);
        flags[d] = (uint8_t)head.flags;
        if (head.magic == MOE_MAGIC && head.generation == c->generation && head.step == s->number && head.rank == d)
            continue;
        moe_says(out, MOE_OTHER_STEP, 0);
        out->rank = d;
        out->generation = head.generation;
        out->step = head.step;
        return MOE_OTHER_STEP;
    }
    return MOE_OK;
}
