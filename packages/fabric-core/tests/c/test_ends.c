/* When things end: deadlines neither early nor more than two ticks late, whatever the clock does (R3); and a flag says
 * that an operation ended only when it has (C1, C10). */
#include "engine_internal.h"

#include "litmus.h"
#include "sides.h"

#include <signal.h>
#include <sys/mman.h>

/* ---- deadlines, under a clock that only this test moves -------------------------------------------------------- */

enum { EXPECTS = 600 };
static uint64_t now_ns;

typedef struct waiting {
    int64_t handle;
    uint64_t deadline;
    bool over;
} waiting;

static fab_engine *open_with_clock(loop_nic *nic) {
    fab_engine_cfg cfg = {.imm_slots = 4,
                          .max_inflight = 64,
                          .max_peers = 4,
                          .timeout_ns = 60000 * MS,
                          .inline_bytes = 4096,
                          .shard_bytes = 4096,
                          .clock = &now_ns};
    fab_engine *e = fab_engine_new(&cfg);
    CHECK(e);
    uint64_t ops = (uint64_t)(uintptr_t)&loop_ops, ctx = (uint64_t)(uintptr_t)nic, cpus[16] = {0};
    CHECK(fab_group_open(e, 1, &ops, &ctx, cpus, 0) == 0);
    return e;
}

/* Time goes on by steps of `least` .. `most`. */
static void deadlines_are_kept(uint32_t seed, uint64_t least, uint64_t most) {
    static waiting all[EXPECTS];
    uint32_t rng = seed * 2654435761u | 1u, left = EXPECTS, begun = 0;
    now_ns = 1000 * MS + xorshift(&rng); /* anywhere in a tick */
    loop_nic *nic = loop_new(0, 0);
    fab_engine *e = open_with_clock(nic);
    uint32_t imm = (uint32_t)fab_imm_alloc(e);
    uint64_t before = now_ns;
    while (left) {
        for (uint32_t n = xorshift(&rng) % 8; n && begun < EXPECTS; n--, begun++) { /* up to four turns of the wheel */
            uint64_t timeout = 1 + (uint64_t)xorshift(&rng) % (begun % 2 ? 4100 * MS : 40 * MS);
            all[begun] = (waiting){.handle = fab_expect(e, imm, 1, timeout, NULL, 0), .deadline = now_ns + timeout};
            CHECK(all[begun].handle > 0);
        }
        before = now_ns;
        now_ns += least + (uint64_t)xorshift(&rng) % (most - least + 1);
        fab_progress(e);
        for (uint32_t i = 0; i < begun; i++) {
            if (all[i].over) continue;
            fab_outcome out;
            CHECK(fab_expect_outcome(e, (uint64_t)all[i].handle, &out) == 0);
            if (out.phase == FAB_PENDING) {
                CHECK(now_ns < all[i].deadline + 2 * FAB_TICK_NS, "%lu ns late (a clock of %lu ns)",
                      (unsigned long)(now_ns - all[i].deadline), (unsigned long)most);
                continue;
            }
            CHECK(out.phase == FAB_FAILED && out.err == -ETIME);
            CHECK(now_ns >= all[i].deadline, "%lu ns early", (unsigned long)(all[i].deadline - now_ns));
            CHECK(before < all[i].deadline + 2 * FAB_TICK_NS);
            CHECK(fab_expect_release(e, (uint64_t)all[i].handle) == 0);
            all[i].over = true;
            left--;
        }
    }
    fab_progress(e);
    CHECK(atomic_load(&e->groups[0]->ntimers) == 0, "timers are left");
    CHECK(fab_imm_free(e, imm) == 0);
    CHECK(fab_engine_close(e, 0) == 0);
    fab_engine_free(e);
    free(nic);
}

