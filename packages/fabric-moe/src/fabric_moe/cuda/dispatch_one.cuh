// Dispatch of few tokens: a block for each. Every warp knows all about its block's token: lane l its l-th expert.

#if CHUNKS == 1
__device__ __forceinline__ void send_one(const SendArgs &a) {
    extern __shared__ u64 shared[];
    const Common &c = a.c;
    const int tid = threadIdx.x, lane = tid & 31, t = blockIdx.x;
    u64 *peers = shared + 1; // as moe_dispatch_send divides it
    u32 *hist = (u32 *)(peers + RANKS), *rows = hist + EXPERTS;
    const u32 broken = c.local->broken, epoch = c.local->begun[c.slot] + 1;
    const int live = live_tokens(a), before = t < live ? t : live;
    const bool own = t < live;
    Vec ahead[AHEAD];
    const Vec *x = (const Vec *)(a.x + (i64)t * TOKEN_BYTES);
#pragma unroll
    for (int i = 0; i < AHEAD; i++)
        if (own && tid + i * THREADS < VECS) ahead[i] = x[tid + i * THREADS];
    const i64 id = own && lane < TOPK ? raw_id(a, t, lane) : -1;
    const float weight = own && lane < TOPK ? weight_at(a, t, lane) : 1.f;
    i64 some[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) some[i] = i < TOPK && tid < before ? raw_id(a, tid, i) : -1;
    const u64 peer = tid < RANKS ? c.peers[tid] : 0;
#if SCALE_BYTES
    const Svec *scales = (const Svec *)(a.scales + (i64)t * SCALE_BYTES);
    const int from_end = THREADS - 1 - tid; // scales are carried by those that have least of the token
    Svec scale_ahead;
    if (own && from_end < SVECS) scale_ahead = scales[from_end];
#endif
    for (int i = tid; i < EXPERTS + RANKS; i += THREADS) hist[i] = 0;
    if (broken) return;
    __syncthreads(); // what is read is still under way
    if (tid < RANKS) peers[tid] = peer;
    count_before(a, before, some, hist, rows);
    const int e = tid < 32 ? checked(a, id, t) : reachable(a, id);
    const u64 bit = e >= 0 ? 1ull << owner(e) : 0;
    u64 ranks = __reduce_or_sync(~0u, (u32)bit);
    if (RANKS > 32) ranks |= (u64)__reduce_or_sync(~0u, (u32)(bit >> 32)) << 32;
    const u32 same = __match_any_sync(~0u, e) & ((1u << lane) - 1);
    if (tid == 0 && t < a.tokens) c.turns[t] = (u8)__popcll(ranks);
    __syncthreads();

    const u64 slot_at = c.slot * (u64)IN_STRIDE, from = (u64)c.rank * MAX_TOKENS;
    int n = 0;
#pragma unroll 1
    for (u64 left = ranks; left; left &= left - 1, n++) {
        const int d = __ffsll((i64)left) - 1;
        const u64 at = peers[d], slot = from + rows[d];
        u8 *row = (u8 *)(at + slot_at + IN_ROWS + slot * ROW_BYTES);
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
            if (tid + i * THREADS < VECS) ((Vec *)row)[tid + i * THREADS] = ahead[i];
        for (int v = tid + AHEAD * THREADS; v < VECS; v += THREADS) ((Vec *)row)[v] = x[v];
#if SCALE_BYTES
        for (int v = from_end; v < SVECS; v += THREADS)
            ((Svec *)(row + SCALE_AT))[v] = v == from_end ? scale_ahead : scales[v];
#endif
        if (n % WARPS == tid / 32) {
            u32 *meta = (u32 *)(at + slot_at + IN_META + slot * META_BYTES);
            if (lane < TOPK) {
                meta[lane] = e >= 0 && owner(e) == d ? e - first_of(d) : -1;
                meta[TOPK + lane] = e >= 0 ? hist[e] + __popc(same) : 0;
                meta[2 * TOPK + lane] = __float_as_uint(weight);
            }
            if (lane == 0) meta[3 * TOPK] = t * FAN + n;
        }
    }
    rows_are_sent(c, epoch, peers, hist);
}
#endif
