// What both ways to send tokens share: which experts they name, how many rows and copies come before, the end of a
// block.

#define VEC widest(TOKEN_BYTES, 16)
#define VECS (TOKEN_BYTES / VEC)
#define AHEAD 4 // vectors of a lane that are under way at a time
typedef Bits<VEC>::type Vec;
#if SCALE_BYTES
#    define SVEC widest(SCALE_BYTES, 16)
#    define SVECS (SCALE_BYTES / SVEC)
typedef Bits<SVEC>::type Svec;
#endif

struct SendArgs {
    Common c;
    const u8 *x;
    const u8 *scales;
    const void *ids;
    const float *weights; // null: 1
    const int *live; // null: all
    int tokens, given; // rows, and ids of each
    int wide; // ids are of 64 bits
    int each; // tokens of a block
    int split; // of dispatch_one.cu: 2^split blocks share a token
};

__device__ __forceinline__ i64 raw_id(const SendArgs &a, int t, int j) {
    if (j >= a.given) return -1;
    i64 at = (i64)t * a.given + j;
    return a.wide ? ((const i64 *)a.ids)[at] : ((const int *)a.ids)[at];
}
__device__ __forceinline__ float weight_at(const SendArgs &a, int t, int j) {
    return a.weights && j < a.given ? a.weights[(i64)t * a.given + j] : 1.f;
}
// The expert, of ours or of another rank that takes part, else -1.
__device__ __forceinline__ int reachable(const SendArgs &a, i64 id) {
    return id >= 0 && id < EXPERTS && (a.c.alive >> owner((int)id) & 1) ? (int)id : -1;
}
// What is wrong with an id.
__device__ COLD void complain(const SendArgs &a, i64 id, int t) {
    if (id < -1 || id >= EXPERTS) tell(a.c, BAD_ID, t, id);
    else atomicAdd(&a.c.local->unreachable, 1u);
}
// How many tokens count. What is wrong with the number is said at a block's end (bad_live): a call here would cost all.
__device__ __forceinline__ int live_tokens(const SendArgs &a, int live) {
    return live < 0 ? 0 : live > a.tokens ? a.tokens : live;
}
__device__ COLD void bad_live(const SendArgs &a, int live) {
    if (blockIdx.x == 0 && threadIdx.x == 0) tell(a.c, BAD_LIVE, live, a.tokens);
}

// ---- how many rows and copies the tokens before a block's take -------------------------------------------------------

#define GROUP (TOPK <= 1 ? 1 : TOPK <= 2 ? 2 : TOPK <= 4 ? 4 : TOPK <= 8 ? 8 : TOPK <= 16 ? 16 : 32) // lanes of a token
template <bool WIDE> struct Set { // of ranks
    typedef u32 type;
};
template <> struct Set<true> {
    typedef u64 type;
};
typedef Set<(RANKS > 32)>::type Ranks;

// Ids of tokens as lanes read them: GROUP lanes of WIDTH threads take a token, N times over.
template <int N, int WIDTH> struct Before {
    static const int PASS = WIDTH / GROUP, ALL = N * PASS;
    i64 id[N];
    __device__ __forceinline__ void read(const SendArgs &a, int base, int before) {
        const int t = base + (int)threadIdx.x / GROUP, j = threadIdx.x % GROUP;
        const u64 at = (u64)t * a.given + j, step = (u64)PASS * a.given;
        const bool mine = j < TOPK && j < a.given;
        if (a.wide) {
#pragma unroll
            for (int i = 0; i < N; i++)
                id[i] = mine && t + i * PASS < before ? ((const i64 *)a.ids)[at + i * step] : -1;
        } else {
#pragma unroll
            for (int i = 0; i < N; i++)
                id[i] = mine && t + i * PASS < before ? ((const int *)a.ids)[at + i * step] : -1;
        }
    }
    // The ranks of a token are put together by its lanes, each of which then counts for some of the ranks.
    static __device__ __forceinline__ void add(int e, u32 *hist, u32 *rows) {
        Ranks m = e >= 0 ? (Ranks)1 << owner(e) : 0;
        if (e >= 0) atomicAdd(hist + e, 1u);
#pragma unroll
        for (int d = 1; d < GROUP; d *= 2) m |= __shfl_xor_sync(~0u, m, d);
        for (int d = threadIdx.x % GROUP; d < RANKS; d += GROUP)
            if (m >> d & 1) atomicAdd(rows + d, 1u);
    }
    // Counts the first `before` tokens. The first ALL of them have been read; more than those are read here.
    __device__ __forceinline__ void count(const SendArgs &a, int before, u32 *hist, u32 *rows) {
        const int own = threadIdx.x / GROUP;
#pragma unroll 1
        for (int base = 0; base < before; base += ALL) {
            int e[N];
#pragma unroll
            for (int i = 0; i < N; i++) e[i] = base + own + i * PASS < before ? reachable(a, id[i]) : -1;
            if (base + ALL < before) read(a, base + ALL, before); // under way while these are counted
            add(e[0], hist, rows);
            if (base + PASS < before) {
#pragma unroll
                for (int i = 1; i < N; i++) add(e[i], hist, rows);
            }
        }
    }
};
#if CHUNKS > 1 // a warp does not hold a token's ids
__device__ __forceinline__ void count_long(const SendArgs &a, int before, u32 *hist, u32 *rows) {
    for (int t = threadIdx.x; t < before; t += THREADS) {
        Ranks m = 0;
        for (int j = 0; j < TOPK; j++) {
            const int e = reachable(a, raw_id(a, t, j));
            if (e < 0) continue;
            atomicAdd(hist + e, 1u);
            m |= (Ranks)1 << owner(e);
        }
        for (int d = 0; d < RANKS; d++)
            if (m >> d & 1) atomicAdd(rows + d, 1u);
    }
}
#endif

// The end of a block. The last ones have no token of their own, and have seen all: they say how many rows each rank gets,
// and each expert. `there`: blocks with tokens, or groups of those that share tokens, `index`: which of them this one is.
// `peer`: of rank threadIdx.x. `split`: a block serves the ranks that end on its number in so many bits.
__device__ __forceinline__ void rows_are_sent(const Common &c, u32 epoch, u64 peer, const u32 *hist, u32 there,
                                              u32 index, int split) {
    const u32 *rows = hist + EXPERTS;
    const int tid = threadIdx.x, part = blockIdx.x & ((1u << split) - 1);
    const bool last = index == there, mine = ((tid ^ part) & ((1 << split) - 1)) == 0;
    if (last) {
        for (int e = tid; e < EXPERTS; e += blockDim.x) {
            const int d = owner(e);
            if ((c.alive >> d & 1) && ((d ^ part) & ((1 << split) - 1)) == 0)
                ((u32 *)(c.peers[d] + IN_COUNTS + c.slot * (u64)IN_STRIDE))[c.rank * HELD + e - first_of(d)] = hist[e];
        }
        if (tid == 0 && part == 0) c.local->epoch[c.slot] = epoch; // no block of this kernel reads it
    }
#if ROW_PARTS
    tell_all<ROW_PARTS>(c, IN_ROW_FLAGS, peer, last, there, index, epoch, tid < RANKS ? rows[tid] : 0, mine);
#else
    if (last && mine && tid < RANKS) c.local->totals[tid] = rows[tid];
    if (last_block(&c.local->done[0]) && tid < RANKS && (c.alive >> tid & 1))
        store_release(peer + IN_ROW_FLAGS + c.slot * (u64)IN_STRIDE + 8 * c.rank,
                      (u64)epoch << 32 | *(volatile u32 *)&c.local->totals[tid]);
#endif
}
