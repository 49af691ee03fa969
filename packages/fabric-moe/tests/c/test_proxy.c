/* The proxy against a small engine: every rank a thread, random counts, turns, a full engine, and either the rank's own thread or
 * the proxy's sends the second phase. Each row is looked for where an arithmetic of this file's own says that it lies.
 * usage: test_proxy [seed] */
#include "small_engine.h"

#include "cdef_moe.h"

enum { RANKS = 5, DEPTH = 2, STEPS = 60, MOST = 9, EARLY = 3, SHARED = 4, ROW = 16, HEAD = 64, COUNTS = HEAD + 64 };
enum { IN_ROWS = COUNTS * RANKS, PLACES = RANKS * EARLY + SHARED, IN_CREDITS = IN_ROWS + PLACES * ROW };
enum { IN_STRIDE = IN_CREDITS + HEAD * RANKS, OUT_STRIDE = COUNTS + RANKS * MOST * ROW + HEAD };

static uint32_t seed = 1;
static pthread_barrier_t together;

static uint32_t mix(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    uint32_t x = seed * 2654435761u ^ a * 97u ^ b * 193u ^ c * 389u ^ d * 769u;
    x ^= x >> 15, x *= 2246822519u, x ^= x >> 13, x *= 3266489917u;
    return x ^ x >> 16;
}

static uint32_t rows(uint32_t step, uint32_t s, uint32_t d) { return mix(step, s, d, 0) % (MOST + 1); }

static uint32_t window(uint32_t step, uint32_t s) { return mix(step, s, 0, 1) % (EARLY + 1); }

static uint32_t imm_of(uint32_t rank, uint32_t slot, uint32_t kind) {
    return (net.apart ? rank * 100 : 0) + slot * MOE_KINDS + kind;
}

static moe_rank *opened(uint32_t me) {
    struct fab_engine *e = &engines[me];
    e->in_len = DEPTH * IN_STRIDE;
    e->out_len = DEPTH * OUT_STRIDE;
    e->in = calloc(1, e->in_len);
    e->out = calloc(1, e->out_len);
    uint64_t remotes[RANKS];
    uint8_t alive[RANKS];
    uint32_t theirs[RANKS * DEPTH * MOE_KINDS], credits[DEPTH], *to = theirs;
    for (uint32_t r = 0; r < RANKS; r++) {
        remotes[r] = r;
        alive[r] = 1;
        for (uint32_t slot = 0; slot < DEPTH; slot++)
            for (uint32_t kind = 0; kind < MOE_KINDS; kind++) *to++ = imm_of(r, slot, kind);
    }
    for (uint32_t slot = 0; slot < DEPTH; slot++) credits[slot] = imm_of(me, slot, MOE_CREDIT);
    moe_shape shape = {.api = (uint64_t)(uintptr_t)&small_table,
                       .engine = (uint64_t)(uintptr_t)e,
                       .inbound = (uint64_t)(uintptr_t)e->in,
                       .outbound = (uint64_t)(uintptr_t)e->out,
                       .local = 77,
                       .in_stride = IN_STRIDE,
                       .in_rows = IN_ROWS,
                       .in_credits = IN_CREDITS,
                       .counts_stride = COUNTS,
                       .out_stride = OUT_STRIDE,
                       .out_rows = COUNTS,
                       .row_bytes = ROW,
                       .shared = SHARED,
                       .stage_rows = RANKS * MOST,
                       .transfer_ns = 1,
                       .patience_ns = 20000000000ull,
                       .ranks = RANKS,
                       .rank = me,
                       .generation = 7,
                       .depth = DEPTH,
                       .private_max = EARLY,
                       .max_tokens = MOST};
    moe_rank *made = moe_rank_new(&shape, remotes, alive, theirs, credits);
    CHECK(made);
    return made;
}

static void closed(moe_rank *r, uint32_t me) {
    moe_rank_stop(r);
    small_free_imms(&engines[me]);
    moe_rank_free(r);
    free(engines[me].in);
    free(engines[me].out);
    engines[me] = (struct fab_engine){0};
}

/* ---- what arrives, by this file's own arithmetic -------------------------------------------------------------- */

static uint32_t late(uint32_t step, uint32_t s, uint32_t d) {
    uint32_t n = rows(step, s, d), early = window(step, s);
    return n > early ? n - early : 0;
}

static void row_is(const uint8_t *at, uint32_t step, uint32_t s, uint32_t d, uint32_t number) {
    uint32_t found[4], wanted[4] = {step, s, d, number};
    memcpy(found, at, sizeof found);
    CHECK(!memcmp(found, wanted, sizeof found));
}