/* What ends in time is taken off the wheel: nothing fires for it, nothing piles up */
static void ended_leave_the_wheel(void) {
    loop_nic *nic = loop_new(0, 0);
    fab_engine *e = open_with_clock(nic);
    uint32_t imm = (uint32_t)fab_imm_alloc(e);
    for (uint32_t i = 0; i < 5000; i++) {
        int64_t x = fab_expect(e, imm, 1, 5000 * MS, NULL, 0);
        CHECK(x > 0 && atomic_load(&e->groups[0]->ntimers) <= 1);
        if (i % 2) fab_imm_arrive(e, imm, 1);
        else CHECK(fab_expect_cancel(e, (uint64_t)x) == 0);
        fab_outcome out;
        CHECK(fab_expect_outcome(e, (uint64_t)x, &out) == 0 && out.phase == (i % 2 ? FAB_DONE : FAB_CANCELLED));
        now_ns += 3 * MS;
        fab_progress(e);
        CHECK(fab_expect_release(e, (uint64_t)x) == 0);
    }
    CHECK(atomic_load(&e->groups[0]->ntimers) == 0);
    CHECK(fab_engine_close(e, 0) == 0);
    fab_engine_free(e);
    free(nic);
}

/* ---- a flag is bumped last: who sees it finds the operation ended and its bytes at the target ---------------------- */

#define WRITES ((uint32_t)LITMUS_ROUNDS(5000))

static void flags_come_last(void) {
    enum { LEN = 8192 }; /* longer than what a submitter posts itself: the worker does it on another core */
    side a = make_side(1, 0, 0, LEN, 1, 1000 * MS), b = make_side(1, 0, 0, LEN, 0, 0);
    join(&a, &b);
    static _Atomic uint64_t flag;
    uint64_t seen = 0;
    int64_t first = fab_submit_write(a.engine, a.local, 0, b.remote, 0, 1, -1, -1, 0, 0); /* first contact */
    run_until(&a, NULL, (uint64_t)first);
    for (uint32_t i = 0; i < WRITES; i++) {
        a.mem[0] = a.mem[LEN - 1] = (uint8_t)(i + 1);
        int64_t h = fab_submit_write(a.engine, a.local, 0, b.remote, 0, LEN, -1, -1, 0, (uint64_t)(uintptr_t)&flag);
        CHECK(h > 0, "%ld", (long)h);
        uint64_t until = fab_now() + LITMUS_DEADLINE_NS;
        for (uint32_t turn = 0; atomic_load_explicit(&flag, memory_order_acquire) == seen; turn++)
            if (turn > 20000) {
                CHECK(fab_now() < until, "write %u never ends", i);
                sched_yield();
            }
        seen++;
        fab_outcome out;
        CHECK(fab_transfer_outcome(a.engine, (uint64_t)h, &out) == 0 && out.phase == FAB_DONE,
              "write %u: the flag is there before the end", i);
        CHECK(b.mem[0] == (uint8_t)(i + 1) && b.mem[LEN - 1] == (uint8_t)(i + 1), "write %u: its bytes are not", i);
        CHECK(fab_transfer_release(a.engine, (uint64_t)h) == 0);
    }
    drop_side(&a);
    drop_side(&b);
}

#ifndef __SANITIZE_THREAD__ /* whose runtime does the store, and may hold a lock of its own then */
/* The same without luck: the flag lies in a page that cannot be written, so the store itself stops and lets us look. */
static side *stopped;
static int64_t stopped_at;
static void *page;
static volatile sig_atomic_t stops, phase_then;

static void look_and_go_on(int sig) {
    (void)sig;
    fab_outcome out = {0};
    fab_transfer_outcome(stopped->engine, (uint64_t)stopped_at, &out);
    phase_then = (sig_atomic_t)out.phase;
    if (stops++ > 8 || mprotect(page, 4096, PROT_READ | PROT_WRITE)) _exit(1); /* not our page */
}

