/* gpu_clock.cu - what tools/bench/gpu.py needs on the GPU: stores with their time, and one clock for both sides.
 *
 * %globaltimer and CLOCK_MONOTONIC are aligned by numbered requests: the CPU notes t0 and writes a number, a kernel that
 * polls it notes g and answers, the CPU notes t1. The offset lies between max(t0 - g) and min(t1 - g); half of what is
 * between them is the error, which is common to all latencies of a run.
 *
 * nvcc -O2 -arch=native -shared -Xcompiler -fPIC -I<fabric_core.get_include()> -o libgpu_clock.so gpu_clock.cu */
#include "fabric/engine.h"

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <ctime>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))
#define CK(x) do { cudaError_t e_ = (x); if (e_) return -(int)e_; } while (0)

static int64_t now() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ll + t.tv_nsec;
}
__device__ static uint64_t gtime() {
    uint64_t t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}
__device__ static uint64_t load(const uint64_t *p) {
    uint64_t v;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
__device__ static void store(uint64_t *p, uint64_t v) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

/* ---- clocks ---------------------------------------------------------------------------------- */
__global__ static void echo(const uint64_t *request, uint64_t *answer, uint64_t *g, int n) {
    for (int i = 1; i <= n; i++) {
        while (load(request) < (uint64_t)i) {}
        uint64_t t = gtime();
        store(answer, i);
        g[i - 1] = t;
    }
}

static cudaStream_t stream;
static uint64_t *request, *answer, *gtimes;
enum { ROUNDS = 3000, SKIP = 20 };

static int prepare() {
    if (stream) return 0;
    CK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CK(cudaHostAlloc(&request, 4096, cudaHostAllocMapped));
    CK(cudaHostAlloc(&answer, 4096, cudaHostAllocMapped));
    CK(cudaMalloc(&gtimes, 8 * ROUNDS));
    return 0;
}

/* cpu - gpu in ns, and how far off it may be */
EXPORT int clock_offset(int64_t *offset, int64_t *error) {
    CK((cudaError_t)-prepare());
    *request = *answer = 0;
    echo<<<1, 1, 0, stream>>>(request, answer, gtimes, ROUNDS);
    CK(cudaGetLastError());
    std::vector<int64_t> t0(ROUNDS), t1(ROUNDS);
    std::vector<uint64_t> g(ROUNDS);
    for (int i = 0; i < ROUNDS; i++) {
        t0[i] = now();
        ((std::atomic<uint64_t> *)request)->store(i + 1);
        while (((std::atomic<uint64_t> *)answer)->load() < (uint64_t)(i + 1)) {}
        t1[i] = now();
    }
    CK(cudaStreamSynchronize(stream));
    CK(cudaMemcpy(g.data(), gtimes, 8 * ROUNDS, cudaMemcpyDefault));
    int64_t low = INT64_MIN, high = INT64_MAX;
    for (int i = SKIP; i < ROUNDS; i++) {
        if (t0[i] - (int64_t)g[i] > low) low = t0[i] - (int64_t)g[i];
        if (t1[i] - (int64_t)g[i] < high) high = t1[i] - (int64_t)g[i];
    }
    *offset = low + (high - low) / 2;
    *error = (high - low) / 2;
    return 0;
}

/* ---- a graph that bumps a word ------------------------------------------------------------------- */
__global__ static void work(uint64_t ns) { /* on every SM, as a layer would be */
    uint64_t until = gtime() + ns;
    while (gtime() < until) {}
}
__global__ static void bump(uint64_t *word, uint64_t *count, uint64_t *stamps) {
    uint64_t n = ++*count;
    uint64_t t = gtime();
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"(n) : "memory");
    stamps[n - 1] = t;
}

/* `total` bumps of `word` by graphs of 40 layers, each `ns` long: stamps in GPU time. Blocks. */
EXPORT int bump_run(uint64_t word, int total, uint64_t ns, uint64_t *stamps_out) {
    CK((cudaError_t)-prepare());
    int sms = 0;
    uint64_t *stamps, *count;
    CK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
    CK(cudaMalloc(&stamps, 8ull * total));
    CK(cudaMalloc(&count, 8));
    CK(cudaMemset(count, 0, 8));
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < 40; i++) {
        work<<<sms, 128, 0, stream>>>(ns);
        bump<<<1, 1, 0, stream>>>((uint64_t *)word, count, stamps);
    }
    CK(cudaStreamEndCapture(stream, &graph));
    CK(cudaGraphInstantiate(&exec, graph, 0));
    for (int i = 0; i < total / 40; i++) CK(cudaGraphLaunch(exec, stream));
    CK(cudaStreamSynchronize(stream));
    CK(cudaMemcpy(stamps_out, stamps, 8ull * total, cudaMemcpyDefault));
    CK(cudaGraphExecDestroy(exec));
    CK(cudaGraphDestroy(graph));
    CK(cudaFree(stamps));
    CK(cudaFree(count));
    return 0;
}

