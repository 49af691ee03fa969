/* The proxy of GPU ranks alone: a thread for each rank plays its kernels. All bytes are compared. */
#include <sched.h>

#include "gpu_net.h"

static uint32_t private_rows, seed;

/* ---- kernels ------------------------------------------------------------------------------------------------------ */

static uint32_t mixed(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    uint32_t h = seed * 2654435761u + a * 40503u + b * 69069u + c * 1103515245u + d * 12345u;
    h ^= h >> 15;
    h *= 2246822519u;
    return h ^ h >> 13;
}
static uint32_t rows(uint32_t step, uint32_t s, uint32_t d) {
    uint32_t n = mixed(step, s, d, 1) % (2 * TOKENS);
    return n > TOKENS ? 0 : n;
}

static void await(const _Atomic uint32_t *word, uint32_t epoch) {
    while (atomic_load_explicit(word, memory_order_acquire) != epoch) sched_yield();
}

static void put(uint8_t *at, size_t bytes, uint32_t tag) { memset(at, (int)(tag & 0xFF), bytes); }

static void check(const uint8_t *at, size_t bytes, uint32_t tag) {
    for (size_t i = 0; i < bytes; i++) CHECK(at[i] == (tag & 0xFF));
}

static void *kernels(void *arg) {
    struct fab_engine *e = arg;
    uint32_t me = e->rank;
    for (uint32_t step = 0; step < STEPS; step++) {
        uint32_t slot = step % DEPTH, epoch = step / DEPTH + 1, at = 0;
        uint8_t *out = e->out + slot * OUT_STRIDE;
        const uint8_t *in = e->in + slot * IN_STRIDE;
        for (uint32_t d = 0; d < RANKS; d++) {
            e->counted[slot][d] = rows(step, me, d);
            for (uint32_t h = 0; h < HELD; h++) e->counted[slot][RANKS + d * HELD + h] = h ? 0 : rows(step, me, d);
        }
        atomic_store_explicit(&e->mail.counted[slot], epoch, memory_order_release);
        for (uint32_t d = 0; d < RANKS; d++)
            for (uint32_t n = 0; n < rows(step, me, d); n++) put(out + ROW * at++, ROW, mixed(step, me, d, n + 2));
        atomic_store_explicit(&e->mail.packed[slot], epoch, memory_order_release);
        await(&e->mail.rows_here[slot], epoch);
        uint32_t late = RANKS * private_rows, all = 0;
        for (uint32_t s = 0; s < RANKS; s++) {
            uint32_t count = rows(step, s, me);
            CHECK(e->came[slot][s] == count && e->came[slot][RANKS + s * HELD] == count);
            uint8_t *sums = out + OUT_SUMS + s * MOE_GPU_LINE + all * SUM;
            put(sums, MOE_GPU_LINE, mixed(step, me, s, 1000));
            for (uint32_t n = 0; n < count; n++, all++) {
                uint32_t place = n < private_rows ? s * private_rows + n : late++;
                check(in + place * ROW, ROW, mixed(step, s, me, n + 2));
                put(sums + MOE_GPU_LINE + n * SUM, SUM, mixed(step, me, s, 2000 + n));
            }
        }
        atomic_store_explicit(&e->mail.summed[slot], epoch, memory_order_release);
        await(&e->mail.sums_here[slot], epoch);
        pthread_mutex_lock(&net.lock);
        CHECK(!e->pending[slot]); /* what they read may be written anew */
        pthread_mutex_unlock(&net.lock);
        at = 0;
        for (uint32_t d = 0; d < RANKS; d++) {
            const uint8_t *sums = in + IN_SUMS + d * MOE_GPU_LINE + at * SUM;
            check(sums, MOE_GPU_LINE, mixed(step, d, me, 1000));
            for (uint32_t n = 0; n < rows(step, me, d); n++, at++)
                check(sums + MOE_GPU_LINE + n * SUM, SUM, mixed(step, d, me, 2000 + n));
        }
    }
    return NULL;
}

static void open_all(void) {
    uint64_t control[RANKS], data[RANKS], lifelines[RANKS] = {0};
    uint32_t imms[RANKS][DEPTH][MOE_GPU_KINDS];
    for (uint32_t r = 0; r < RANKS; r++) {
        control[r] = 2 * r + 1;
        data[r] = 2 * r + 2;
        for (uint32_t i = 0; i < DEPTH * MOE_GPU_KINDS; i++) /* two ranks chose alike, the others did not */
            imms[r][i / MOE_GPU_KINDS][i % MOE_GPU_KINDS] = (r < 2 ? 0 : 10 * r) + i;
    }
    memset(ranks, 0, sizeof ranks);
    net.transfers = 0;
    for (uint32_t r = 0; r < RANKS; r++) {
        struct fab_engine *e = &ranks[r];
        e->rank = r;
        moe_gpu_shape shape = {
            .api = (uintptr_t)&table,
            .engine = (uintptr_t)e,
            .control_local = CONTROL,
            .data_local = DATA,
            .control_in = (uintptr_t)e->control_in,
            .control_out = (uintptr_t)e->control_out,
            .mail = (uintptr_t)&e->mail,
            .said = (uintptr_t)&e->said,
            .counted = (uintptr_t)e->counted,
            .arrived = (uintptr_t)e->came,
            .counted_stride = COUNTED,
            .counts_stride = STRIDE,
            .in_stride = IN_STRIDE,
            .in_sums = IN_SUMS,
            .out_stride = OUT_STRIDE,
            .out_sums = OUT_SUMS,
            .row_bytes = ROW,
            .sum_bytes = SUM,
            .alive = (1 << RANKS) - 1,
            .shared = MOST - RANKS * private_rows,
            .sent = SENT,
            .ranks = RANKS,
            .rank = r,
            .depth = DEPTH,
            .max_tokens = TOKENS,
            .topk = 1,
            .held = HELD,
            .private_rows = private_rows,
        };
        e->gpu = moe_gpu_new(&shape, control, data, &imms[0][0][0], &imms[r][0][0], lifelines);
        CHECK(e->gpu);
    }
}

int main(int argc, char **argv) {
    seed = argc > 1 ? (uint32_t)atoi(argv[1]) : 1;
    for (private_rows = 0; private_rows <= TOKENS; private_rows += 3) {
        pthread_t threads[RANKS];
        open_all();
        for (uint32_t r = 0; r < RANKS; r++) CHECK(!pthread_create(&threads[r], NULL, kernels, &ranks[r]));
        for (uint32_t r = 0; r < RANKS; r++) pthread_join(threads[r], NULL);
        moe_gpu_note(ranks[0].gpu, 1); /* one leaves; another one, which waits for it, hears of it */
        atomic_store_explicit(&ranks[1].mail.counted[0], STEPS / DEPTH + 1, memory_order_release);
        while (!atomic_load(&ranks[1].mail.gone)) sched_yield();
        CHECK(atomic_load(&ranks[1].mail.gone) == 1 && !atomic_load(&ranks[1].mail.noted));
        moe_gpu_note(ranks[2].gpu, 1); /* a third gives up because of it: so does whoever hears that */
        while (!atomic_load(&ranks[1].mail.noted)) sched_yield();
        uint64_t culprits = 0;
        CHECK(atomic_load(&ranks[1].mail.noted) == 1 && !moe_gpu_error(ranks[1].gpu, &culprits));
        CHECK(!moe_gpu_finish(ranks[0].gpu, UINT64_C(10000000000)));
        for (uint32_t r = 0; r < RANKS; r++) moe_gpu_free(ranks[r].gpu);
        CHECK(net.held == 0);
    }
    return 0;
}
