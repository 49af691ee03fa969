/* The fault decorator keeps the promises of domain.h while it breaks everything else: one end per request (C1), none while
 * the inner domain may touch its memory (C7), one UP or DOWN per peer; and the engine above it survives (R8). */
#include "fault/fault_int.h"

#include "fabric/engine.h"
#include "loop_domain.h"

#include <poll.h>
#include <stdio.h>

#define MS 1000000ull
#define BYTES 8u
#define REQUESTS 4000u
#define OPS 64u /* engine ids in use at once */

enum { UP_NONE, UP_OPENING, UP_UP, UP_DOWN };

typedef struct driver { /* plays the engine: knows what it may be told */
    loop_nic *nic, *target;
    fab_fault *f;
    const fab_domain_ops *ops;
    uint64_t now;
    uint32_t seed;
    uint32_t peer, link; /* the open number, and what we heard of it */
    uint32_t on_link; /* requests posted to it and not yet ended */
    uint32_t open[OPS]; /* requests of an id not yet ended */
    uint8_t cancelled[OPS];
    uint32_t taken, ended, good, bad, downs, ups, nic_downs, nic_ups, imms;
    bool nic_down;
    uint8_t *source, *memory;
} driver;

static driver start(const fab_fault_plan *plan, uint32_t seed) {
    driver d = {
        .nic = loop_new(seed, 0), .target = loop_new(seed + 1, 0), .seed = seed * 2654435761u + 1, .now = 5 * MS};
    d.ops = fab_fault_ops();
    d.f = fab_fault_wrap(&loop_ops, d.nic, plan);
    CHECK(d.f);
    fab_fault_hold(d.f);
    d.source = calloc(REQUESTS, BYTES);
    d.memory = calloc(REQUESTS, BYTES);
    for (uint32_t i = 0; i < REQUESTS * BYTES; i++) d.source[i] = (uint8_t)(i * 7 + 1);
    return d;
}

static void finish(driver *d) {
    d->ops->close(d->f);
    CHECK(d->nic->closed == 1);
    fab_fault_release(d->f);
    free(d->nic);
    free(d->target);
    free(d->source);
    free(d->memory);
}

static void open_link(driver *d) {
    char addr[32];
    int n = snprintf(addr, sizeof addr, "%p", (void *)d->target);
    int rc = d->ops->peer_open(d->f, addr, (size_t)n, &d->peer);
    CHECK(rc == 0 || rc == -ENETDOWN, "%d", rc);
    d->link = rc ? UP_NONE : UP_OPENING;
    d->on_link = 0;
}

static void close_link(driver *d) {
    if (d->link == UP_NONE) return;
    CHECK(d->ops->peer_close(d->f, d->peer) == 0);
    d->link = UP_NONE;
}

static void poll_once(driver *d) {
    fab_wc wc[48];
    d->now += xorshift(&d->seed) % 200000u;
    int n = d->ops->poll(d->f, wc, 1 + xorshift(&d->seed) % 48, d->now);
    CHECK(n >= 0);
    for (int i = 0; i < n; i++) switch (wc[i].kind) {
        case FAB_WC_OP:
            CHECK(wc[i].id < OPS && wc[i].count == 1 && d->open[wc[i].id], "an end for nothing");
            d->open[wc[i].id]--;
            if (d->link != UP_NONE && wc[i].peer == d->peer) {
                CHECK(d->on_link, "an earlier link's request under the number of this one");
                d->on_link--;
            }
            d->ended++;
            if (wc[i].status) d->bad++;
            else d->good++;
            if (wc[i].status == -ECANCELED) CHECK(d->cancelled[wc[i].id] || d->link != UP_UP, "nobody cancelled it");
            break;
        case FAB_WC_PEER_UP:
            CHECK(d->link == UP_OPENING && wc[i].peer == d->peer, "UP of link %u in state %u", wc[i].peer, d->link);
            d->link = UP_UP;
            d->ups++;
            break;
        case FAB_WC_PEER_DOWN:
            CHECK((d->link == UP_OPENING || d->link == UP_UP) && wc[i].peer == d->peer && wc[i].status < 0);
            d->link = UP_DOWN;
            d->downs++;
            break;
        case FAB_WC_NIC_DOWN:
            CHECK(!d->nic_down);
            d->nic_down = true;
            d->nic_downs++;
            close_link(d); /* as the engine does */
            break;
        case FAB_WC_NIC_UP:
            CHECK(d->nic_down);
            d->nic_down = false;
            d->nic_ups++;
            break;
        default: CHECK(false, "kind %u", wc[i].kind);
        }
}

