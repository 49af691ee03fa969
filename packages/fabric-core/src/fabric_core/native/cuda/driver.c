/* driver.c - loads libcuda and enters contexts. Only primary contexts are used: they are those of torch and of the CUDA
 * runtime, and once made they stay for the process's life (as those libraries keep them). */
#include "cuda.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_DEVICES 64
#define DRIVER "libcuda.so.1"

static pthread_mutex_t mu = PTHREAD_MUTEX_INITIALIZER;
static fc_table table;
static const fc_table *loaded; /* under mu until it is set; then constant */
static char why_not[200], tried[4096], last_error[200];
static int ndevices;
static fc_ctx contexts[MAX_DEVICES];

static int find_all(void *lib) {
#define X(name, symbol, arguments)                                                             \
    *(void **)&table.name = dlsym(lib, symbol);                                                \
    if (!table.name) {                                                                         \
        snprintf(why_not, sizeof why_not, DRIVER " has no " symbol ": the driver is too old"); \
        return -ENODEV;                                                                        \
    }
    FC_FUNCTIONS(X)
#undef X
    return 0;
}

static int load(void) { /* mu held */
    if (loaded) return 0;
    const char *set = getenv("FABRIC_CUDA_LIBRARY"), *path = set && *set ? set : DRIVER;
    if (why_not[0] && !strcmp(path, tried)) return -ENODEV; /* another name is another chance */
    snprintf(tried, sizeof tried, "%s", path);
    void *lib = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (!lib) {
        snprintf(why_not, sizeof why_not, "there is no CUDA driver: %.150s", dlerror());
        return -ENODEV;
    }
    if (find_all(lib)) return -ENODEV;
    fc_result r = table.init(0);
    if (r || table.device_count(&ndevices) || ndevices < 1) {
        const char *text = "no device";
        if (r) table.error_string(r, &text);
        snprintf(why_not, sizeof why_not, "the CUDA driver offers no GPU: %s", text);
        return -ENODEV;
    }
    if (ndevices > MAX_DEVICES) ndevices = MAX_DEVICES;
    loaded = &table;
    return 0;
}

int fab_cuda_load(char *err, size_t cap) {
    pthread_mutex_lock(&mu);
    int r = load();
    if (r && cap) snprintf(err, cap, "%s", why_not);
    pthread_mutex_unlock(&mu);
    return r;
}

const fc_table *fc_driver(void) { return fab_cuda_load(NULL, 0) ? NULL : loaded; }

int fc_errno(fc_result r, const char *what) {
    if (!r) return 0;
    const char *name = NULL, *text = NULL;
    if (loaded) {
        loaded->error_name(r, &name);
        loaded->error_string(r, &text);
    }
    pthread_mutex_lock(&mu);
    snprintf(last_error, sizeof last_error, "%s: %s (%s)", what, text ? text : "unknown error", name ? name : "?");
    pthread_mutex_unlock(&mu);
    return r == FC_E_OUT_OF_MEMORY ? -ENOMEM : r == 1 ? -EINVAL : r == 801 ? -EOPNOTSUPP : -EIO;
}

int fab_cuda_last_error(char *buf, size_t cap) {
    pthread_mutex_lock(&mu);
    int n = snprintf(buf, cap, "%s", last_error);
    pthread_mutex_unlock(&mu);
    return n;
}

static int context(int device, fc_ctx *out) {
    if (!fc_driver()) return -ENODEV;
    if (device < 0 || device >= ndevices) return -ENXIO;
    int d, r = 0;
    pthread_mutex_lock(&mu);
    if (!contexts[device] && !(r = loaded->device_get(&d, device))) r = loaded->primary_retain(&contexts[device], d);
    *out = contexts[device];
    pthread_mutex_unlock(&mu);
    return fc_errno(r, "cuDevicePrimaryCtxRetain");
}

