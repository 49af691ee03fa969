/* The engine over NICs that reorder, refuse and hold back (loop_domain.h). Each test names the contract it proves. */
#include "sides.h"

#include <sched.h>
#include <stdatomic.h>

/* C4, C5: every byte, and one count, for any length, number of NICs on either side, and maximum size */
static void sharding_is_exact(void) {
    static const uint64_t lengths[] = {0, 1, 63, 64, 65, 1000, 4095, 16385, 70001};
    static const uint64_t limits[] = {0, 100, 4096, 5000};
    for (uint32_t nics = 1; nics <= 8; nics++)
        for (uint32_t m = 0; m < 4; m++) {
            side a = make_side(nics, 17 * nics + m + 1, limits[m], 80000, 0, 0);
            side b = make_side(1 + (nics + m) % 8, 99, 0, 80000, 0, 0);
            join(&a, &b);
            for (uint64_t i = 0; i < a.len; i++) a.mem[i] = (uint8_t)(i * 7 + i / 251 + 1);
            int64_t imm = fab_imm_alloc(b.engine);
            for (uint32_t l = 0; l < 9; l++) {
                uint64_t len = lengths[l], at = 13 + l;
                memset(b.mem, 0, b.len);
                int64_t h = fab_submit_write(a.engine, a.local, 5, b.remote, at, len, imm, -1, 0, 0);
                CHECK(h > 0, "%ld", (long)h);
                run_until(&a, &b, (uint64_t)h);
                fab_outcome out;
                fab_transfer_outcome(a.engine, (uint64_t)h, &out);
                CHECK(out.phase == FAB_DONE && out.err == 0);
                CHECK(!memcmp(b.mem + at, a.mem + 5, len), "%lu bytes, %u NICs, limit %lu", len, nics, limits[m]);
                for (uint64_t i = 0; i < at; i++) CHECK(!b.mem[i]);
                for (uint64_t i = at + len; i < b.len; i++) CHECK(!b.mem[i]);
                for (int i = 0; i < 100 && fab_imm_count(b.engine, (uint32_t)imm) < (int64_t)(l + 1); i++) {
                }
                CHECK(fab_imm_count(b.engine, (uint32_t)imm) == (int64_t)(l + 1), "one count per logical write");
                fab_transfer_release(a.engine, (uint64_t)h);
            }
            CHECK(fab_imm_free(b.engine, (uint32_t)imm) == 9);
            drop_side(&a);
            drop_side(&b);
        }
}

/* C4, C5 for pages: each lands in its place and counts once, also when a page is longer than the NIC's maximum */
static void pages_are_exact(void) {
    for (uint32_t seed = 1; seed <= 40; seed++) {
        uint32_t rng = seed * 2654435761u | 1, n = 1 + xorshift(&rng) % 300, page = xorshift(&rng) % 200;
        side a = make_side(1 + seed % 4, seed, seed % 3 ? 0 : 17, 300 * 210, 0, 0);
        side b = make_side(1 + seed % 3, seed + 7, 0, 300 * 210, 0, 0);
        join(&a, &b);
        uint32_t src[300], dst[300];
        for (uint32_t i = 0; i < 300; i++) src[i] = dst[i] = i;
        for (uint32_t i = 299; i > 0; i--) {
            uint32_t j = xorshift(&rng) % (i + 1), t = dst[i];
            dst[i] = dst[j];
            dst[j] = t;
        }
        for (uint64_t i = 0; i < a.len; i++) a.mem[i] = (uint8_t)(xorshift(&rng) | 1);
        int64_t imm = fab_imm_alloc(b.engine);
        int64_t h = fab_submit_paged(a.engine, a.local, src, 200, 3, b.remote, dst, 210, 2, n, page, imm, -1, 0, 0);
        CHECK(h > 0, "%ld", (long)h);
        memset(src, 0xff, sizeof src); /* copied: the lists are ours again at once */
        run_until(&a, &b, (uint64_t)h);
        for (int i = 0; i < 1000 && fab_imm_count(b.engine, (uint32_t)imm) < n; i++) {
        }
        CHECK(fab_imm_count(b.engine, (uint32_t)imm) == n);
        for (uint32_t k = 0; k < n; k++) CHECK(!memcmp(b.mem + 2 + dst[k] * 210, a.mem + 3 + k * 200, page));
        fab_transfer_release(a.engine, (uint64_t)h);
        drop_side(&a);
        drop_side(&b);
    }
}

