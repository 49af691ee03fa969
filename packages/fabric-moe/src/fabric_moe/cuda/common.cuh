// What the kernels share: words between GPUs, waiting with a limit, numbers as they lie in memory.
//
// Compiled at run time for one shape (compile.py): RANKS, EXPERTS, TOPK, HIDDEN, ... and all offsets (layout.py) are
// macros. No header of CUDA is needed.
//
// Memory that peers write ("inbound") is divided alike on all ranks. Flags carry a number ("epoch") that counts uses of
// a slot and lives in device memory: a graph that is replayed needs nothing from the host.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define THREADS 512
#define WARPS (THREADS / 32)
#define CHUNKS ((TOPK + 31) / 32)
#define META_WORDS (3 * TOPK + 1) // local ids, places, weights, home

// What went wrong, for the host (report.py).
#define LOST 1
#define BAD_ID 2
#define BAD_LIVE 4
#define OVERFLOW 8
#define DISCARDED 16

struct Host {
    u32 code, epoch;
    u64 culprits; // bit r: rank r
    i64 first, second; // what is wrong: token and id; live and tokens; rows needed and rows there
};

// This rank's own words, which no peer writes.
struct Local {
    u32 epoch[16]; // of each slot
    u32 done[2]; // blocks of dispatch_send and combine_send that have ended
    u32 broken;
    u32 unreachable; // expert ids that were left out because their rank is masked, since the start
    u32 totals[64]; // rows of this step for each rank
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

__device__ __forceinline__ u64 region(const Common &c, int rank, u64 at) {
    return c.peers[rank] + at + c.slot * (u64)IN_STRIDE;
}

// ---- trouble ----------------------------------------------------------------------------------------------------

__device__ __forceinline__ void tell(const Common &c, u32 code, i64 first, i64 second) {
    if ((atomicOr_system(&c.host->code, code) & code) == 0) {
        c.host->first = first;
        c.host->second = second;
        c.host->epoch = c.local->epoch[c.slot];
        __threadfence_system();
    }
}

// The whole block: this rank takes no further step. Tells the host, and leaves a note with all others.
__device__ __forceinline__ void give_up(const Common &c, u64 culprits) {
    if (threadIdx.x == 0) {
        atomicOr(&c.local->broken, 1u);
        atomicOr_system(&c.host->culprits, culprits);
        if ((atomicOr_system(&c.host->code, LOST) & LOST) == 0) c.host->epoch = c.local->epoch[c.slot];
        __threadfence_system();
    }
    for (int r = threadIdx.x; r < RANKS; r += THREADS)
        if (r != (int)c.rank && (c.alive >> r & 1)) store_release(c.peers[r] + IN_NOTES + 8 * c.rank, culprits);
}

// Wait until a peer's word, of which `v` was read already, carries this epoch. One thread; false when the peer does not
// come, or has given up: then `missing` says because of whom.
__device__ __forceinline__ bool await(const Common &c, u64 flag, u64 v, int rank, u32 epoch, u32 *low, u64 *missing) {
    const u64 note = c.mine + IN_NOTES + 8 * rank;
    u64 begin = 0;
    for (u32 n = 0;; n++) {
        if (n) v = load_acquire((const void *)flag);
        if ((u32)(v >> 32) == epoch) {
            *low = (u32)v;
            return true;
        }
        if ((n & 15) == 0) {
            u64 t = now(), noted = *(volatile u64 *)note;
            if (n == 0) begin = t;
            if (noted || t - begin > c.limit) {
                *missing = noted ? noted : 1ull << rank;
                return false;
            }
        }
    }
}

// The whole block waits for one word of each rank that takes part. Returns whether all came, and the epoch.
__device__ __forceinline__ bool await_all(const Common &c, u64 flags, u32 *low, u32 *epoch) {
    __shared__ u64 missing_all;
    const u64 at = c.mine + flags + c.slot * (u64)IN_STRIDE;
    const u32 broken = c.local->broken, e = c.local->epoch[c.slot]; // these and the first look are under way together
    const int tid = threadIdx.x;
    u64 v = tid < RANKS ? load_acquire((const void *)(at + 8 * tid)) : 0;
    if (tid == 0) missing_all = 0;
    if (broken) return false;
    __syncthreads();
    if (tid < RANKS) {
        u64 missing = 0;
        low[tid] = 0;
        if ((c.alive >> tid & 1) && !await(c, at + 8 * tid, v, tid, e, low + tid, &missing))
            atomicOr(&missing_all, missing);
    }
    __syncthreads();
    *epoch = e;
    if (missing_all == 0) return true;
    give_up(c, missing_all);
    return false;
}

// The whole block is over. The last one of the grid returns true: what all blocks wrote happened before, by way of the
// counter, so that every GPU sees it that acquires what the last block then releases to the system.
__device__ __forceinline__ bool last_block(u32 *done) {
    __shared__ u32 last;
    __syncthreads();
    if (threadIdx.x == 0) {
        last = count_up(done) == gridDim.x - 1;
        if (last) *done = 0;
    }
    __syncthreads();
    return last;
}

// ---- the rows of a step, as a receiver goes through them --------------------------------------------------------

// Which source a row is of: rows are counted through all sources. `starts` has RANKS + 1 entries.
__device__ __forceinline__ int source_of(const u32 *starts, u32 row) {
    int s = 0;
#pragma unroll 8
    for (int r = 1; r < RANKS; r++) s += row >= starts[r];
    return s;
}

// What a warp knows of one row: for which of its own experts it is, and where each one's copy lies. Lane l holds slots
// l, l + 32, ... of the top-k.
struct Chosen {
    u32 mask[CHUNKS];
    i64 at[CHUNKS];
    float weight[CHUNKS];
    int id[CHUNKS];
    u32 place[CHUNKS];
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
}

// table: [source][expert] where the copies of an expert's rows begin; null: one copy for the row, at `alone`.
__device__ __forceinline__ void place_copies(Chosen &c, const u32 *table, int source, int held, i64 alone) {
#pragma unroll
    for (int k = 0; k < CHUNKS; k++) {
        if (table) {
            c.mask[k] = __ballot_sync(~0u, c.id[k] >= 0);
            c.at[k] = c.id[k] >= 0 ? (i64)table[source * held + c.id[k]] + c.place[k] : 0;
        } else {
            c.mask[k] = k == 0;
            c.at[k] = alone;
        }
    }
}

// How rows are shared out: a warp takes a part of a row, at most `most` parts, as many as keep all warps busy. Warps of
// different blocks come first, so that few rows spread over all multiprocessors.
struct Share {
    u32 items, parts, step;
    int span; // units of a part: a multiple of `grain`
    __device__ __forceinline__ Share(u32 rows, int units, int grain) {
        const int most = (units + grain - 1) / grain;
        parts = most;
        while (parts > 1 && (u64)rows * parts > 4ull * gridDim.x * WARPS) parts = (parts + 1) / 2;
        span = (most + parts - 1) / parts * grain;
        items = rows * parts;
        step = gridDim.x * WARPS;
    }
    __device__ __forceinline__ u32 first() const { return blockIdx.x + gridDim.x * (threadIdx.x / 32); }
};
