/* Flags: a word that operations bump when they end (low half: ended, high half: ended badly).
 *
 * A flag of Python's lives as long as the object or an operation that names it, whichever is longer; its address is
 * given with the lowest bit set. Any other address is the caller's own word, which the caller keeps. */
#include "cuda/cuda.h"
#include "engine_internal.h"

#include <limits.h>

typedef struct fab_flag {
    _Atomic uint64_t word;
    _Atomic uint32_t users; /* the Python object, and operations in flight */
    int32_t device; /* of a word that GPUs reach too; -1: plain memory */
} fab_flag;
_Static_assert(sizeof(fab_flag) <= FAB_CUDA_WORD, "a flag fits into one of the words that GPUs reach");

uint64_t fab_flag_new(void) {
    fab_flag *flag = calloc(1, sizeof *flag);
    if (!flag) return 0;
    atomic_init(&flag->users, 1);
    flag->device = -1;
    return (uint64_t)(uintptr_t)flag;
}

uint64_t fab_flag_new_on(int32_t device) {
    fab_flag *flag = (fab_flag *)(uintptr_t)fab_cuda_word_new(device);
    if (!flag) return 0;
    atomic_init(&flag->users, 1);
    flag->device = device;
    return (uint64_t)(uintptr_t)flag;
}

void fab_flag_drop(uint64_t flag) {
    fab_flag *f = (fab_flag *)(uintptr_t)(flag & ~UINT64_C(1));
    if (!f || atomic_fetch_sub_explicit(&f->users, 1, memory_order_acq_rel) != 1) return;
    if (f->device >= 0) fab_cuda_word_free((uint64_t)(uintptr_t)f);
    else free(f);
}

void fab_flag_hold(uint64_t flag) {
    if (flag & 1) atomic_fetch_add_explicit(&((fab_flag *)(uintptr_t)(flag - 1))->users, 1, memory_order_relaxed);
}

void fab_flag_let_go(uint64_t flag) {
    if (flag & 1) fab_flag_drop(flag);
}

void fab_flag_bump(uint64_t flag, bool well) {
    _Atomic uint64_t *word = (_Atomic uint64_t *)(uintptr_t)(flag & ~UINT64_C(1));
    /* release: whoever polls it sees the outcome of what the operation did (C10) */
    atomic_fetch_add_explicit(word, well ? 1 : (UINT64_C(1) << 32) + 1, memory_order_release);
    fab_flag_let_go(flag);
}
