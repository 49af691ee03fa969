/* NICs and paths that are lost and come back: the others carry on (R8), nothing is sent twice (C4), nothing is left (C1). */
#include "sides.h"

static uint64_t now = 1000 * MS;

static void steps(side *a, side *b, uint32_t n) {
    while (n--) {
        fab_progress(a->engine);
        fab_progress(b->engine);
    }
}

static fab_outcome ended(side *a, side *b, int64_t h) {
    CHECK(h > 0, "%ld", (long)h);
    run_until(a, b, (uint64_t)h);
    fab_outcome out;
    CHECK(fab_transfer_outcome(a->engine, (uint64_t)h, &out) == 0);
    fab_transfer_release(a->engine, (uint64_t)h);
    return out;
}

static uint32_t paths(side *s) {
    fab_peer_stats stats;
    CHECK(fab_engine_peer_stats(s->engine, 0, s->peer, &stats) == 0);
    return stats.up;
}

static uint32_t events(side *s, uint32_t kind, uint64_t id, int32_t status) {
    fab_event e[64];
    uint32_t found = 0;
    for (int n; (n = fab_events_wait(s->engine, e, 64, 0)) > 0;)
        for (int i = 0; i < n; i++) found += e[i].kind == kind && e[i].id == id && e[i].status == status;
    return found;
}

static int64_t pages(side *a, side *b, int64_t imm, uint32_t n) {
    static uint32_t index[4096];
    for (uint32_t i = 0; i < n; i++) index[i] = i;
    return fab_submit_paged(a->engine, a->local, index, 16, 0, b->remote, index, 16, 0, n, 16, imm, -1, 0, 0);
}

static void connected(side *a, side *b, uint32_t nics, uint32_t seed) {
    *a = make_side(nics, seed, 0, 80000, 0, 0);
    *b = make_side(nics, seed + 50, 0, 80000, 0, 0);
    join(a, b);
    for (uint64_t i = 0; i < a->len; i++) a->mem[i] = (uint8_t)(i * 13 + i / 255 + seed);
    CHECK(ended(a, b, fab_submit_write(a->engine, a->local, 0, b->remote, 0, 1, -1, -1, 0, 0)).phase == FAB_DONE);
    CHECK(paths(a) == (1u << nics) - 1);
}

/* R8, C4, C5: a NIC is lost in the middle of a transfer of many pages. What it held ends naming it; every page is there at most
 * once, the next transfers are whole and go over the others, and pages not yet handed to it were carried by them. */
static void a_lost_nic_leaves_its_work_to_the_others(void) {
    uint32_t failed = 0;
    for (uint32_t seed = 1; seed <= 60; seed++) {
        uint32_t nics = 2 + seed % 3, lost = seed % nics;
        side a, b;
        connected(&a, &b, nics, seed);
        a.nic[lost]->hold = seed & 8; /* it holds some of them when it goes */
        int64_t imm = fab_imm_alloc(b.engine), h = pages(&a, &b, imm, 4000);
        steps(&a, &b, seed % 5);
        if (seed % 2) { /* it holds nothing when it goes */
            a.nic[lost]->full = true;
            a.nic[lost]->hold = false;
            steps(&a, &b, 200);
        }
        uint64_t posted = a.nic[lost]->posted;
        loop_event(a.nic[lost], UINT32_MAX, FAB_WC_NIC_DOWN, -ENETDOWN);
        fab_outcome out = ended(&a, &b, h);
        steps(&a, &b, 200);
        int64_t arrived = fab_imm_count(b.engine, (uint32_t)imm);
        failed += out.phase == FAB_FAILED;
        if (out.phase == FAB_FAILED) {
            CHECK(out.err == -ENETDOWN && out.nic == (int32_t)lost && out.peer == a.peer);
            CHECK(out.units == 4000 && out.ended < 4000 && arrived < 4000, "%lu", out.ended);
        } else {
            CHECK(out.phase == FAB_DONE && out.ended == 4000 && out.units == 4000);
            CHECK(arrived == 4000 && !memcmp(a.mem, b.mem, 4000 * 16));
        }
        CHECK(a.nic[lost]->posted - posted <= 64, "it was posted to after it was lost");
        CHECK(paths(&a) == (((1u << nics) - 1) & ~(1u << lost)));
        CHECK(events(&a, FAB_EV_NIC, lost, -ENETDOWN) == 1, "the loss is told");
        fab_imm_free(b.engine, (uint32_t)imm);

        imm = fab_imm_alloc(b.engine);
        memset(b.mem, 0, b.len);
        posted = a.nic[lost]->posted;
        CHECK(ended(&a, &b, pages(&a, &b, imm, 4000)).phase == FAB_DONE);
        CHECK(ended(&a, &b, fab_submit_write(a.engine, a.local, 0, b.remote, 0, 70001, imm, -1, 0, 0)).phase ==
              FAB_DONE);
        steps(&a, &b, 200);
        CHECK(fab_imm_count(b.engine, (uint32_t)imm) == 4001 && !memcmp(a.mem, b.mem, 70001));
        CHECK(a.nic[lost]->posted == posted, "nothing goes to a lost NIC");
        drop_side(&a);
        drop_side(&b);
    }
    CHECK(failed > 5 && failed < 55, "%u of 60: both ends are to be seen", failed);
}