/* Rows of the shared memory in turn `turn`: checks them, if `in`, and returns how many writes carry them. */
static uint32_t turn_of(const uint8_t *in, uint32_t step, uint32_t d, uint32_t turn) {
    uint32_t line = 0, writes = 0;
    for (uint32_t s = 0; s < RANKS; s++) {
        uint32_t n = late(step, s, d), here = 0;
        for (uint32_t i = 0; i < n; i++, line++) {
            if (line / SHARED != turn) continue;
            if (in) row_is(in + (RANKS * EARLY + line % SHARED) * ROW, step, s, d, window(step, s) + i);
            here = 1;
        }
        writes += here;
    }
    return writes;
}

static void give_credit(uint32_t me, uint32_t slot, uint32_t step, uint32_t turn) {
    uint32_t line = 0;
    for (uint32_t s = 0; s < RANKS; s++) {
        uint32_t first = line, n = late(step, s, me);
        line += n;
        if (!n || first / SHARED > turn || (line - 1) / SHARED < turn) continue;
        uint32_t head[HEAD / 4] = {0x464D4F45u, 7, step, 0, me, 0, turn, 0};
        pthread_mutex_lock(&net.lock);
        memcpy(engines[s].in + slot * IN_STRIDE + IN_CREDITS + me * HEAD, head, sizeof head);
        engines[s].arrived[imm_of(s, slot, MOE_CREDIT)]++;
        serve_all();
        pthread_mutex_unlock(&net.lock);
    }
}

static void one_step(moe_rank *r, uint32_t me, uint32_t step) {
    uint32_t slot = step % DEPTH, writes = 0;
    struct fab_engine *e = &engines[me];
    moe_trouble trouble;
    int64_t starts[RANKS + 1] = {0};
    for (uint32_t d = 0; d < RANKS; d++) starts[d + 1] = starts[d] + rows(step, me, d);
    moe_begin(r, slot, step, window(step, me), starts);
    int64_t counts = small_expect(e, imm_of(me, slot, MOE_COUNTS), RANKS, 0, NULL, 0);
    CHECK(!moe_arm(r, slot, (uint64_t)counts));
    CHECK(!moe_send_counts(r, slot, &trouble));
    for (uint32_t d = 0; d < RANKS; d++)
        for (int64_t i = starts[d]; i < starts[d + 1]; i++) {
            uint32_t row[4] = {step, me, d, (uint32_t)(i - starts[d])};
            memcpy(e->out + slot * OUT_STRIDE + COUNTS + i * ROW, row, sizeof row);
        }
    CHECK(!moe_send_rows(r, slot, &trouble));
    bool ours = mix(step, me, 0, 2) & 1; /* else the proxy's thread does it, or nobody */
    if (ours) moe_attend(r, slot);
    small_wait((uint64_t)counts);
    if (ours) CHECK(!moe_rest(r, slot, &trouble));
    int64_t matrix[RANKS * RANKS], early[RANKS];
    CHECK(!moe_read(r, slot, matrix, early, &trouble));
    uint32_t sum = 0;
    const uint8_t *in = e->in + slot * IN_STRIDE + IN_ROWS;
    for (uint32_t s = 0; s < RANKS; s++) {
        CHECK(early[s] == window(step, s));
        for (uint32_t d = 0; d < RANKS; d++) CHECK(matrix[s * RANKS + d] == rows(step, s, d));
        writes += rows(step, s, me) && window(step, s);
        sum += late(step, s, me);
    }
    for (uint32_t turn = 0; turn == 0 || turn * SHARED < sum; turn++) {
        if (turn) give_credit(me, slot, step, turn);
        writes += turn_of(NULL, step, me, turn);
        small_wait((uint64_t)small_expect(e, imm_of(me, slot, MOE_ROWS), writes, 0, NULL, 0));
        for (uint32_t s = 0; turn == 0 && s < RANKS; s++)
            for (uint32_t i = 0; i < rows(step, s, me) && i < window(step, s); i++)
                row_is(in + (s * EARLY + i) * ROW, step, s, me, i);
        turn_of(in, step, me, turn);
        writes = 0;
    }
    CHECK(!moe_look(r, slot, &trouble));
    pthread_barrier_wait(&together); /* as combine does: nobody begins the slot anew before all have had it */
    CHECK(!moe_take(r, slot, NULL, 0));
}

static void *rank_main(void *arg) {
    uint32_t me = (uint32_t)(uintptr_t)arg;
    moe_rank *r = opened(me);
    pthread_barrier_wait(&together);
    for (uint32_t step = 1; step <= STEPS; step++) one_step(r, me, step);
    pthread_barrier_wait(&together);
    closed(r, me);
    return NULL;
}