int fc_enter(int device, fc_entered *e) {
    fc_ctx c;
    int r = context(device, &c);
    if (!r) r = fc_errno(loaded->push(c), "cuCtxPushCurrent");
    if (r) return r;
    e->mode = FC_CAPTURE_RELAXED; /* what we do must not spoil a capture that another thread is in */
    loaded->capture_mode(&e->mode);
    return 0;
}

void fc_leave(fc_entered *e) {
    fc_ctx c;
    loaded->capture_mode(&e->mode);
    loaded->pop(&c);
}

int fab_cuda_version(void) {
    int v = 0;
    return fc_driver() && !loaded->driver_version(&v) ? v : 0;
}

int fab_cuda_devices(void) { return fc_driver() ? ndevices : 0; }

static uint32_t attribute(int which, int device) {
    int v = 0;
    return loaded->device_attribute(&v, which, device) ? 0 : (uint32_t)v;
}

int fab_cuda_describe(int device, fab_cuda_device_info *out) {
    int d;
    size_t bytes = 0;
    memset(out, 0, sizeof *out);
    if (!fc_driver()) return -ENODEV;
    if (device < 0 || device >= ndevices || loaded->device_get(&d, device)) return -ENXIO;
    loaded->device_name(out->name, sizeof out->name, d);
    loaded->device_pci(out->pci, sizeof out->pci, d);
    loaded->device_uuid(out->uuid, d);
    loaded->device_memory(&bytes, d);
    out->memory = bytes;
    out->multiprocessors = attribute(FC_ATTR_SMS, d);
    out->compute_major = attribute(FC_ATTR_MAJOR, d);
    out->compute_minor = attribute(FC_ATTR_MINOR, d);
    out->stream_words = attribute(FC_ATTR_STREAM_WORDS64, d);
    return 0;
}

int fab_cuda_what(uint64_t address, fab_cuda_range *out) {
    *out = (fab_cuda_range){.device = -1};
    if (!fc_driver()) return -ENODEV;
    uint32_t type = 0;
    if (loaded->pointer_attribute(&type, FC_POINTER_MEMORY_TYPE, address))
        return 0; /* not the driver's: plain host memory */
    out->pinned = type == 1;
    if (type != 2) return 0;
    int device = 0;
    size_t size = 0;
    int r = fc_errno(loaded->pointer_attribute(&device, FC_POINTER_ORDINAL, address), "cuPointerGetAttribute");
    if (r) return r;
    out->device = device;
    if (!loaded->address_range(&out->base, &size, address)) out->size = size;
    return 0;
}

/* ---- kernels ------------------------------------------------------------------------------------ */

static const char ptx[] =
#include "kernels_ptx.h"
    ;
static fc_kernels kernels[MAX_DEVICES];

int fc_kernels_of(int device, fc_kernels *out) {
    static pthread_mutex_t loading = PTHREAD_MUTEX_INITIALIZER;
    fc_module m;
    int r = 0, d = 0;
    pthread_mutex_lock(&loading);
    fc_kernels *k = &kernels[device];
    if (!k->copy) {
        r = fc_errno(loaded->module_load(&m, ptx), "cuModuleLoadData");
        if (!r) r = fc_errno(loaded->module_function(&k->bump, m, "fab_bump"), "cuModuleGetFunction");
        if (!r) r = fc_errno(loaded->module_function(&k->pages, m, "fab_copy_pages"), "cuModuleGetFunction");
        if (!r) r = fc_errno(loaded->module_function(&k->stay, m, "fab_stay"), "cuModuleGetFunction");
        if (!r) r = fc_errno(loaded->device_get(&d, device), "cuDeviceGet");
        k->sms = attribute(FC_ATTR_SMS, d);
        k->stream_words = attribute(FC_ATTR_STREAM_WORDS64, d) != 0;
        if (!r) r = fc_errno(loaded->module_function(&k->copy, m, "fab_copy"), "cuModuleGetFunction");
    }
    *out = *k;
    pthread_mutex_unlock(&loading);
    return r;
}
