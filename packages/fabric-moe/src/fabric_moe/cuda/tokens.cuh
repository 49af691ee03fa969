// What both ways to send tokens share: which experts they name, how many rows and copies come before, the end of a
// block.

#define VEC widest(TOKEN_BYTES, 16)
#define VECS (TOKEN_BYTES / VEC)
#define AHEAD 4 // vectors of a lane that are under way at a time
#define AT_ONCE 8 // ids of a token, likewise
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
__device__ COLD void complain(const SendArgs &a, i64 id, int t) {
    if (id < -1 || id >= EXPERTS) tell(a.c, BAD_ID, t, id);
    else atomicAdd(&a.c.local->unreachable, 1u);
}
// The same, and what is wrong with it is reported.
__device__ __forceinline__ int checked(const SendArgs &a, i64 id, int t) {
    const int e = reachable(a, id);
    if (e < 0 && id != -1) complain(a, id, t);
    return e;
}
__device__ COLD int bad_live(const SendArgs &a, int live) {
    if (blockIdx.x == 0 && threadIdx.x == 0) tell(a.c, BAD_LIVE, live, a.tokens);
    return live < 0 ? 0 : a.tokens;
}
__device__ __forceinline__ int live_tokens(const SendArgs &a) {
    const int live = a.live ? *a.live : a.tokens;
    return live < 0 || live > a.tokens ? bad_live(a, live) : live;
}

// How many rows and copies the tokens before the block's take. `some`: the first ids of token `tid`, read already.
__device__ __forceinline__ void count_before(const SendArgs &a, int before, i64 *some, u32 *hist, u32 *rows) {
    const int tid = threadIdx.x, lane = tid & 31;
    u32 seen[RANK_CHUNKS] = {};
#pragma unroll 1
    for (int base = tid - lane; base < before; base += THREADS) {
        u64 m = 0;
        if (base + lane < before)
#pragma unroll 1
            for (int j = 0; j < TOPK; j += AT_ONCE) {
                if (j || base >= THREADS) {
#pragma unroll
                    for (int i = 0; i < AT_ONCE; i++) some[i] = j + i < TOPK ? raw_id(a, base + lane, j + i) : -1;
                }
#pragma unroll
                for (int i = 0; i < AT_ONCE; i++) {
                    int e = reachable(a, some[i]);
                    if (e < 0) continue;
                    atomicAdd(hist + e, 1u);
                    m |= 1ull << owner(e);
                }
            }
#pragma unroll
        for (int d = 0; d < RANKS; d++) {
            u32 n = __popc(__ballot_sync(~0u, m >> d & 1));
            if (lane == (d & 31)) seen[d / 32] += n;
        }
    }
#pragma unroll
    for (int n = 0; n < RANK_CHUNKS; n++)
        if (n * 32 + lane < RANKS && seen[n]) atomicAdd(rows + n * 32 + lane, seen[n]);
}

// The end of a block. The last one has no token of its own, and has seen all: it says how many rows each rank gets, and
// each expert.
__device__ __forceinline__ void rows_are_sent(const Common &c, u32 epoch, const u64 *peers, const u32 *hist) {
    const u32 *rows = hist + EXPERTS;
    const int tid = threadIdx.x;
    const bool last = blockIdx.x == gridDim.x - 1;
    if (last)
        for (int e = tid; e < EXPERTS; e += THREADS) {
            const int d = owner(e);
            if (c.alive >> d & 1)
                ((u32 *)(peers[d] + IN_COUNTS + c.slot * (u64)IN_STRIDE))[c.rank * HELD + e - first_of(d)] = hist[e];
        }
    const bool told = tid < RANKS && (c.alive >> tid & 1);
    const u64 flags = (told ? peers[tid] : 0) + IN_ROW_FLAGS + c.slot * (u64)IN_STRIDE + 8 * c.rank * ROW_PARTS;
    const u64 word = (u64)epoch << 32;
#if ROW_PARTS > 1
    __syncthreads();
    if (told) store_release(flags + (last ? 0 : 8 * (blockIdx.x + 1)), last ? word | rows[tid] : word);
    if (last && told) // for the blocks that a step of fewer tokens does not have
        for (int p = gridDim.x; p < ROW_PARTS; p++) store_relaxed(flags + 8 * p, word);
    if (last && tid == 0) c.local->epoch[c.slot] = epoch;
#else
    if (last && tid < RANKS) c.local->totals[tid] = rows[tid];
    if (last_block(&c.local->done[0])) {
        if (told) store_release(flags, word | *(volatile u32 *)&c.local->totals[tid]);
        if (tid == 0) c.local->epoch[c.slot] = epoch;
    }
#endif
}