static void cancel(driver *d, uint32_t id) {
    d->cancelled[id] = 1;
    CHECK(d->ops->cancel(d->f, id) == 0);
}

/* Posts until all is taken, through whatever happens; then everything must end. Returns the counts. */
static fab_fault_counts drive(driver *d) {
    uint32_t next = 0;
    open_link(d);
    for (uint32_t turns = 0; next < REQUESTS; turns++) {
        CHECK(turns < 2000000u, "hangs at %u of %u", next, REQUESTS);
        poll_once(d);
        if (d->nic_down) continue;
        if (d->link == UP_DOWN) close_link(d);
        if (d->link == UP_NONE) open_link(d);
        if (d->link == UP_UP) {
            fab_wr wr[16];
            uint32_t n = 1 + xorshift(&d->seed) % 16;
            if (n > REQUESTS - next) n = REQUESTS - next;
            for (uint32_t i = 0; i < n; i++) {
                uint64_t at = (uint64_t)(next + i) * BYTES;
                wr[i] = (fab_wr){.id = (next + i) % OPS,
                                 .len = BYTES,
                                 .kind = FAB_WR_WRITE,
                                 .remote_key = 9,
                                 .local_addr = (uint64_t)(uintptr_t)(d->source + at),
                                 .remote_addr = (uint64_t)(uintptr_t)(d->memory + at)};
            }
            int taken = d->ops->post(d->f, d->peer, wr, n);
            CHECK(taken >= 0 || d->link != UP_UP || taken == -ETIMEDOUT || taken == -ENETDOWN, "%d", taken);
            CHECK(taken <= (int)n);
            for (int i = 0; i < taken; i++) d->open[wr[i].id]++;
            if (taken > 0) next += (uint32_t)taken, d->taken += (uint32_t)taken, d->on_link += (uint32_t)taken;
        }
        if (xorshift(&d->seed) % 64 == 0)
            cancel(d, xorshift(&d->seed) % OPS); /* requests may hang until somebody does */
    }
    for (uint32_t id = 0; id < OPS; id++) cancel(d, id);
    for (uint32_t turns = 0; d->ended < d->taken; turns++) {
        CHECK(turns < 100000u, "%u of %u never end", d->taken - d->ended, d->taken);
        poll_once(d);
    }
    fab_fault_counts counts;
    fab_fault_counts_get(d->f, &counts);
    CHECK(counts.taken == d->taken && counts.ended == d->ended && counts.open == 0);
    /* nothing is behind: what did not end well may have landed, what ended well has */
    uint32_t landed = 0;
    for (uint32_t i = 0; i < REQUESTS; i++) landed += !memcmp(d->memory + i * BYTES, d->source + i * BYTES, BYTES);
    CHECK(landed >= d->good, "%u ended well, %u landed", d->good, landed);
    memset(d->memory, 0, REQUESTS * BYTES); /* C7: nothing lands after an end */
    for (int i = 0; i < 200; i++) poll_once(d);
    for (uint32_t i = 0; i < REQUESTS * BYTES; i++) CHECK(!d->memory[i], "byte %u was written after its end", i);
    return counts;
}

/* ---- each fault by itself ------------------------------------------------------------------------ */

static void without_faults_nothing_changes(void) {
    fab_fault_plan plan = {.seed = 1};
    driver d = start(&plan, 1);
    fab_fault_counts c = drive(&d);
    CHECK(d.good + d.bad == REQUESTS && c.dropped + c.failed + c.failed_late + c.refused + c.cuts + c.kills == 0);
    finish(&d);
}