/* C3: early immediates count, surplus is reported, several expectations are served in order, late ones are stray */
static void immediates_are_never_lost(void) {
    side a = make_side(4, 5, 0, 4096, 0, 0), b = make_side(4, 6, 0, 4096, 0, 0);
    join(&a, &b);
    int64_t imm = fab_imm_alloc(b.engine);
    for (int i = 0; i < 10; i++) {
        int64_t h = fab_submit_write(a.engine, a.local, 0, b.remote, 0, 256, imm, -1, 0, 0);
        run_until(&a, &b, (uint64_t)h);
        fab_transfer_release(a.engine, (uint64_t)h);
    }
    for (int i = 0; i < 100; i++) fab_progress(b.engine);
    int64_t first = fab_expect(b.engine, (uint32_t)imm, 4, 0, NULL, 0);
    int64_t second = fab_expect(b.engine, (uint32_t)imm, 5, 0, NULL, 0);
    int64_t third = fab_expect(b.engine, (uint32_t)imm, 2, 0, NULL, 0);
    CHECK(fab_expect_poll(b.engine, (uint64_t)first) == FAB_DONE);
    CHECK(fab_expect_poll(b.engine, (uint64_t)second) == FAB_DONE);
    CHECK(fab_expect_poll(b.engine, (uint64_t)third) == FAB_PENDING);
    CHECK(fab_imm_free(b.engine, (uint32_t)imm) == 1, "ten arrived, nine were claimed");
    CHECK(fab_expect_poll(b.engine, (uint64_t)third) == FAB_CANCELLED);
    int64_t owner[64]; /* every slot anew: one of them is the old one, in a later generation */
    for (int i = 0; i < 64; i++) owner[i] = fab_imm_alloc(b.engine);
    int64_t h = fab_submit_write(a.engine, a.local, 0, b.remote, 0, 256, imm, -1, 0, 0);
    run_until(&a, &b, (uint64_t)h);
    for (int i = 0; i < 100; i++) fab_progress(b.engine);
    fab_stats stats;
    fab_engine_stats(b.engine, 0, &stats);
    CHECK(stats.imm_stray == 1);
    for (int i = 0; i < 64; i++) {
        CHECK(fab_imm_count(b.engine, (uint32_t)owner[i]) == 0, "credited to a new owner");
        CHECK(fab_imm_free(b.engine, (uint32_t)owner[i]) == 0);
    }
    for (int i = 0; i < 64 * 3; i++) { /* every slot anew, in a later generation: the late one met none of them */
        int64_t next = fab_imm_alloc(b.engine);
        CHECK(next >= 0 && next != imm && fab_imm_count(b.engine, (uint32_t)next) == 0);
        CHECK(fab_imm_free(b.engine, (uint32_t)next) == 0);
    }
    CHECK(fab_imm_free(b.engine, (uint32_t)imm) == -EINVAL);
    fab_expect_release(b.engine, (uint64_t)first);
    fab_expect_release(b.engine, (uint64_t)second);
    fab_expect_release(b.engine, (uint64_t)third);
    drop_side(&a);
    drop_side(&b);
}

/* C6: bounds and rights at submit, by numbers that would overflow too */
static void bad_requests_never_reach_a_nic(void) {
    side a = make_side(2, 0, 0, 4096, 0, 0), b = make_side(2, 0, 0, 4096, 0, 0);
    join(&a, &b);
    CHECK(fab_submit_write(a.engine, a.local, 1, b.remote, 0, 4096, -1, -1, 0, 0) == -ERANGE);
    CHECK(fab_submit_write(a.engine, a.local, 0, b.remote, UINT64_MAX, 2, -1, -1, 0, 0) == -ERANGE);
    CHECK(fab_submit_write(a.engine, a.local, 4097, b.remote, 0, 0, -1, -1, 0, 0) == -ERANGE);
    CHECK(fab_submit_write(a.engine, a.local, 0, b.remote, 0, 1, 1 << 29, -1, 0, 0) == -EINVAL);
    CHECK(fab_submit_write(a.engine, a.local, 0, b.remote, 0, 1, -1, 2, 0, 0) == -ENODEV);
    CHECK(fab_submit_write(a.engine, a.local + (2ull << 32), 0, b.remote, 0, 1, -1, -1, 0, 0) == -EBADF);
    CHECK(fab_submit_write(a.engine, a.local, 0, b.remote + 1, 0, 1, -1, -1, 0, 0) == -ESTALE);
    uint32_t big[2] = {0, 0xffffffffu}, fine[2] = {0, 1};
    CHECK(fab_submit_paged(a.engine, a.local, big, 1ull << 40, 0, b.remote, fine, 8, 0, 2, 8, -1, -1, 0, 0) == -ERANGE);
    CHECK(fab_submit_paged(a.engine, a.local, fine, 8, 0, b.remote, fine, 4089, 0, 2, 8, -1, -1, 0, 0) == -ERANGE);
    fab_target far = {b.remote, 0, 4000, 97};
    CHECK(fab_submit_many(a.engine, FAB_OP_SCATTER, a.local, &far, 1, -1, -1, 0, 0) == -ERANGE);
    uint8_t text[5000] = {0};
    CHECK(fab_submit_send(a.engine, 0, a.peer, text, sizeof text, 0, 0) == -ERANGE);
    for (uint32_t i = 0; i < 2; i++) CHECK(a.nic[i]->posted == 0);
    CHECK(fab_mem_dereg(a.engine, a.local, 0) == 0);
    CHECK(fab_submit_write(a.engine, a.local, 0, b.remote, 0, 1, -1, -1, 0, 0) == -EBADF);
    CHECK(fab_mem_dereg(a.engine, a.local, 0) == -EBADF);
    drop_side(&a);
    drop_side(&b);
}