/* who names a NIC gets that NIC or an error that names it, and not its deadline */
static void a_pinned_write_is_not_carried_by_another(void) {
    side a, b;
    connected(&a, &b, 4, 3);
    loop_event(a.nic[2], UINT32_MAX, FAB_WC_NIC_DOWN, 0);
    steps(&a, &b, 10);
    fab_outcome out = ended(&a, &b, fab_submit_write(a.engine, a.local, 0, b.remote, 0, 100, -1, 2, 0, 0));
    CHECK(out.phase == FAB_FAILED && out.err == -ENETDOWN && out.nic == 2);
    CHECK(ended(&a, &b, fab_submit_write(a.engine, a.local, 0, b.remote, 0, 100, -1, 3, 0, 0)).phase == FAB_DONE);
    drop_side(&a);
    drop_side(&b);
}

/* C11: one path to one peer is lost and is tried again after a pause; NICs that come back carry again */
static void paths_and_nics_come_back(void) {
    side a, b;
    connected(&a, &b, 4, 5);
    loop_event(a.nic[1], 0, FAB_WC_PEER_DOWN, -ETIMEDOUT);
    steps(&a, &b, 10);
    CHECK(paths(&a) == 0xd && events(&a, FAB_EV_NIC, 1, -ETIMEDOUT) == 1);
    CHECK(ended(&a, &b, fab_submit_write(a.engine, a.local, 0, b.remote, 0, 70001, -1, -1, 0, 0)).phase == FAB_DONE);
    CHECK(paths(&a) == 0xd, "not before its pause is over");
    now += 300 * MS;
    CHECK(ended(&a, &b, fab_submit_write(a.engine, a.local, 0, b.remote, 0, 70001, -1, -1, 0, 0)).phase == FAB_DONE);
    steps(&a, &b, 10);
    CHECK(paths(&a) == 0xf && events(&a, FAB_EV_NIC, 1, 0) == 1);

    loop_event(a.nic[0], UINT32_MAX, FAB_WC_NIC_DOWN, -ENETDOWN);
    steps(&a, &b, 10);
    CHECK(paths(&a) == 0xe && events(&a, FAB_EV_NIC, 0, -ENETDOWN) == 1);
    loop_event(a.nic[0], 60, FAB_WC_NIC_UP, 0);
    steps(&a, &b, 10);
    CHECK(events(&a, FAB_EV_NIC, 0, 0) == 1);
    CHECK(ended(&a, &b, fab_submit_write(a.engine, a.local, 0, b.remote, 0, 70001, -1, -1, 0, 0)).phase == FAB_DONE);
    steps(&a, &b, 10);
    CHECK(paths(&a) == 0xf);
    uint64_t posted = a.nic[0]->posted;
    CHECK(ended(&a, &b, pages(&a, &b, -1, 400)).phase == FAB_DONE && a.nic[0]->posted == posted + 100);
    drop_side(&a);
    drop_side(&b);
}