static void each_fault_happens_and_each_request_ends_once(void) {
    static const fab_fault_plan plans[] = {
        {.reorder = 1, .delay_ns = 2 * MS},
        {.drop_ppm = 50000},
        {.fail_ppm = 50000, .fail_status = -EIO},
        {.fail_late_ppm = 50000, .fail_status = -EIO},
        {.refuse_ppm = 100000, .refuse_ns = MS},
        {.partial_ppm = 500000, .rnr_ppm = 100000},
        {.cut_ppm = 20000, .cut_ns = MS},
        {.kill_ops = 1000, .revive_ns = 5 * MS},
        {.kill_ns = 20 * MS, .revive_ns = 5 * MS},
        {.reorder = 1,
         .delay_ns = MS,
         .drop_ppm = 10000,
         .fail_ppm = 10000,
         .fail_late_ppm = 10000,
         .fail_status = -EIO,
         .refuse_ppm = 10000,
         .refuse_ns = MS / 2,
         .partial_ppm = 300000,
         .cut_ppm = 5000,
         .cut_ns = MS,
         .kill_ops = 1500,
         .revive_ns = 3 * MS},
    };
    for (uint32_t p = 0; p < sizeof plans / sizeof *plans; p++) {
        uint64_t happened = 0;
        for (uint32_t seed = 1; seed <= 8; seed++) {
            fab_fault_plan plan = plans[p];
            plan.seed = seed;
            driver d = start(&plan, seed);
            fab_fault_counts c = drive(&d);
            happened += c.dropped + c.failed + c.failed_late + c.refused + c.partial + c.cuts + c.kills +
                        (plan.delay_ns && !plan.drop_ppm);
            if (plan.kill_ops || plan.kill_ns)
                CHECK(d.nic_downs == 1 && d.nic_ups == 1, "%u %u", d.nic_downs, d.nic_ups);
            if (plan.kill_ops && !plan.cut_ppm) CHECK(d.taken == REQUESTS);
            finish(&d);
        }
        CHECK(happened, "plan %u did nothing", p);
    }
}

/* The same seed and the same calls: the same counts. */
static void a_plan_replays(void) {
    fab_fault_plan plan = {.seed = 3,
                           .reorder = 1,
                           .delay_ns = MS,
                           .drop_ppm = 20000,
                           .fail_ppm = 20000,
                           .fail_status = -EIO,
                           .partial_ppm = 300000};
    fab_fault_counts first = {0};
    for (int turn = 0; turn < 2; turn++) {
        driver d = start(&plan, 3);
        fab_fault_counts c = drive(&d);
        if (turn) CHECK(!memcmp(&c, &first, sizeof c), "the second run differs");
        first = c;
        finish(&d);
    }
}

/* A dropped completion stays away, whatever time passes, until somebody cancels; the write itself has happened. */
static void a_dropped_completion_waits_for_the_cancel(void) {
    fab_fault_plan plan = {.seed = 1, .drop_ppm = 1000000};
    driver d = start(&plan, 0);
    open_link(&d);
    while (d.link != UP_UP) poll_once(&d);
    fab_wr wr = {.id = 1,
                 .len = BYTES,
                 .kind = FAB_WR_WRITE,
                 .remote_key = 9,
                 .local_addr = (uint64_t)(uintptr_t)d.source,
                 .remote_addr = (uint64_t)(uintptr_t)d.memory};
    CHECK(d.ops->post(d.f, d.peer, &wr, 1) == 1);
    d.open[1]++;
    d.on_link++;
    for (int i = 0; i < 1000; i++) poll_once(&d);
    CHECK(d.ended == 0 && !memcmp(d.memory, d.source, BYTES));
    cancel(&d, 1);
    poll_once(&d);
    poll_once(&d);
    CHECK(d.ended == 1 && d.bad == 1);
    CHECK(d.ops->post(d.f, d.peer, &wr, 1) == 1); /* and for peer_close too */
    d.open[1]++;
    d.on_link++;
    for (int i = 0; i < 100; i++) poll_once(&d);
    CHECK(d.ended == 1);
    close_link(&d);
    for (int i = 0; i < 10; i++) poll_once(&d);
    CHECK(d.ended == 2 && d.bad == 2);
    finish(&d);
}