/* C1, C7: a deadline cancels at the NIC and ends only when the NIC has let go; a stubborn NIC loses its link */
static void deadlines_end_quietly(void) {
    for (int stubborn = 0; stubborn <= 1; stubborn++) {
        side a = make_side(2, 3, 0, 4096, 0, 0), b = make_side(2, 4, 0, 4096, 0, 0);
        join(&a, &b);
        for (int i = 0; i < 2; i++) {
            a.nic[i]->hold = true;
            a.nic[i]->stubborn = stubborn;
        }
        int64_t h = fab_submit_write(a.engine, a.local, 0, b.remote, 0, 4096, -1, -1, 30 * MS, 0);
        CHECK(fab_mem_dereg(a.engine, a.local, 5 * MS) == -EBUSY, "the NIC still reads it");
        int phase = fab_transfer_wait(a.engine, (uint64_t)h, 5000 * MS);
        CHECK(phase == FAB_FAILED);
        fab_outcome out;
        fab_transfer_outcome(a.engine, (uint64_t)h, &out);
        CHECK(out.err == -ETIME && out.peer == a.peer, "%d", out.err);
        for (int i = 0; i < 2; i++) CHECK(a.nic[i]->nqueue == 0, "quiet");
        int64_t imm = fab_imm_alloc(a.engine), e = fab_expect(a.engine, (uint32_t)imm, 1, 20 * MS, NULL, 0);
        CHECK(fab_expect_wait(a.engine, (uint64_t)e, 5000 * MS) == FAB_FAILED);
        fab_expect_outcome(a.engine, (uint64_t)e, &out);
        CHECK(out.err == -ETIME);
        drop_side(&a);
        drop_side(&b);
    }
}

/* C11: a deadline that passes while the last writes are on the wire names a peer, though all of them end well */
static void a_late_peer_is_named(void) {
    for (int late = 0; late < 2; late++) {
        side a = make_side(1, 0, 0, 4096, 0, 0),
             b[2] = {make_side(1, 0, 0, 4096, 0, 0), make_side(1, 0, 0, 4096, 0, 0)};
        fab_target to[2];
        uint32_t peer[2];
        for (int i = 0; i < 2; i++) {
            join(&a, &b[i]);
            peer[i] = a.peer;
            to[i] = (fab_target){b[i].remote, 0, (uint64_t)i * 64, 64};
        }
        int64_t h = fab_submit_many(a.engine, FAB_OP_SCATTER, a.local, to, 2, -1, -1, 30 * MS, 0);
        CHECK(h > 0);
        a.nic[0]->hold = a.nic[0]->too_late = true;
        while (a.nic[0]->posted < 2) fab_progress(a.engine);
        loop_nic *nic = a.nic[0]; /* one of the two is done in time */
        CHECK(nic->nqueue == 2 && nic->queue[0].peer != nic->queue[1].peer);
        uint32_t of_nic = nic->queue[!late].peer;
        loop_execute(nic, (uint32_t)late);
        CHECK(nic->queue[0].peer == of_nic);
        uint32_t want = nic->peers[of_nic] == b[0].nic[0] ? peer[0] : peer[1];
        run_until(&a, NULL, (uint64_t)h);
        fab_outcome out;
        CHECK(fab_transfer_outcome(a.engine, (uint64_t)h, &out) == 0);
        CHECK(out.phase == FAB_FAILED && out.err == -ETIME && out.ended == 2 && out.units == 2);
        CHECK(out.peer == want, "%u, not %u", out.peer, want);
        drop_side(&a);
        drop_side(&b[0]);
        drop_side(&b[1]);
    }
}

