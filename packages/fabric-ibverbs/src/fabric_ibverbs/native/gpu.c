/* GPU memory: a dma-buf of the CUDA driver where library, driver and kernel have it, else plain registration, which works
 * where a peer-memory module is loaded. The CUDA driver is looked up only here, and only if it is in the process. */
#include "verbs_int.h"

#include <dlfcn.h>
#include <unistd.h>

#define RANGE_DMA_BUF_FD 1 /* CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD */

typedef int (*range_fn)(void *handle, unsigned long long ptr, size_t size, int type, unsigned long long flags);
typedef int (*base_fn)(unsigned long long *base, size_t *size, unsigned long long ptr);

static struct ibv_mr *reg_dmabuf(fv_dom *d, const fab_mr *mr, int access) {
    void *cuda = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    if (!cuda || !fv_ibv.reg_dmabuf_mr) return NULL;
    range_fn range;
    base_fn base;
    *(void **)&range = dlsym(cuda, "cuMemGetHandleForAddressRange");
    *(void **)&base = dlsym(cuda, "cuMemGetAddressRange_v2");
    unsigned long long start = 0;
    size_t size = 0;
    int fd = -1;
    struct ibv_mr *m = NULL;
    if (range && base && !base(&start, &size, mr->addr) && mr->addr + mr->len <= start + size) {
        size_t page = (size_t)sysconf(_SC_PAGESIZE);
        unsigned long long from = mr->addr / page * page, end = (mr->addr + mr->len + page - 1) / page * page;
        if (!range(&fd, from, end - from, RANGE_DMA_BUF_FD, 0) && fd >= 0) {
            m = fv_ibv.reg_dmabuf_mr(d->pd, mr->addr - from, mr->len, mr->addr, fd, access);
            close(fd); /* the registration holds the memory */
        }
    }
    dlclose(cuda);
    return m;
}

struct ibv_mr *fv_reg_gpu(fv_dom *d, const fab_mr *mr, int access) {
    struct ibv_mr *m = reg_dmabuf(d, mr, access);
    if (m) return m;
    void *at = (void *)(uintptr_t)mr->addr;
    return fv_ibv.reg_mr_iova2 ? fv_ibv.reg_mr_iova2(d->pd, at, mr->len, mr->addr, (unsigned)access)
                               : fv_ibv.reg_mr(d->pd, at, mr->len, access);
}
