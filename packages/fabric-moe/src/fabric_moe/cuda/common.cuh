// What the kernels share: words between GPUs, numbers as they lie in memory, the rows of a step.
//
// Compiled at run time for one shape (compile.py): RANKS, EXPERTS, TOPK, HIDDEN, ... and all offsets (layout.py) are
// macros. No header of CUDA is needed.
//
// Memory that peers write ("inbound") is divided alike on all ranks. Flags carry a number ("epoch") that counts uses of
// a slot and lives on the GPU: a graph that is replayed needs nothing from the host.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define THREADS 512 // of a block, at most
#define WARPS (THREADS / 32)
#define CHUNKS ((TOPK + 31) / 32)
#define RANK_CHUNKS ((RANKS + 31) / 32)
#define COLD __noinline__ // what is seldom run lies apart: the rest fits better into the caches of instructions
#define META_WORDS (3 * TOPK + 1) // local ids, places, weights, home

// What a kernel may have to say, besides that a peer did not come (report.py).
#define BAD_ID 0
#define BAD_LIVE 1
#define OVERFLOW 2
#define DISCARDED 3

#define FLAG_DISCARDED 16 // beside an epoch: this rank computes nothing for the step

// In pinned memory. Each word is written by one side only, and none by an atomic operation, which PCIe may not have.
struct Host {
    u32 lost, lost_epoch; // a peer did not come; never set back
    u64 culprits; // bit r: rank r
    u32 told[4], heard[4], epoch[4]; // of each kind: how often kernels said it, and the host has read it
    i64 first[4], second[4]; // token and id; live and tokens; rows needed and rows there; ranks
};

// This rank's own words, which no peer writes.
struct Local {
    u32 epoch[16]; // of each slot
    u32 done[2]; // blocks of dispatch_send and combine_send that have ended
    u32 broken;
    u32 unreachable; // expert ids that were left out because their rank is masked, since the start
    u32 totals[64]; // rows of this step for each rank
    u32 claimed[4]; // as Host::told, by who is about to say it
    u64 culprits; // as there
    u32 begun[16]; // as epoch: what dispatch_send counts from, which is not written while its blocks read it
};

struct Common {
    const u64 *peers; // inbound memory of each rank
    u64 mine; // and of this one
    Local *local;
    u8 *turns; // [MAX_TOKENS] of this slot: ranks that each token went to
    Host *host;
    u64 alive; // bit r: rank r takes part
    u64 limit; // ns that a kernel waits for a peer
    u32 rank, slot;
};

__device__ __forceinline__ u64 load_acquire(const void *at) {
    u64 v;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(at) : "memory");
    return v;
}
__device__ __forceinline__ void store_release(u64 at, u64 v) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(at), "l"(v) : "memory");
}
// For words that nothing else is read or written by the leave of.
__device__ __forceinline__ void store_relaxed(u64 at, u32 v) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(at), "r"(v) : "memory");
}
__device__ __forceinline__ void store_four_relaxed(u64 at, u32 v) {
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %1, %1, %1};" ::"l"(at), "r"(v) : "memory");
}
__device__ __forceinline__ uint4 load_four_acquire(u64 at) {
    uint4 v;
    asm volatile("ld.acquire.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(at)
                 : "memory");
    return v;
}
__device__ __forceinline__ void store_mark(u64 at, u32 v) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(at), "r"(v) : "memory");
}
__device__ __forceinline__ u64 now() {
    u64 t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}
__device__ __forceinline__ u32 count_up(u32 *at) {
    u32 old;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(old) : "l"(at) : "memory");
    return old;
}

// Bytes that one thread moves at a time.
template <int N> struct Bits;
template <> struct Bits<16> {
    typedef uint4 type;
};
template <> struct Bits<8> {
    typedef uint2 type;
};
template <> struct Bits<4> {
    typedef u32 type;
};
template <> struct Bits<2> {
    typedef u16 type;
};
template <> struct Bits<1> {
    typedef u8 type;
};

__host__ __device__ constexpr int widest(int bytes, int most) {
    return bytes % most == 0 || most == 1 ? most : widest(bytes, most / 2);
}

__device__ __forceinline__ int owner(int expert) {
#if EACH == 0
    return expert;
#else
    return expert < MORE * (EACH + 1) ? expert / (EACH + 1) : MORE + (expert - MORE * (EACH + 1)) / EACH;
#endif
}
__device__ __forceinline__ int first_of(int rank) { return rank * EACH + (rank < MORE ? rank : MORE); }

// ---- the rows of a step, as a receiver goes through them --------------------------------------------------------