/* A NIC that hangs with very much in its hands: all of it ends at once when the link is closed. */
static void a_great_many_dropped_completions_end_together(void) {
    fab_fault_plan plan = {.seed = 1, .drop_ppm = 1000000, .delay_ns = MS};
    driver d = start(&plan, 0);
    open_link(&d);
    while (d.link != UP_UP) poll_once(&d);
    fab_wr wr = {.id = 1,
                 .len = BYTES,
                 .kind = FAB_WR_WRITE,
                 .remote_key = 9,
                 .local_addr = (uint64_t)(uintptr_t)d.source,
                 .remote_addr = (uint64_t)(uintptr_t)d.memory};
    uint32_t posted = 0;
    for (uint32_t turns = 0; posted < 3 * FT_HELD; turns++) {
        CHECK(turns < 1000000, "hangs at %u", posted);
        uint32_t n = (uint32_t)d.ops->post(d.f, d.peer, &wr, 1);
        posted += n, d.open[1] += n, d.on_link += n;
        if (!n || posted % 8 == 0) poll_once(&d);
    }
    close_link(&d);
    for (uint32_t turns = 0; d.ended < posted; turns++) {
        CHECK(turns < 100000, "%u of %u", d.ended, posted);
        poll_once(&d);
    }
    CHECK(d.bad == posted);
    finish(&d);
}

/* C7: a killed NIC's request is not told as ended while the inner domain still holds it. */
static void a_killed_nic_is_quiet_before_its_requests_end(void) {
    for (uint32_t seed = 1; seed <= 20; seed++) {
        fab_fault_plan plan = {.seed = seed};
        driver d = start(&plan, 0);
        open_link(&d);
        while (d.link != UP_UP) poll_once(&d);
        d.nic->hold = d.nic->stubborn = true; /* the inner domain lets go only when the link is closed */
        fab_wr wr = {.id = 1,
                     .len = BYTES,
                     .kind = FAB_WR_WRITE,
                     .remote_key = 9,
                     .local_addr = (uint64_t)(uintptr_t)d.source,
                     .remote_addr = (uint64_t)(uintptr_t)d.memory};
        CHECK(d.ops->post(d.f, d.peer, &wr, 1) == 1);
        d.open[1]++;
        d.on_link++;
        fab_fault_kill(d.f);
        for (uint32_t i = 0; d.ended == 0; i++) {
            CHECK(i < 100000, "hangs");
            bool holds = d.nic->nqueue > 0;
            uint32_t before = d.ended;
            poll_once(&d);
            CHECK(d.ended == before || !holds || !d.nic->nqueue, "told while the NIC holds it");
        }
        CHECK(d.nic_downs == 1 && d.bad == 1);
        fab_fault_revive(d.f);
        for (int i = 0; i < 10; i++) poll_once(&d);
        CHECK(d.nic_ups == 1);
        finish(&d);
    }
}

static void a_cut_link_is_told_once_and_can_be_mended(void) {
    fab_fault_plan plan = {.seed = 5};
    driver d = start(&plan, 2);
    open_link(&d);
    while (d.link != UP_UP) poll_once(&d);
    CHECK(fab_fault_cut(d.f, "", 3600ull * 1000 * MS) == 0);
    poll_once(&d);
    poll_once(&d);
    CHECK(d.downs == 1 && d.link == UP_DOWN);
    for (int i = 0; i < 3; i++) { /* it stays cut for whoever opens it again */
        close_link(&d);
        open_link(&d);
        poll_once(&d);
        poll_once(&d);
        CHECK(d.link == UP_DOWN && d.downs == 2u + (uint32_t)i);
    }
    fab_fault_mend(d.f);
    poll_once(&d);
    close_link(&d);
    open_link(&d);
    for (int i = 0; i < 100 && d.link != UP_UP; i++) poll_once(&d);
    CHECK(d.link == UP_UP);
    for (uint32_t i = 0; i < FT_CUTS; i++) CHECK(fab_fault_cut(d.f, "nobody", MS) == 0);
    CHECK(fab_fault_cut(d.f, "nobody", MS) == -ENOSPC);
    finish(&d);
}

/* ---- below an engine ------------------------------------------------------------------------------- */

typedef struct side {
    fab_engine *engine;
    loop_nic *nic[4];
    fab_fault *fault[4];
    uint8_t *mem;
    uint64_t local, remote;
    uint32_t peer;
} side;

#define LEN 65536u
#define NICS 3u
static uint64_t virtual_now = 1000 * MS;

