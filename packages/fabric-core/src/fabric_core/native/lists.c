/* Page lists: copied once, because the caller may change its own at once, with their greatest numbers, which decide whether
 * all pages lie inside. A prepared transfer keeps its lists for all that are made of it. */
#include "engine_internal.h"
#include "numbers.h"

fab_lists *fab_lists_new(const uint32_t *source, const uint32_t *target, uint32_t npages) {
    fab_lists *l = malloc(sizeof *l + sizeof *l->numbers * npages * 2);
    if (!l) return NULL;
    atomic_init(&l->users, 1);
    l->npages = npages;
    l->most_source = fab_take_numbers(l->numbers, source, npages, 1);
    l->most_target = fab_take_numbers(l->numbers + npages, target, npages, 1);
    return l;
}

void fab_lists_hold(fab_lists *l) { atomic_fetch_add_explicit(&l->users, 1, memory_order_relaxed); }

void fab_lists_let_go(fab_lists *l) {
    /* acquire and release: whoever frees them comes after all who read them */
    if (l && atomic_fetch_sub_explicit(&l->users, 1, memory_order_acq_rel) == 1) free(l);
}

static bool inside(uint64_t len, uint32_t most, uint64_t stride, uint64_t off, uint64_t page) {
    uint64_t at, end;
    return !__builtin_mul_overflow((uint64_t)most, stride, &at) && !__builtin_add_overflow(at, off, &at) &&
           !__builtin_add_overflow(at, page, &end) && end <= len;
}

bool fab_lists_inside(const fab_lists *l, const fab_ends *at, uint64_t sstride, uint64_t soff, uint64_t dstride,
                      uint64_t doff, uint64_t page) {
    return inside(at->local->len, l->most_source, sstride, soff, page) &&
           inside(at->remote->len, l->most_target, dstride, doff, page);
}