// Where the rows of each source begin, if they are counted through all sources. A warp's: lane l knows sources l and
// l + 32.
struct Sources {
    u32 upto[RANK_CHUNKS], rows[RANK_CHUNKS], all;
    __device__ __forceinline__ explicit Sources(const u32 *counted) {
        const int lane = threadIdx.x & 31;
        all = 0;
#pragma unroll
        for (int k = 0; k < RANK_CHUNKS; k++) {
            u32 n = rows[k] = k * 32 + lane < RANKS ? counted[k * 32 + lane] : 0;
#pragma unroll
            for (int d = 1; d < (RANKS < 32 ? RANKS : 32); d *= 2) {
                const u32 left = __shfl_up_sync(~0u, n, d);
                if (lane >= d) n += left;
            }
            upto[k] = k * 32 + lane < RANKS ? all + n : ~0u;
            all += __shfl_sync(~0u, n, (RANKS < 32 ? RANKS : 32) - 1);
        }
    }
    __device__ __forceinline__ int of(u32 row) const {
        int s = 0;
#pragma unroll
        for (int k = 0; k < RANK_CHUNKS; k++) s += __popc(__ballot_sync(~0u, upto[k] <= row));
        return s;
    }
    __device__ __forceinline__ u32 begin(int s) const {
        u32 at = __shfl_sync(~0u, upto[0] - rows[0], s & 31);
#pragma unroll
        for (int k = 1; k < RANK_CHUNKS; k++) {
            const u32 other = __shfl_sync(~0u, upto[k] - rows[k], s & 31);
            if (s >= 32) at = other;
        }
        return at;
    }
};

// What a warp knows of one row: for which of its own experts it is, and where each one's copy lies. Lane l holds slots
// l, l + 32, ... of the top-k.
struct Chosen {
    u32 mask[CHUNKS];
    u32 at[CHUNKS];
    float weight[CHUNKS];
    int id[CHUNKS];
    u32 place[CHUNKS];
    u32 home;
};

// What travels with a row, as its receiver reads it.
__device__ __forceinline__ void read_meta(Chosen &c, const u32 *meta) {
    int lane = threadIdx.x & 31;
#pragma unroll
    for (int k = 0; k < CHUNKS; k++) {
        int j = k * 32 + lane;
        c.id[k] = j < TOPK ? (int)meta[j] : -1;
        c.place[k] = j < TOPK ? meta[TOPK + j] : 0;
        c.weight[k] = j < TOPK ? __uint_as_float(meta[2 * TOPK + j]) : 0.f;
    }
    c.home = meta[3 * TOPK];
}

// What combine_send does with a row, as dispatch_recv found it out: where the sum goes (two words), where the copies
// for each of its top-k lie (~0: none here), their weights.
#define PLAN_WORDS (2 * TOPK + 2)
__device__ __forceinline__ void plan_row(u32 *plan, const Chosen &c, u64 sums) {
    const int lane = threadIdx.x & 31;
    if (lane == 0) *(u64 *)plan = sums + (u64)c.home * SUM_BYTES;
#pragma unroll
    for (int k = 0; k < CHUNKS; k++) {
        const int j = k * 32 + lane;
        if (j >= TOPK) break;
        plan[2 + j] = c.mask[k] >> lane & 1 ? c.at[k] : ~0u;
        plan[2 + TOPK + j] = __float_as_uint(c.weight[k]);
    }
}
struct Planned {
    u64 sum;
    u32 at[CHUNKS];
    float weight[CHUNKS];
    __device__ __forceinline__ void read(const u32 *plan) {
        const int lane = threadIdx.x & 31;
        sum = *(const u64 *)plan;
#pragma unroll
        for (int k = 0; k < CHUNKS; k++) {
            const int j = k * 32 + lane;
            at[k] = j < TOPK ? plan[2 + j] : ~0u;
            weight[k] = j < TOPK ? __uint_as_float(plan[2 + TOPK + j]) : 0.f;
        }
    }
};

// How rows are shared out: a warp takes a part of a row, of `FINE` parts if that gives no warp more than ROUNDS of them,
// else of a power of two. Warps of different blocks come first, so that few rows spread over all multiprocessors.
template <int WHOLE, int GRAIN, int ROUNDS> struct Share { // units of a row, of the smallest part
    static const u32 FINE = (WHOLE + GRAIN - 1) / GRAIN;
    u32 step;
    int log; // -1: FINE parts
    __device__ __forceinline__ explicit Share(u32 rows, bool whole = false) { // whole: rows are not divided
        step = gridDim.x * (blockDim.x / 32);
        log = -1;
        if (FINE == 1 || (!whole && (u64)rows * FINE <= (u64)ROUNDS * step)) return;
        log = whole ? 0 : 31 - __clz(FINE - 1);
        while (log && (u64)rows << log > (u64)ROUNDS * step) log--;
    }
    __device__ __forceinline__ bool fine() const { return log < 0; }
    __device__ __forceinline__ u32 parts() const { return log < 0 ? FINE : 1u << log; }
    __device__ __forceinline__ u32 row(u32 item) const { return log < 0 ? item / FINE : item >> log; }
    __device__ __forceinline__ int low(u32 item) const { // where the part begins
        return (int)(log < 0 ? item % FINE * GRAIN : (item & ((1u << log) - 1)) * span());
    }
    __device__ __forceinline__ int span() const {
        return log < 0 ? GRAIN : (int)((FINE + (1u << log) - 1) >> log) * GRAIN;
    }
    __device__ __forceinline__ u32 first() const { return blockIdx.x + gridDim.x * (threadIdx.x / 32); }
};
