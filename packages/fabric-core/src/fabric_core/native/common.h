/* Small things every file needs: time, pause, futex, a try-lock, and intrusive list links. */
#ifndef FAB_COMMON_H
#define FAB_COMMON_H

#ifndef _GNU_SOURCE
#    define _GNU_SOURCE
#endif
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define FAB_CACHELINE ((size_t)64)
#define FAB_ALIGNED _Alignas(FAB_CACHELINE)

static inline uint64_t fab_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
}

static inline void fab_relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

static inline void fab_futex_wait(_Atomic uint32_t *word, uint32_t seen, uint64_t timeout_ns) {
    struct timespec t = {.tv_sec = (time_t)(timeout_ns / 1000000000ull), .tv_nsec = (long)(timeout_ns % 1000000000ull)};
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, &t, NULL, 0);
}

static inline void fab_futex_wake_all(_Atomic uint32_t *word) {
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

/* A spin lock for a handful of instructions off the hot path (an expectation list, a free list). The holder may be
 * preempted, so a waiter yields after a while. */
static inline void fab_spin_lock(_Atomic uint32_t *lock) {
    for (unsigned tries = 0;; tries++) {
        uint32_t free = 0;
        if (atomic_compare_exchange_weak_explicit(lock, &free, 1, memory_order_acquire, memory_order_relaxed)) return;
        if (tries > 200) sched_yield();
        else fab_relax();
    }
}

static inline void fab_spin_unlock(_Atomic uint32_t *lock) { atomic_store_explicit(lock, 0, memory_order_release); }

/* ---- intrusive doubly linked list with a sentinel ------------------------------------------- */

typedef struct fab_link {
    struct fab_link *prev, *next;
} fab_link;

static inline void fab_list_init(fab_link *head) { head->prev = head->next = head; }
static inline bool fab_list_empty(const fab_link *head) { return head->next == head; }
static inline bool fab_linked(const fab_link *link) { return link->next != NULL; }

static inline void fab_list_append(fab_link *head, fab_link *link) {
    link->prev = head->prev;
    link->next = head;
    head->prev->next = link;
    head->prev = link;
}

static inline void fab_list_remove(fab_link *link) {
    /* clang's analyzer does not see that taking an element out of a list changes its neighbours */
    link->prev->next = link->next; /* NOLINT(clang-analyzer-unix.Malloc,clang-analyzer-core.NullDereference) */
    link->next->prev = link->prev;
    link->prev = link->next = NULL;
}

#define FAB_CONTAINER(ptr, type, member) ((type *)((char *)(ptr) - offsetof(type, member)))

#endif