/* ---- a native callback of the engine's watcher ------------------------------------------------------ */
static int64_t *seen_at;
static int seen_max;
static void on_change(void *, uint64_t old_value, uint64_t new_value) {
    int64_t t = now();
    for (uint64_t v = old_value; v < new_value && v < (uint64_t)seen_max; v++) seen_at[v] = t;
}
EXPORT int64_t native_watch(const fab_native_table *table, fab_engine *engine, uint64_t word, int total) {
    seen_max = total;
    seen_at = (int64_t *)calloc(total, 8);
    uint64_t unused;
    return table->watch_add(engine, word, on_change, nullptr, &unused);
}
EXPORT int64_t *native_seen() { return seen_at; }
EXPORT int64_t monotonic() { return now(); }

/* ---- a kernel starts a transfer and waits for its arrival ------------------------------------------------ */
/* ADD: a fence and an addition, as prepared transfers ask for; STORE: by the word's only writer, a store with release;
 * STAMPED: as ADD, behind a stamp that is written to GPU memory. A template: with a branch between them, the one that lies
 * behind would be measured with one more fetch of instructions. */
enum { ADD, STORE, STAMPED };
template <int HOW>
__global__ static void start_and_wait(uint64_t *word, uint64_t next, const uint64_t *flag, uint64_t until, int rounds,
                                      uint64_t pause, uint64_t *out) {
    for (int i = 0; i < rounds; i++) {
        uint64_t from = gtime();
        while (i && gtime() < from + pause) {} /* the next expectation is there already */
        from = gtime();
        if (HOW == STAMPED) *(volatile uint64_t *)out = from;
        if (HOW == STORE) {
            asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"(next + i) : "memory");
        } else {
            asm volatile("fence.acq_rel.sys;" ::: "memory");
            asm volatile("red.relaxed.sys.global.add.u64 [%0], %1;" ::"l"(word), "l"(1ull) : "memory");
        }
        while (load(flag) < until + i) {}
        out[i] = gtime() - from;
    }
}
/* `rounds` times in one kernel, at least `pause` ns apart: ns of each. */
EXPORT int proxy_run(uint64_t word, uint64_t next, int how, uint64_t flag, uint64_t until, int rounds, uint64_t pause,
                     uint64_t *ns) {
    CK((cudaError_t)-prepare());
    auto kernel = how == ADD ? start_and_wait<ADD> : how == STORE ? start_and_wait<STORE> : start_and_wait<STAMPED>;
    kernel<<<1, 1, 0, stream>>>((uint64_t *)word, next, (const uint64_t *)flag, until, rounds, pause, gtimes);
    CK(cudaStreamSynchronize(stream));
    CK(cudaMemcpy(ns, gtimes, 8 * rounds, cudaMemcpyDefault));
    return 0;
}

/* A thread that does nothing but look at the clock for `seconds`: how long it was away each time, if over a microsecond.
 * Returns how often; `gaps` gets the first `cap` of them, in ns. */
EXPORT int clock_gaps(double seconds, int64_t *gaps, int cap) {
    int64_t end = now() + (int64_t)(seconds * 1e9), last = now();
    int n = 0;
    while (last < end) {
        int64_t t = now(), gap = t - last;
        if (gap > 1000 && n++ < cap) gaps[n - 1] = gap;
        last = t;
    }
    return n;
}