/* C1: cancel and close end everything once; C11: a refused first contact names the peer, for expectations too */
static void ends_are_named(void) {
    side a = make_side(2, 3, 0, 4096, 0, 0), b = make_side(2, 4, 0, 4096, 0, 0);
    join(&a, &b);
    a.nic[0]->hold = a.nic[1]->hold = true;
    int64_t h = fab_submit_write(a.engine, a.local, 0, b.remote, 0, 4096, -1, -1, 0, 0);
    int64_t kept = fab_submit_write(a.engine, a.local, 0, b.remote, 0, 4096, -1, -1, 0, 0);
    fab_transfer_cancel(a.engine, (uint64_t)h);
    run_until(&a, NULL, (uint64_t)h);
    CHECK(fab_transfer_poll(a.engine, (uint64_t)h) == FAB_CANCELLED);
    CHECK(fab_transfer_poll(a.engine, (uint64_t)kept) == FAB_PENDING);
    int64_t imm = fab_imm_alloc(a.engine), e = fab_expect(a.engine, (uint32_t)imm, 1, 0, NULL, 0);
    fab_transfer_notify(a.engine, (uint64_t)kept);
    CHECK(fab_engine_close(a.engine, 2000 * MS) == 0);
    CHECK(fab_transfer_poll(a.engine, (uint64_t)kept) == FAB_CANCELLED);
    CHECK(fab_expect_poll(a.engine, (uint64_t)e) == FAB_CANCELLED);
    fab_event event[4];
    CHECK(fab_events_wait(a.engine, event, 4, 0) == 1 && event[0].id == (uint64_t)kept);
    CHECK(fab_submit_write(a.engine, a.local, 0, b.remote, 0, 1, -1, -1, 0, 0) == -ESHUTDOWN);
    CHECK(fab_expect(a.engine, (uint32_t)imm, 1, 0, NULL, 0) == -ESHUTDOWN);
    drop_side(&a);
    drop_side(&b);

    a = make_side(1, 0, 0, 4096, 0, 0), b = make_side(1, 0, 0, 4096, 0, 0);
    join(&a, &b);
    a.nic[0]->refuse_peer = true;
    imm = fab_imm_alloc(a.engine);
    e = fab_expect(a.engine, (uint32_t)imm, 1, 0, &a.peer, 1);
    h = fab_submit_write(a.engine, a.local, 0, b.remote, 0, 1, -1, -1, 0, 0);
    run_until(&a, NULL, (uint64_t)h);
    fab_outcome out;
    fab_transfer_outcome(a.engine, (uint64_t)h, &out);
    CHECK(out.phase == FAB_FAILED && out.err == -ECONNREFUSED && out.peer == a.peer);
    CHECK(fab_expect_poll(a.engine, (uint64_t)e) == FAB_FAILED);
    a.nic[0]->refuse_peer = false; /* and the next submit tries again */
    h = fab_submit_write(a.engine, a.local, 0, b.remote, 0, 1, -1, -1, 0, 0);
    run_until(&a, NULL, (uint64_t)h);
    CHECK(fab_transfer_poll(a.engine, (uint64_t)h) == FAB_DONE);
    drop_side(&a);
    drop_side(&b);
}

/* C8: a full engine says so at once */
static void full_is_said(void) {
    side a = make_side(1, 0, 0, 4096, 0, 0), b = make_side(1, 0, 0, 4096, 0, 0);
    join(&a, &b);
    a.nic[0]->hold = true;
    int n = 0;
    int64_t rc;
    while ((rc = fab_submit_write(a.engine, a.local, 0, b.remote, 0, 1, -1, -1, 0, 0)) > 0) n++;
    CHECK(rc == -EAGAIN && n == 4096, "%d taken", n);
    CHECK(fab_wait_room(a.engine, 5 * MS) == -ETIMEDOUT);
    a.nic[0]->hold = false;
    CHECK(fab_wait_room(a.engine, 5000 * MS) == 0);
    CHECK(fab_submit_write(a.engine, a.local, 0, b.remote, 0, 1, -1, -1, 0, 0) > 0);
    drop_side(&a);
    drop_side(&b);
}

