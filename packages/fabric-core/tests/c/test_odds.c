/* What the other programs leave aside: the table of peers, flags and descriptors that outlive what names them, pools of
 * receives, watchers with a native callback, and questions with a wrong number in them. Leaks are ASan's to see (R9). */
#include "engine_internal.h"

#include "litmus.h"
#include "sides.h"

#include <sys/mman.h>

/* C11: an address has one number; those that were lost longest ago are forgotten when the table is full; a number kept
 * too long names nobody */
static void peers_have_one_number(void) {
    side a = make_side(2, 0, 0, 64, 0, 0), b = make_side(2, 0, 0, 64, 0, 0);
    join(&a, &b);
    char text[32], other[32];
    snprintf(text, sizeof text, "%p", (void *)b.nic[0]);
    snprintf(other, sizeof other, "%p", (void *)b.nic[1]);
    const char *known[] = {text, other}, *fewer[] = {text};
    CHECK(fab_peer_add(a.engine, 0, 2, known) == a.peer);
    int64_t alone = fab_peer_add(a.engine, 0, 1, fewer);
    CHECK(alone >= 0 && alone != a.peer && fab_peer_add(a.engine, 0, 1, fewer) == alone);
    CHECK(fab_peer_add(a.engine, 0, 0, known) == -EINVAL && fab_peer_add(a.engine, 0, 9, known) == -EINVAL);
    CHECK(fab_peer_add(a.engine, 7, 1, fewer) == -EINVAL && fab_peer_add(NULL, 0, 1, fewer) == -ESHUTDOWN);
    int64_t last = 0, made = 2;
    for (uint32_t i = 0; last >= 0; i++) { /* none of them was ever lost: none may be forgotten */
        CHECK(i < 100);
        char name[32];
        snprintf(name, sizeof name, "%p.%u", (void *)b.nic[0], i);
        const char *one[] = {name};
        last = fab_peer_add(a.engine, 0, 1, one);
        made += last >= 0;
    }
    CHECK(last == -ENOSPC && made == 16, "%ld, after %ld", (long)last, (long)made);
    a.nic[0]->refuse_peer = a.nic[1]->refuse_peer = true;
    int64_t h = fab_submit_send(a.engine, 0, (uint32_t)alone, "x", 1, 0, 0);
    run_until(&a, NULL, (uint64_t)h);
    fab_peer_stats stats;
    CHECK(fab_engine_peer_stats(a.engine, 0, (uint32_t)alone, &stats) == 0);
    CHECK(stats.state == FAB_PEER_LOST && stats.status == -ECONNREFUSED && stats.nnics == 2 && stats.up == 0);
    CHECK(fab_transfer_release(a.engine, (uint64_t)h) == 0);
    fab_event ev[4];
    CHECK(fab_events_wait(a.engine, ev, 4, 0) == 1 && ev[0].kind == FAB_EV_PEER_LOST);
    const char *one[] = {"0x1"};
    int64_t next = fab_peer_add(a.engine, 0, 1, one);
    CHECK(next >= 0 && next != alone, "%ld", (long)next);
    CHECK(fab_engine_peer_stats(a.engine, 0, (uint32_t)alone, &stats) == -EINVAL, "a number kept too long");
    CHECK(fab_submit_send(a.engine, 0, (uint32_t)alone, "x", 1, 0, 0) == -ESRCH);
    CHECK(fab_engine_peer_stats(a.engine, 3, 0, &stats) == -EINVAL);
    drop_side(&a);
    drop_side(&b);
}

/* A flag of ours lives as long as the operation that names it, and a descriptor dropped meanwhile as well */
static void names_outlive_their_owners(void) {
    side a = make_side(1, 0, 0, 64, 0, 0), b = make_side(1, 0, 0, 64, 0, 0);
    join(&a, &b);
    a.nic[0]->hold = true;
    uint64_t kept = fab_flag_new(), dropped = fab_flag_new();
    CHECK(kept && dropped);
    int64_t one = fab_submit_write(a.engine, a.local, 0, b.remote, 0, 8, -1, -1, 0, kept | 1);
    int64_t two = fab_submit_write(a.engine, a.local, 0, b.remote, 8, 8, -1, -1, 0, dropped | 1);
    CHECK(one > 0 && two > 0);
    fab_flag_drop(dropped);
    CHECK(fab_remote_drop(a.engine, b.remote) == 0);
    a.nic[0]->hold = false;
    run_until(&a, &b, (uint64_t)one);
    run_until(&a, &b, (uint64_t)two);
    CHECK(atomic_load((_Atomic uint64_t *)(uintptr_t)kept) == 1, "bumped once, and well");
    fab_flag_drop(kept);
    CHECK(fab_submit_write(a.engine, a.local, 0, b.remote, 0, 8, -1, -1, 0, 0) == -ESTALE);
    CHECK(fab_remote_drop(a.engine, b.remote) == -EBADF && fab_remote_drop(NULL, b.remote) == -EBADF);
    drop_side(&a);
    drop_side(&b);
}