static void steps_of_all(bool other_numbers, uint64_t full_every) {
    pthread_t threads[RANKS];
    net.apart = other_numbers;
    net.full_every = full_every;
    net.nwaiters = 0;
    pthread_barrier_init(&together, NULL, RANKS);
    for (uintptr_t i = 0; i < RANKS; i++) CHECK(!pthread_create(&threads[i], NULL, rank_main, (void *)i));
    for (uint32_t i = 0; i < RANKS; i++) pthread_join(threads[i], NULL);
    pthread_barrier_destroy(&together);
    CHECK(net.held == 0);
}

/* ---- what is refused --------------------------------------------------------------------------------------------- */

static void wrong_things(void) {
    net.apart = false;
    moe_trouble t = {0};
    moe_rank *r[RANKS];
    net.full_every = net.nwaiters = 0;
    int64_t starts[RANKS + 1];
    for (uint32_t d = 0; d <= RANKS; d++) starts[d] = 4 * d; /* 4 rows for each, 1 early */
    for (uint32_t i = 0; i < RANKS; i++) r[i] = opened(i);
    CHECK(moe_rest(r[0], 0, &t) == MOE_NOT_YET); /* no step has begun */
    for (uint32_t i = 0; i < RANKS; i++) {
        moe_begin(r[i], 0, i == 3 ? 6 : 5, 1, starts); /* rank 3 is a step ahead */
        CHECK(!moe_send_counts(r[i], 0, &t));
    }
    CHECK(moe_rest(r[0], 0, &t) == MOE_NOT_YET); /* nothing was packed */
    CHECK(!moe_send_rows(r[0], 0, &t));
    CHECK(moe_rest(r[0], 0, &t) == MOE_OTHER_STEP && t.rank == 3 && t.generation == 7 && t.step == 6);
    CHECK(moe_rest(r[0], 0, &t) == MOE_OTHER_STEP && t.rank == 3); /* again the same, and nothing is sent */
    moe_begin(r[3], 0, 5, 1, starts);
    CHECK(!moe_send_counts(r[3], 0, &t));
    uint32_t *said = (uint32_t *)(void *)(engines[1].in + 2 * COUNTS + HEAD); /* what rank 2 told rank 1 */
    said[4] = MOST + 1;
    CHECK(!moe_send_rows(r[1], 0, &t));
    CHECK(moe_rest(r[1], 0, &t) == MOE_BAD_COUNTS && t.rank == 2 && t.most == MOST + 1);
    said = (uint32_t *)(void *)(engines[2].in + 2 * COUNTS + HEAD); /* its own counts: valid, and not its own */
    said[1]++;
    CHECK(!moe_send_rows(r[2], 0, &t));
    CHECK(moe_rest(r[2], 0, &t) == MOE_BAD_COUNTS && t.rank == 2);
    moe_begin(r[0], 0, 5, 1, starts); /* whose rows are due at once */
    CHECK(!moe_send_counts(r[0], 0, &t) && !moe_send_rows(r[0], 0, &t));
    engines[0].refuse_in = 1;
    engines[0].refusal = -EIO;
    uint64_t before = net.submits;
    CHECK(moe_rest(r[0], 0, &t) == MOE_REFUSED && t.rc == -EIO);
    CHECK(moe_rest(r[0], 0, &t) == MOE_REFUSED && net.submits == before + 1); /* not once more */
    CHECK(moe_look(r[0], 0, &t) == MOE_REFUSED);
    CHECK(!moe_send_rows(r[4], 0, &t) && !moe_rest(r[4], 0, &t)); /* waits for credit when it is closed */
    moe_rank_stop(r[3]);
    CHECK(moe_send_rows(r[3], 0, &t) == MOE_REFUSED && t.rc == -ESHUTDOWN);
    for (uint32_t i = 0; i < RANKS; i++) closed(r[i], i);
    CHECK(net.held == 0);
    fab_native_table old = small_table;
    old.struct_size -= (uint32_t)sizeof(void *);
    moe_shape shape = {.api = (uint64_t)(uintptr_t)&old, .ranks = 1, .depth = 1};
    CHECK(!moe_rank_new(&shape, NULL, NULL, NULL, NULL));
}

int main(int argc, char **argv) {
    if (argc > 1) seed = (uint32_t)strtoul(argv[1], NULL, 10);
    steps_of_all(false, 0);
    steps_of_all(true, 0);
    steps_of_all(false, 3);
    steps_of_all(true, 7);
    wrong_things();
    puts("ok");
    return 0;
}