static side open_side(const fab_fault_plan *plan, uint32_t seed) {
    fab_engine_cfg cfg = {.imm_slots = 256,
                          .max_inflight = 4096,
                          .max_peers = 16,
                          .timeout_ns = 400 * MS,
                          .inline_bytes = 4096,
                          .shard_bytes = 64,
                          .clock = &virtual_now};
    side s = {.engine = fab_engine_new(&cfg), .mem = calloc(1, LEN)};
    uint64_t ops[NICS], ctx[NICS], cpus[16] = {0};
    for (uint32_t i = 0; i < NICS; i++) {
        fab_fault_plan mine = *plan;
        mine.seed = seed * 8 + i;
        if (i == 0) mine.kill_ops = mine.kill_ns = 0; /* one NIC is left */
        s.nic[i] = loop_new(seed + i, 0);
        s.fault[i] = fab_fault_wrap(&loop_ops, s.nic[i], &mine);
        fab_fault_hold(s.fault[i]);
        ops[i] = (uint64_t)(uintptr_t)fab_fault_ops();
        ctx[i] = (uint64_t)(uintptr_t)s.fault[i];
    }
    CHECK(fab_group_open(s.engine, NICS, ops, ctx, cpus, 0) == 0);
    return s;
}

static void know(side *from, side *to) {
    fab_mr_keys keys[NICS];
    fab_mr mine = {.addr = (uint64_t)(uintptr_t)from->mem, .len = LEN, .fd = -1};
    from->local = (uint64_t)fab_mem_reg(from->engine, 0, &mine, keys);
    char text[NICS][32];
    const char *addrs[NICS];
    uint64_t key[NICS], base[NICS];
    for (uint32_t i = 0; i < NICS; i++) {
        snprintf(text[i], sizeof text[i], "%p", (void *)to->nic[i]);
        addrs[i] = text[i];
        key[i] = 9;
        base[i] = (uint64_t)(uintptr_t)to->mem;
    }
    from->peer = (uint32_t)fab_peer_add(from->engine, 0, NICS, addrs);
    to->remote = (uint64_t)fab_remote_add(from->engine, 0, from->peer, LEN, FAB_ACCESS_REMOTE_WRITE, NICS, key, base);
}

static void close_side(side *s) {
    fab_engine_close(s->engine, 0);
    fab_engine_free(s->engine);
    for (uint32_t i = 0; i < NICS; i++) {
        CHECK(s->nic[i]->closed == 1);
        fab_fault_release(s->fault[i]);
        free(s->nic[i]);
    }
    free(s->mem);
}

/* C1, C4, C7, R8: with everything going wrong each transfer ends once, by its deadline and a grace; one that ended well
 * counts exactly once and is all there; and after the end nothing lands. */
