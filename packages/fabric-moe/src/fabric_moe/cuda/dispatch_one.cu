// Dispatch of few tokens: a block for each, or some that share it, each for some of the ranks: a page of memory costs a
// while where a multiprocessor meets it first, such waits add up, and each rank has pages of its own. Every warp knows all
// about the token: lane l its l-th expert, and where the row for rank l goes.

#define ALONE 256 // threads of a block

#if CHUNKS == 1
extern "C" __global__ void __launch_bounds__(ALONE, 2) moe_dispatch_send_one(const __grid_constant__ SendArgs a) {
    extern __shared__ u64 shared[];
    const Common &c = a.c;
    const int tid = threadIdx.x, lane = tid & 31, few = (1 << a.split) - 1, part = blockIdx.x & few;
    const int t = blockIdx.x >> a.split;
    u32 *hist = (u32 *)shared, *rows = hist + EXPERTS;
    // All that can be read is under way at once, before it is known how many tokens count.
    const u32 broken = c.local->broken, epoch = c.local->begun[c.slot] + 1;
    const int said = a.live ? *a.live : a.tokens;
    Before<4, ALONE> some;
    some.read(a, 0, t < a.tokens ? t : a.tokens);
    const bool carried = t < a.tokens, given = carried && lane < TOPK;
    const i64 id = given ? raw_id(a, t, lane) : -1;
    const float weight = given ? weight_at(a, t, lane) : 1.f;
    u64 peer[RANK_CHUNKS];
#    pragma unroll
    for (int k = 0; k < RANK_CHUNKS; k++) peer[k] = k * 32 + lane < RANKS ? c.peers[k * 32 + lane] : 0;
    Vec ahead[AHEAD];
    const Vec *x = (const Vec *)(a.x + (i64)t * TOKEN_BYTES);
#    pragma unroll
    for (int i = 0; i < AHEAD; i++)
        if (carried && tid + i * ALONE < VECS) ahead[i] = x[tid + i * ALONE];
#    if SCALE_BYTES
    const Svec *scales = (const Svec *)(a.scales + (i64)t * SCALE_BYTES);
    const int from_end = ALONE - 1 - tid; // scales are carried by those that have least of the token
    Svec scale_ahead;
    if (carried && from_end < SVECS) scale_ahead = scales[from_end];
#    endif
    for (int i = tid; i < EXPERTS + RANKS; i += ALONE) hist[i] = 0;
    if (broken) return;
    __syncthreads(); // what is read is still under way
    const int live = live_tokens(a, said);
    some.count(a, t < live ? t : live, hist, rows);
    const int e = given && t < live ? reachable(a, id) : -1, home = e >= 0 ? owner(e) : -1;
    const int local = e >= 0 ? e - first_of(home) : -1;
    Ranks all = e >= 0 ? (Ranks)1 << home : 0;
#    pragma unroll
    for (int d = 1; d < GROUP; d *= 2) all |= __shfl_xor_sync(~0u, all, d);
    if (part == 0 && tid == 0 && given) c.turns[t] = (u8)__popcll(all);
    __syncthreads();

    const u64 inbound = c.slot * (u64)IN_STRIDE;
    const u32 earlier = e >= 0 ? hist[e] : 0; // copies for this expert, of tokens before
    u64 row_at[RANK_CHUNKS], meta_at[RANK_CHUNKS]; // for rank `lane`
#    pragma unroll
    for (int k = 0; k < RANK_CHUNKS; k++) {
        const u64 slot = (u64)c.rank * MAX_TOKENS + (k * 32 + lane < RANKS ? rows[k * 32 + lane] : 0);
        row_at[k] = peer[k] + inbound + IN_ROWS + slot * ROW_BYTES;
        meta_at[k] = peer[k] + inbound + IN_META + slot * META_BYTES;
    }
    const Ranks ranks = __shfl_sync(~0u, all, 0);
    const u32 pattern = __ballot_sync(~0u, ((lane ^ part) & few) == 0);
    const Ranks mine = RANKS > 32 ? (Ranks)((u64)pattern << 32 | pattern) : (Ranks)pattern;
#    pragma unroll 1
    for (Ranks left = ranks & mine; left; left &= left - 1) {
        const int d = RANKS > 32 ? __ffsll((i64)left) - 1 : __ffs((u32)left) - 1, high = RANKS > 32 && d >= 32;
        const int n = __popcll(ranks & (((Ranks)1 << d) - 1));
        u8 *row = (u8 *)__shfl_sync(~0u, row_at[high ? RANK_CHUNKS - 1 : 0], d & 31);
#    pragma unroll
        for (int i = 0; i < AHEAD; i++)
            if (tid + i * ALONE < VECS) ((Vec *)row)[tid + i * ALONE] = ahead[i];
        for (int v = tid + AHEAD * ALONE; v < VECS; v += ALONE) ((Vec *)row)[v] = x[v];
#    if SCALE_BYTES
        for (int v = from_end; v < SVECS; v += ALONE)
            ((Svec *)(row + SCALE_AT))[v] = v == from_end ? scale_ahead : scales[v];
#    endif
        if (n % (ALONE / 32) == tid / 32) {
            u32 same = 0; // copies for this expert, of this token before
#    pragma unroll
            for (int i = 0; i < TOPK; i++) {
                const u32 like = __ballot_sync(~0u, e == __shfl_sync(~0u, e, i)) & ((1u << i) - 1);
                if (lane == i) same = __popc(like);
            }
            u32 *meta = (u32 *)__shfl_sync(~0u, meta_at[high ? RANK_CHUNKS - 1 : 0], d & 31);
            if (lane < TOPK) {
                meta[lane] = home == d ? local : -1;
                meta[TOPK + lane] = earlier + same;
                meta[2 * TOPK + lane] = __float_as_uint(weight);
            }
            if (lane == 0) meta[3 * TOPK] = t * FAN + n;
        }
    }
    rows_are_sent(c, epoch, tid < 32 ? peer[0] : peer[RANK_CHUNKS - 1], hist, (gridDim.x >> a.split) - 1, t, a.split);
    if (part == 0 && tid < 32 && given && e < 0 && id != -1 && t < live) complain(a, id, t);
    if (said != live) bad_live(a, said);
}
#else // a warp does not hold a token's ids
extern "C" __global__ void moe_dispatch_send_one(const __grid_constant__ SendArgs a) {}
#endif
