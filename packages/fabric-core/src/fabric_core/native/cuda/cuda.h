/* cuda.h - the CUDA driver as the engine uses it. Own declarations: no CUDA installation is needed to build. */
#ifndef FAB_CUDA_H
#define FAB_CUDA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "cdef_cuda.h"

#define FAB_CUDA_WORD 128u        /* two lines: neighbours do not share what the CPU fetches together */

typedef int fc_result;            /* CUresult: 0 is success */
typedef struct fc_context *fc_ctx;
typedef struct fc_stream_s *fc_stream;
typedef struct fc_function_s *fc_function;
typedef struct fc_module_s *fc_module;
typedef struct fc_ipc {
    uint8_t bytes[64];
} fc_ipc;

/* name in our table, symbol of the driver, type. Names with a suffix are the ABI of that version (cuda.h, CUDA 12). */
#define FC_FUNCTIONS(X)                                                                                       \
    X(init, "cuInit", (unsigned))                                                                             \
    X(driver_version, "cuDriverGetVersion", (int *))                                                          \
    X(device_count, "cuDeviceGetCount", (int *))                                                              \
    X(device_get, "cuDeviceGet", (int *, int))                                                                \
    X(device_name, "cuDeviceGetName", (char *, int, int))                                                     \
    X(device_pci, "cuDeviceGetPCIBusId", (char *, int, int))                                                  \
    X(device_memory, "cuDeviceTotalMem_v2", (size_t *, int))                                                  \
    X(device_attribute, "cuDeviceGetAttribute", (int *, int, int))                                            \
    X(device_uuid, "cuDeviceGetUuid", (uint8_t *, int))                                                       \
    X(primary_retain, "cuDevicePrimaryCtxRetain", (fc_ctx *, int))                                            \
    X(push, "cuCtxPushCurrent_v2", (fc_ctx))                                                                  \
    X(pop, "cuCtxPopCurrent_v2", (fc_ctx *))                                                                  \
    X(capture_mode, "cuThreadExchangeStreamCaptureMode", (int *))                                             \
    X(pointer_attribute, "cuPointerGetAttribute", (void *, int, uint64_t))                                    \
    X(address_range, "cuMemGetAddressRange_v2", (uint64_t *, size_t *, uint64_t))                             \
    X(ipc_get, "cuIpcGetMemHandle", (fc_ipc *, uint64_t))                                                     \
    X(ipc_open, "cuIpcOpenMemHandle_v2", (uint64_t *, fc_ipc, unsigned))                                      \
    X(ipc_close, "cuIpcCloseMemHandle", (uint64_t))                                                           \
    X(mem_alloc, "cuMemAlloc_v2", (uint64_t *, size_t))                                                       \
    X(mem_free, "cuMemFree_v2", (uint64_t))                                                                   \
    X(copy, "cuMemcpy", (uint64_t, uint64_t, size_t))                                                         \
    X(synchronize, "cuStreamSynchronize", (fc_stream))                                                        \
    X(memset32, "cuMemsetD32Async", (uint64_t, unsigned, size_t, fc_stream))                                  \
    X(host_alloc, "cuMemHostAlloc", (void **, size_t, unsigned))                                              \
    X(host_free, "cuMemFreeHost", (void *))                                                                   \
    X(host_register, "cuMemHostRegister_v2", (void *, size_t, unsigned))                                      \
    X(host_unregister, "cuMemHostUnregister", (void *))                                                       \
    X(stream_new, "cuStreamCreateWithPriority", (fc_stream *, unsigned, int))                                 \
    X(stream_free, "cuStreamDestroy_v2", (fc_stream))                                                         \
    X(copy_async, "cuMemcpyAsync", (uint64_t, uint64_t, size_t, fc_stream))                                   \
    X(stream_query, "cuStreamQuery", (fc_stream))                                                             \
    X(module_load, "cuModuleLoadData", (fc_module *, const void *))                                           \
    X(module_function, "cuModuleGetFunction", (fc_function *, fc_module, const char *))                       \
    X(launch, "cuLaunchKernel",                                                                               \
      (fc_function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, fc_stream, void **, \
       void **))                                                                                              \
    X(error_name, "cuGetErrorName", (fc_result, const char **))                                               \
    X(error_string, "cuGetErrorString", (fc_result, const char **))                                           \
    X(write_value, "cuStreamWriteValue64_v2", (fc_stream, uint64_t, uint64_t, unsigned))                      \
    X(wait_value32, "cuStreamWaitValue32_v2", (fc_stream, uint64_t, uint32_t, unsigned))

typedef struct fc_table {
/* NOLINTNEXTLINE(bugprone-macro-parentheses): a declaration is made of them */
#define X(name, symbol, arguments) fc_result(*name) arguments;
    FC_FUNCTIONS(X)
#undef X
} fc_table;

enum {                            /* values of the driver's enumerations that we use */
       FC_ATTR_SMS = 16,
       FC_ATTR_MAJOR = 75,
       FC_ATTR_MINOR = 76,
       FC_ATTR_STREAM_WORDS64 = 122, /* CAN_USE_64_BIT_STREAM_MEM_OPS, of the second version */
       FC_POINTER_MEMORY_TYPE = 2,   /* 1 host, 2 device */
       FC_POINTER_ORDINAL = 9,
       FC_HOST_PORTABLE = 1,
       FC_HOST_DEVICEMAP = 2,
       FC_STREAM_NON_BLOCKING = 1,
       FC_IPC_LAZY_PEERS = 1,
       FC_WAIT_GEQ = 0,
       FC_CAPTURE_RELAXED = 2,
       FC_E_OUT_OF_MEMORY = 2,
       FC_E_NOT_READY = 600,
};

/* NULL: no driver. */
const fc_table *fc_driver(void);
/* Makes the primary context of `device` current until fc_leave, and the thread's captures tolerant of what we do.
 * Creates that context at first use. 0 or a negative errno. */
typedef struct fc_entered {
    int mode;
} fc_entered;
int fc_enter(int device, fc_entered *e);
void fc_leave(fc_entered *e);
int fc_errno(fc_result r, const char *what);
/* Our kernels in the current context of `device`; loaded at first use. 0 or a negative errno. */
typedef struct fc_kernels {
    fc_function copy, pages, stay, bump;
    uint32_t sms;
    bool stream_words;
} fc_kernels;
int fc_kernels_of(int device, fc_kernels *out);

#endif