/* C8: a NIC that takes no receive is asked again, a closed pool is given back */
static void receives_wait_for_room(void) {
    side a = make_side(2, 0, 0, 64, 0, 0);
    CHECK(fab_recvs_add(a.engine, 0, 5, 100, 3) == 0); /* loop_domain.h takes none */
    CHECK(fab_recvs_add(a.engine, 1, 5, 100, 3) == -EINVAL && fab_recvs_add(a.engine, 0, 5, 100, 0) == -EINVAL);
    for (int i = 0; i < 3; i++) fab_progress(a.engine);
    uint32_t buffers = 0;
    for (const fab_link *l = a.engine->groups[0]->recvs.next; l != &a.engine->groups[0]->recvs; l = l->next) buffers++;
    CHECK(buffers == 3 + 1, "three, and a spare for the second NIC: %u", buffers);
    CHECK(fab_recvs_close(a.engine, 9, 5) == -EINVAL && fab_recvs_close(a.engine, 0, 5) == 0);
    fab_progress(a.engine);
    CHECK(fab_list_empty(&a.engine->groups[0]->recvs), "buffers of a closed pool are left");
    CHECK(fab_recvs_add(a.engine, 0, 6, 100, 2) == 0); /* these end with the engine */
    drop_side(&a);
}

static _Atomic uint64_t heard;
static void hear(void *arg, uint64_t old_value, uint64_t new_value) {
    CHECK(arg == &heard && new_value > old_value && old_value == atomic_load(&heard));
    atomic_store(&heard, new_value);
}

static void watchers_call_native_code(void) {
    side a = make_side(1, 0, 0, 64, 0, 0);
    uint64_t mine = 0, word;
    CHECK(fab_watch_add(a.engine, (uint64_t)(uintptr_t)&mine + 1, hear, &heard, &word) == -EINVAL, "not aligned");
    CHECK(fab_watch_add(NULL, 0, hear, &heard, &word) == -ESHUTDOWN);
    int64_t id = fab_watch_add(a.engine, (uint64_t)(uintptr_t)&mine, hear, &heard, &word);
    CHECK(id > 0 && word == (uint64_t)(uintptr_t)&mine);
    _Atomic uint64_t *w = (_Atomic uint64_t *)(uintptr_t)word;
    for (uint64_t i = 1; i <= 20; i++) {
        atomic_store(w, i * 3);
        uint64_t until = fab_now() + LITMUS_DEADLINE_NS;
        while (atomic_load(&heard) != i * 3) {
            CHECK(fab_now() < until, "change %lu is not heard of", (unsigned long)i);
            sched_yield();
        }
    }
    CHECK(fab_watch_close(a.engine, (uint64_t)id) == 0 && fab_watch_close(a.engine, (uint64_t)id) == -EBADF);
    CHECK(fab_watch_close(NULL, (uint64_t)id) == -EBADF);
    int64_t again = fab_watch_add(a.engine, 0, hear, &heard, &word); /* the engine ends it */
    CHECK(again > 0 && again != id);
    drop_side(&a);
}

/* C6, C12: numbers of nothing are errors */
static void wrong_numbers(void) {
    side a = make_side(1, 0, 0, 64, 0, 0);
    fab_stats stats;
    fab_domain_caps caps;
    fab_counter counters[4];
    char text[32];
    CHECK(fab_engine_stats(a.engine, 1, &stats) < 0 && fab_group_caps(a.engine, 0, 1, &caps) == -EINVAL);
    CHECK(fab_group_address(a.engine, 1, 0, text, sizeof text) == -EINVAL);
    CHECK(fab_nic_counters(a.engine, 0, 1, counters, 4) == -EINVAL &&
          fab_nic_counters(a.engine, 0, 0, counters, 4) == 0);
    CHECK(fab_expect(a.engine, 1u << 29, 1, 0, NULL, 0) == -EINVAL && fab_imm_count(a.engine, 77) == -EINVAL);
    uint32_t nobody = 3;
    int64_t imm = fab_imm_alloc(a.engine);
    CHECK(fab_expect(a.engine, (uint32_t)imm, 1, 0, &nobody, 1) == -ESRCH);
    CHECK(fab_expect_poll(a.engine, 12345) == -EBADF && fab_expect_cancel(a.engine, 12345) == -EBADF);
    CHECK(fab_expect_notify(a.engine, 12345) == -EBADF && fab_expect_release(a.engine, 12345) == -EBADF);
    CHECK(fab_transfer_poll(a.engine, 99ull << 32 | 5) == -EBADF &&
          fab_transfer_cancel(a.engine, 99ull << 32) == -EBADF);
    CHECK(fab_imm_alloc(NULL) == -ESHUTDOWN && fab_progress(NULL) == 0 && fab_wait_room(NULL, 0) == -ESHUTDOWN);
    fab_mr wraps = {.addr = UINT64_MAX - 4, .len = 8, .fd = -1};
    fab_mr_keys keys[8];
    CHECK(fab_mem_reg(a.engine, 0, &wraps, keys) == -EINVAL && fab_mem_dereg(a.engine, 7ull << 32, 0) == -EBADF);
    drop_side(&a);
}

