/* words.c - words in host memory that GPUs write and wait for, and what puts them into a stream. */
#include "cuda.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>

#define PAGE (64u << 10)

/* A GPU may still write to a word that was given back: the link lies in the other half. And first in, first out: such a write
 * is to find the word unused for as long as can be. */
typedef struct free_word {
    uint64_t word[FAB_CUDA_WORD / 16];
    struct free_word *next;
} free_word;
static pthread_mutex_t mu = PTHREAD_MUTEX_INITIALIZER;
static free_word *free_first, *free_last;

static void give(free_word *w) { /* mu held */
    w->next = NULL;
    if (free_first) free_last->next = w;
    else free_first = w;
    free_last = w;
}

uint64_t fab_cuda_word_new(int device) {
    fc_entered e;
    void *p = NULL;
    pthread_mutex_lock(&mu);
    if (!free_first && !fc_enter(device, &e)) {
        if (!fc_errno(fc_driver()->host_alloc(&p, PAGE, FC_HOST_PORTABLE | FC_HOST_DEVICEMAP), "cuMemHostAlloc"))
            for (uint32_t at = 0; at < PAGE; at += FAB_CUDA_WORD) give((free_word *)(void *)((char *)p + at));
        fc_leave(&e);
    }
    free_word *w = free_first;
    if (w) {
        free_first = w->next;
        memset(w, 0, FAB_CUDA_WORD);
    }
    pthread_mutex_unlock(&mu);
    return (uint64_t)(uintptr_t)w;
}

void fab_cuda_word_free(uint64_t word) {
    free_word *w = (free_word *)(uintptr_t)word;
    if (!w) return;
    pthread_mutex_lock(&mu);
    give(w);
    pthread_mutex_unlock(&mu);
}

int fab_cuda_stream_write(int device, uint64_t stream, uint64_t word, uint64_t value) {
    fc_entered e;
    int r = fc_enter(device, &e);
    if (r) return r;
    r = fc_errno(fc_driver()->write_value((fc_stream)(uintptr_t)stream, word, value, 0), "cuStreamWriteValue64");
    fc_leave(&e);
    return r;
}

int fab_cuda_stream_wait(int device, uint64_t stream, uint64_t word, uint32_t value) {
    fc_entered e;
    int r = fc_enter(device, &e);
    if (r) return r;
    r = fc_errno(fc_driver()->wait_value32((fc_stream)(uintptr_t)stream, word, value, FC_WAIT_GEQ),
                 "cuStreamWaitValue32");
    fc_leave(&e);
    return r;
}

int fab_cuda_stream_add(int device, uint64_t stream, uint64_t word, uint64_t by) {
    fc_entered e;
    fc_kernels k;
    int r = fc_enter(device, &e);
    if (r) return r;
    r = fc_kernels_of(device, &k);
    void *arguments[] = {&word, &by};
    if (!r)
        r = fc_errno(fc_driver()->launch(k.bump, 1, 1, 1, 1, 1, 1, 0, (fc_stream)(uintptr_t)stream, arguments, NULL),
                     "cuLaunchKernel");
    fc_leave(&e);
    return r;
}
