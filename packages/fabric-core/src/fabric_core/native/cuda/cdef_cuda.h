/* Declarations only, no preprocessor lines: also read by cffi. Needs stdint and stddef.
 *
 * The CUDA driver, loaded at run time: without it everything here answers -ENODEV, and nothing else changes. Errors are
 * negative errnos; fab_cuda_last_error has the driver's own words. */

typedef struct fab_cuda_device_info {
    char name[96];
    char pci[16];                 /* "0000:19:00.0" */
    uint8_t uuid[16];
    uint64_t memory;              /* bytes */
    uint32_t multiprocessors, compute_major, compute_minor;
    uint32_t stream_words;        /* 64-bit stream memory operations work */
} fab_cuda_device_info;

typedef struct fab_cuda_range {   /* what an address is */
    int32_t device;               /* -1: host memory */
    uint32_t pinned;              /* host memory that the driver knows */
    uint64_t base, size;          /* of its allocation; 0, 0 if the driver does not say */
} fab_cuda_range;

/* Loads the driver once. 0, or -ENODEV with a sentence in err. Thread-safe; makes no context. */
int fab_cuda_load(char *err, size_t cap);
int fab_cuda_version(void);       /* of the driver, e.g. 13000; 0: none */
int fab_cuda_devices(void);
int fab_cuda_describe(int device, fab_cuda_device_info *out);
int fab_cuda_what(uint64_t address, fab_cuda_range *out);
int fab_cuda_last_error(char *buf, size_t cap);

/* Memory of a GPU, for benchmarks and tests; copies between any two kinds of memory, done when it returns. */
int fab_cuda_alloc(int device, uint64_t bytes, uint64_t *out);
void fab_cuda_free(int device, uint64_t address);
int fab_cuda_pinned(int device, uint64_t bytes, uint64_t *out); /* host memory that GPUs reach */
void fab_cuda_unpinned(int device, uint64_t address);
int fab_cuda_copy(int device, uint64_t to, uint64_t from, uint64_t bytes);

/* A zeroed word (FAB_CUDA_WORD bytes of its own) in host memory that all GPUs reach under the same address. 0: none to be
 * had. The memory behind them stays for the process's life, so that a GPU that writes late hits no other memory. */
uint64_t fab_cuda_word_new(int device);
void fab_cuda_word_free(uint64_t word);

/* On `stream` (0: the default one) of `device`, in its order; also while it is being captured into a graph. `wait` holds
 * the stream until the word's low half, which in a flag counts all ends, is at least `value` (below 2^31: the GPU compares
 * as on a circle); `add` runs a kernel of one thread. */
int fab_cuda_stream_write(int device, uint64_t stream, uint64_t word, uint64_t value);
int fab_cuda_stream_wait(int device, uint64_t stream, uint64_t word, uint32_t value);
int fab_cuda_stream_add(int device, uint64_t stream, uint64_t word, uint64_t by);