/* The figures that stand beside a benchmark are to be had, and memory is there or not */
static void limits_are_numbers(void) {
    CHECK(fab_limit_stream(4096, 1 << 20, 0.002) > 1e6 && fab_limit_stream(8192, 4096, 0.002) < 0);
    double kernel = fab_limit_cma(4096, 1 << 20, 0.002); /* negative where a container forbids it */
    CHECK(kernel != 0 && fab_build_info()[0]);
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    char *map = mmap(NULL, 3 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(map != MAP_FAILED && munmap(map + page, page) == 0);
    CHECK(fab_range_mapped((uint64_t)(uintptr_t)map, page) == 1);
    CHECK(fab_range_mapped((uint64_t)(uintptr_t)map + page - 1, 2) == 0);
    CHECK(fab_range_mapped((uint64_t)(uintptr_t)map + 2 * page, page) == 1);
}

/* On few cores the worker leaves the work to a thread that polls: one that goes to sleep gives it back (decision 0002) */
static void a_sleeper_polls_no_more(void) {
    side a = make_side(1, 0, 0, 64, 0, 0);
    a.engine->cfg.hand_over = 1;
    _Atomic uint64_t *last_help = &a.engine->groups[0]->last_help;
    int64_t imm = fab_imm_alloc(a.engine), never = fab_expect(a.engine, (uint32_t)imm, 1, 20000 * MS, NULL, 0);
    CHECK(fab_expect_poll(a.engine, (uint64_t)never) == FAB_PENDING && atomic_load(last_help));
    CHECK(fab_expect_wait(a.engine, (uint64_t)never, MS) == FAB_PENDING && !atomic_load(last_help));
    drop_side(&a);
}

/* ... for as long as it polls, looking after it less and less often, and never for longer than it has polled (decision 0002) */
static void a_worker_trusts_who_has_polled_for_long(void) {
    fab_engine e = {.cfg.hand_over = 1};
    static fab_group g;
    g.engine = &e;
    uint64_t now = 50 * MS, most = 0, since = 0;
    CHECK(fab_left_to_poller(&g, &since, now) == 0); /* nobody has ever polled */
    for (uint64_t begun = now; now < begun + 200 * MS;) {
        g.last_help = now - 1000; /* it goes on and on */
        uint64_t nap = fab_left_to_poller(&g, &since, now);
        CHECK(nap >= MS && nap <= 8 * MS && (nap == MS || nap <= (now - begun) / 8));
        most = nap > most ? nap : most;
        now += nap;
    }
    CHECK(most == 8 * MS);
    g.lock = 1;
    CHECK(fab_left_to_poller(&g, &since, now) == 8 * MS); /* at one step for so long */
    CHECK(fab_left_to_poller(&g, &since, now + 20 * MS) == 0 && !since); /* that is no poller's step any more */
    g.lock = 0;
    g.last_help = now + 21 * MS; /* back: trusted from the beginning again */
    CHECK(fab_left_to_poller(&g, &since, now + 21 * MS) == MS && since == now + 21 * MS);
    CHECK(fab_left_to_poller(&g, &since, now + 23 * MS) == 0 && !since); /* and gone */
    g.last_help = now + 30 * MS;
    CHECK(fab_left_to_poller(&g, &since, now + 30 * MS) == MS);
    g.last_help = 0; /* it waits, and says so */
    CHECK(fab_left_to_poller(&g, &since, now + 31 * MS) == 0);
}

int main(void) {
    a_sleeper_polls_no_more();
    a_worker_trusts_who_has_polled_for_long();
    peers_have_one_number();
    names_outlive_their_owners();
    receives_wait_for_room();
    watchers_call_native_code();
    wrong_numbers();
    limits_are_numbers();
    return 0;
}