static void the_flag_is_stored_after_the_end(void) {
    side a = make_side(1, 0, 0, 64, 0, 0), b = make_side(1, 0, 0, 64, 0, 0);
    join(&a, &b);
    page = mmap(NULL, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(page != MAP_FAILED);
    struct sigaction old, act = {.sa_handler = look_and_go_on};
    for (int well = 0; well <= 1; well++) {
        a.nic[0]->hold = true;
        stopped = &a;
        stopped_at = fab_submit_write(a.engine, a.local, 0, b.remote, 0, 8, -1, -1, 0, (uint64_t)(uintptr_t)page);
        CHECK(stopped_at > 0 && mprotect(page, 4096, PROT_READ) == 0);
        stops = 0;
        CHECK(sigaction(SIGSEGV, &act, &old) == 0);
        if (well) a.nic[0]->hold = false;
        else fab_transfer_cancel(a.engine, (uint64_t)stopped_at);
        run_until(&a, NULL, (uint64_t)stopped_at);
        CHECK(sigaction(SIGSEGV, &old, NULL) == 0);
        CHECK(stops == 1 && phase_then == (well ? FAB_DONE : FAB_CANCELLED), "stored %d times, phase %d", (int)stops,
              (int)phase_then);
        CHECK(fab_transfer_release(a.engine, (uint64_t)stopped_at) == 0);
    }
    uint64_t word = *(uint64_t *)page;
    CHECK(word == (UINT64_C(1) << 32) + 2, "one ended well, one badly: %lx", (unsigned long)word);
    munmap(page, 4096);
    drop_side(&a);
    drop_side(&b);
}
#endif

/* ---- C1: of several failures of one transfer the first is told, with its NIC ---------------------------------------- */

/* The oldest request that this NIC holds ends now. */
static void end_one(loop_nic *nic, int32_t status) {
    CHECK(nic->nqueue == 1);
    nic->out[nic->nout++] = (fab_wc){
        .kind = FAB_WC_OP, .id = nic->queue[0].wr.id, .status = status, .count = 1, .peer = nic->queue[0].peer};
    nic->nqueue = 0;
}

static void the_first_reason_stays(void) {
    side a = make_side(2, 0, 0, 4096, 0, 0), b = make_side(2, 0, 0, 4096, 0, 0);
    join(&a, &b);
    for (uint32_t i = 0; i < 2; i++) a.nic[i]->hold = a.nic[i]->stubborn = true;
    for (uint32_t first = 0; first < 2; first++) {
        int64_t h = fab_submit_write(a.engine, a.local, 0, b.remote, 0, 4096, -1, -1, 0, 0); /* a piece for each NIC */
        for (int i = 0; i < 4; i++) fab_progress(a.engine);
        end_one(a.nic[first], -EIO);
        fab_progress(a.engine);
        CHECK(fab_transfer_poll(a.engine, (uint64_t)h) == FAB_PENDING, "C7: the other NIC holds its piece");
        end_one(a.nic[1 - first], -EREMOTEIO);
        fab_progress(a.engine);
        fab_outcome out;
        CHECK(fab_transfer_outcome(a.engine, (uint64_t)h, &out) == 0 && out.phase == FAB_FAILED);
        CHECK(out.err == -EIO && out.nic == (int32_t)first && out.peer == a.peer, "%d of NIC %d", out.err, out.nic);
        CHECK(fab_transfer_release(a.engine, (uint64_t)h) == 0);
    }
    drop_side(&a);
    drop_side(&b);
}

int main(void) {
    the_first_reason_stays();
#ifndef __SANITIZE_THREAD__
    the_flag_is_stored_after_the_end();
#endif
    deadlines_are_kept(1, 1, MS);
    deadlines_are_kept(2, MS, 10 * MS);
    deadlines_are_kept(3, MS / 2, 3000 * MS); /* a clock that jumps over whole turns */
    ended_leave_the_wheel();
    flags_come_last();
    return 0;
}