/* the last path is the peer; a domain that says the process is gone loses it at once; then first contact is tried again */
static void the_last_path_is_the_peer(void) {
    for (int how = 0; how < 2; how++) {
        side a, b;
        connected(&a, &b, 2, 9);
        a.nic[0]->hold = a.nic[1]->hold = true;
        int64_t h = pages(&a, &b, -1, 1000);
        steps(&a, &b, 10);
        if (how) {
            loop_event(a.nic[1], 0, FAB_WC_PEER_DOWN, -ECONNRESET);
        } else {
            loop_event(a.nic[0], 0, FAB_WC_PEER_DOWN, -ETIMEDOUT);
            loop_event(a.nic[1], 0, FAB_WC_PEER_DOWN, -ETIMEDOUT);
        }
        fab_outcome out = ended(&a, &b, h);
        CHECK(out.phase == FAB_FAILED && out.err == (how ? -ECONNRESET : -ETIMEDOUT), "%d", out.err);
        CHECK(paths(&a) == 0 && events(&a, FAB_EV_PEER_LOST, a.peer, 0) == 1);
        a.nic[0]->hold = a.nic[1]->hold = false;
        CHECK(ended(&a, &b, pages(&a, &b, -1, 1000)).phase == FAB_DONE && paths(&a) == 3);
        drop_side(&a);
        drop_side(&b);
    }
}

/* C1: a domain that cannot even be polled is closed, and what it held ends; memory can still be registered and given back */
static void a_broken_domain_is_closed(void) {
    side a, b;
    connected(&a, &b, 3, 11);
    a.nic[1]->hold = true;
    int64_t h = pages(&a, &b, -1, 900);
    steps(&a, &b, 20);
    CHECK(a.nic[1]->nqueue > 0);
    a.nic[1]->broken = -EIO;
    fab_outcome out = ended(&a, &b, h);
    CHECK(out.phase == FAB_FAILED && out.err == -ENETDOWN && out.nic == 1 && a.nic[1]->closed == 1);
    CHECK(events(&a, FAB_EV_NIC, 1, -EIO) == 1);
    fab_mr mr = {.addr = (uint64_t)(uintptr_t)a.mem, .len = a.len, .fd = -1};
    fab_mr_keys keys[8];
    int64_t again = fab_mem_reg(a.engine, 0, &mr, keys);
    CHECK(again > 0 && keys[1].local_key == 0 && fab_mem_dereg(a.engine, (uint64_t)again, 0) == 0);
    CHECK(ended(&a, &b, pages(&a, &b, -1, 900)).phase == FAB_DONE);
    CHECK(fab_mem_dereg(a.engine, a.local, 0) == 0);
    drop_side(&a);
    drop_side(&b);
}

/* with its last NIC an engine has lost everybody: an error that says so, at once */
static void no_nic_is_left(void) {
    side a, b;
    connected(&a, &b, 2, 13);
    for (int i = 0; i < 2; i++) loop_event(a.nic[i], UINT32_MAX, FAB_WC_NIC_DOWN, -ENETDOWN);
    steps(&a, &b, 10);
    fab_outcome out = ended(&a, &b, pages(&a, &b, -1, 10));
    CHECK(out.phase == FAB_FAILED && out.err == -ENETDOWN);
    drop_side(&a);
    drop_side(&b);
}

int main(void) {
    sides_clock = &now;
    a_lost_nic_leaves_its_work_to_the_others();
    a_pinned_write_is_not_carried_by_another();
    paths_and_nics_come_back();
    the_last_path_is_the_peer();
    a_broken_domain_is_closed();
    no_nic_is_left();
    return 0;
}
