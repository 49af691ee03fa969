/* memory.c - GPU memory for our own benchmarks. Whoever registers memory brings it along. */
#include "cuda.h"

#include <errno.h>

int fab_cuda_alloc(int device, uint64_t bytes, uint64_t *out) {
    fc_entered e;
    int r = fc_enter(device, &e);
    if (r) return r;
    r = fc_errno(fc_driver()->mem_alloc(out, bytes), "cuMemAlloc");
    fc_leave(&e);
    return r;
}

void fab_cuda_free(int device, uint64_t address) {
    fc_entered e;
    if (!address || fc_enter(device, &e)) return;
    fc_driver()->mem_free(address);
    fc_leave(&e);
}

int fab_cuda_copy(int device, uint64_t to, uint64_t from, uint64_t bytes) {
    fc_entered e;
    int r = fc_enter(device, &e);
    if (r) return r;
    r = fc_errno(fc_driver()->copy(to, from, bytes), "cuMemcpy");
    if (!r) r = fc_errno(fc_driver()->synchronize(NULL), "cuStreamSynchronize"); /* inside a GPU it does not wait */
    fc_leave(&e);
    return r;
}

int fab_cuda_pinned(int device, uint64_t bytes, uint64_t *out) {
    fc_entered e;
    void *p = NULL;
    int r = fc_enter(device, &e);
    if (r) return r;
    r = fc_errno(fc_driver()->host_alloc(&p, bytes, FC_HOST_PORTABLE | FC_HOST_DEVICEMAP), "cuMemHostAlloc");
    fc_leave(&e);
    *out = (uint64_t)(uintptr_t)p;
    return r;
}

void fab_cuda_unpinned(int device, uint64_t address) {
    fc_entered e;
    if (!address || fc_enter(device, &e)) return;
    fc_driver()->host_free((void *)(uintptr_t)address);
    fc_leave(&e);
}