static void an_engine_survives_all_of_it(void) {
    static const fab_fault_plan plan = {.reorder = 1,
                                        .delay_ns = MS,
                                        .drop_ppm = 3000,
                                        .fail_ppm = 3000,
                                        .fail_late_ppm = 3000,
                                        .fail_status = -EIO,
                                        .refuse_ppm = 20000,
                                        .refuse_ns = MS,
                                        .partial_ppm = 300000,
                                        .cut_ppm = 3000,
                                        .cut_ns = 5 * MS,
                                        .kill_ops = 150,
                                        .revive_ns = 20 * MS};
    uint32_t well = 0, badly = 0;
    for (uint32_t seed = 1; seed <= 30; seed++) {
        const fab_fault_plan none = {0};
        side a = open_side(&plan, seed), b = open_side(&none, seed + 100);
        know(&a, &b);
        for (uint32_t i = 0; i < LEN; i++) a.mem[i] = (uint8_t)(i * 31 + i / 251 + seed) | 1;
        static uint32_t index[512];
        for (uint32_t i = 0; i < 512; i++) index[i] = i;
        for (uint32_t round = 0; round < 12; round++) {
            int64_t imm = fab_imm_alloc(b.engine), h;
            memset(b.mem, 0, LEN);
            if (round & 1)
                h = fab_submit_paged(a.engine, a.local, index, 128, 0, b.remote, index, 128, 0, 512, 128, imm, -1, 0,
                                     0);
            else h = fab_submit_write(a.engine, a.local, 0, b.remote, 0, LEN, imm, -1, 0, 0);
            CHECK(h > 0);
            uint64_t begin = virtual_now;
            while (fab_transfer_poll(a.engine, (uint64_t)h) == FAB_PENDING) {
                virtual_now += MS / 10;
                fab_progress(a.engine);
                fab_progress(b.engine);
                CHECK(virtual_now - begin < 4000 * MS, "seed %u round %u: does not end", seed, round);
            }
            fab_outcome out;
            CHECK(fab_transfer_outcome(a.engine, (uint64_t)h, &out) == 0);
            fab_transfer_release(a.engine, (uint64_t)h);
            for (int i = 0; i < 50; i++) fab_progress(b.engine);
            int64_t count = fab_imm_count(b.engine, (uint32_t)imm), want = round & 1 ? 512 : 1;
            if (out.phase == FAB_DONE) {
                CHECK(count == want, "seed %u round %u: %ld counts", seed, round, (long)count);
                CHECK(!memcmp(a.mem, b.mem, LEN), "seed %u round %u: not all there", seed, round);
                well++;
            } else {
                CHECK(count <= want && (out.peer == a.peer || out.nic >= 0), "seed %u: names nobody", seed);
                badly++;
            }
            memset(b.mem, 0, LEN);
            for (int i = 0; i < 100; i++) {
                virtual_now += MS / 10;
                fab_progress(a.engine);
                fab_progress(b.engine);
            }
            for (uint32_t i = 0; i < LEN; i++)
                CHECK(!b.mem[i], "seed %u round %u: byte %u landed late", seed, round, i);
            fab_imm_free(b.engine, (uint32_t)imm);
        }
        fab_stats stats;
        CHECK(fab_engine_stats(a.engine, 0, &stats) == 0 && stats.inflight == 0);
        close_side(&a);
        close_side(&b);
    }
    CHECK(well > 20 && badly > 20, "%u well, %u badly", well, badly);
}

/* ---- waking up -------------------------------------------------------------------------------------- */

static int fd_wait_fd(void *ctx) { return (int)((loop_nic *)ctx)->max_write; }

static void a_command_wakes_whoever_sleeps(void) {
    fab_domain_ops with_fd = loop_ops;
    with_fd.wait_fd = fd_wait_fd;
    int ends[2];
    CHECK(pipe(ends) == 0);
    loop_nic *nic = loop_new(0, (uint64_t)ends[0]);
    fab_fault_plan plan = {0};
    fab_fault *f = fab_fault_wrap(&with_fd, nic, &plan);
    CHECK(f);
    const fab_domain_ops *ops = fab_fault_ops();
    struct pollfd fd = {.fd = ops->wait_fd(f), .events = POLLIN};
    CHECK(fd.fd >= 0 && ops->arm(f, 1) == 0 && poll(&fd, 1, 0) == 0);
    CHECK(write(ends[1], "x", 1) == 1 && poll(&fd, 1, 0) == 1); /* what wakes the inner domain wakes us */
    char byte;
    CHECK(read(ends[0], &byte, 1) == 1 && poll(&fd, 1, 0) == 0);
    fab_fault_kill(f);
    CHECK(poll(&fd, 1, 0) == 1);
    CHECK(ops->arm(f, 1) == 1); /* not asleep before it was obeyed */
    fab_wc wc[4];
    CHECK(ops->poll(f, wc, 4, 1) == 1 && wc[0].kind == FAB_WC_NIC_DOWN);
    CHECK(ops->arm(f, 1) == 0 && poll(&fd, 1, 0) == 0);
    ops->close(f);
    free(nic);
    close(ends[0]);
    close(ends[1]);
}

int main(void) {
    without_faults_nothing_changes();
    each_fault_happens_and_each_request_ends_once();
    a_plan_replays();
    a_dropped_completion_waits_for_the_cancel();
    a_great_many_dropped_completions_end_together();
    a_killed_nic_is_quiet_before_its_requests_end();
    a_cut_link_is_told_once_and_can_be_mended();
    an_engine_survives_all_of_it();
    a_command_wakes_whoever_sleeps();
    return 0;
}