/* ---- threads: everything at once, each event exactly once (C1), no data race (run under TSan) ------- */

enum { THREADS = 4, EACH = 3000 };
static side *ta, *tb;
static int64_t timm;

static void *submitter(void *arg) {
    uint32_t rng = (uint32_t)(uintptr_t)arg * 7919u + 1;
    for (int i = 0; i < EACH; i++) {
        int64_t h;
        uint64_t len = xorshift(&rng) % 300;
        while ((h = fab_submit_write(ta->engine, ta->local, 0, tb->remote, (uint64_t)(uintptr_t)arg * 512, len, timm,
                                     -1, 0, 0)) == -EAGAIN)
            fab_wait_room(ta->engine, 1000 * MS);
        CHECK(h > 0, "%ld", (long)h);
        if (i % 16 == 0) CHECK(fab_transfer_wait(ta->engine, (uint64_t)h, 20000 * MS) == FAB_DONE);
        if (i % 5 == 0) fab_imm_count(tb->engine, (uint32_t)timm);
        fab_transfer_notify(ta->engine, (uint64_t)h); /* its event releases it */
    }
    return NULL;
}

static void *listener(void *arg) {
    uint64_t *seen = arg;
    fab_event ev[64];
    int n;
    while ((n = fab_events_wait(ta->engine, ev, 64, 100 * MS)) >= 0)
        for (int i = 0; i < n; i++) {
            CHECK(ev[i].kind == FAB_EV_TRANSFER && ev[i].status == 0);
            CHECK(fab_transfer_release(ta->engine, ev[i].id) == 0, "released once, so notified once");
            ++*seen;
        }
    return NULL;
}

static void threads_together(void) {
    for (uint64_t spin = 0; spin <= 50000; spin += 50000) {
        side a = make_side(4, 11, 0, 4096, 1, spin), b = make_side(4, 12, 0, 4096, 1, spin);
        ta = &a;
        tb = &b;
        join(&a, &b);
        timm = fab_imm_alloc(b.engine);
        int64_t e = fab_expect(b.engine, (uint32_t)timm, THREADS * EACH, 0, NULL, 0);
        pthread_t thread[THREADS], ears;
        uint64_t seen = 0;
        pthread_create(&ears, NULL, listener, &seen);
        for (uintptr_t i = 0; i < THREADS; i++) pthread_create(&thread[i], NULL, submitter, (void *)i);
        for (int i = 0; i < THREADS; i++) pthread_join(thread[i], NULL);
        CHECK(fab_expect_wait(b.engine, (uint64_t)e, 20000 * MS) == FAB_DONE);
        CHECK(fab_imm_free(b.engine, (uint32_t)timm) == 0);
        fab_engine_close(a.engine, 5000 * MS);
        fab_events_stop(a.engine);
        pthread_join(ears, NULL);
        CHECK(seen == THREADS * EACH, "%lu events", (unsigned long)seen);
        fab_expect_release(b.engine, (uint64_t)e);
        drop_side(&a);
        drop_side(&b);
    }
}

/* a watcher hears a range whose ends meet: nothing is skipped, nothing comes twice */
static void watchers_hear_ranges(void) {
    side a = make_side(1, 0, 0, 64, 0, 0);
    uint64_t word;
    int64_t id = fab_watch_add(a.engine, 0, NULL, NULL, &word);
    CHECK(id > 0);
    _Atomic uint64_t *w = (_Atomic uint64_t *)(uintptr_t)word;
    uint64_t last = 0;
    for (uint64_t target = 1000; target <= 20000; target += 1000) {
        while (atomic_load(w) < target) atomic_fetch_add(w, 1);
        while (last < target) {
            fab_event ev;
            CHECK(fab_events_wait(a.engine, &ev, 1, 5000 * MS) == 1, "stuck at %lu", (unsigned long)last);
            CHECK(ev.kind == FAB_EV_WATCH && ev.a == last && ev.b > last && ev.b <= target);
            last = ev.b;
        }
    }
    drop_side(&a);
}

int main(void) {
    sharding_is_exact();
    pages_are_exact();
    immediates_are_never_lost();
    bad_requests_never_reach_a_nic();
    deadlines_end_quietly();
    a_late_peer_is_named();
    ends_are_named();
    full_is_said();
    threads_together();
    watchers_hear_ranges();
    return 0;
}
