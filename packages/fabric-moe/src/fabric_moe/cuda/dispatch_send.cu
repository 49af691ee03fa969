// Dispatch, the sending half. It gives each row its place: a slot in the memory that the receiver keeps for this
// sender, and, for each expert, how many earlier rows of this sender are for that expert. So the receiver sorts
// nothing, and the order is that of sources and tokens, whatever arrives first.

extern "C" __global__ void __launch_bounds__(THREADS, 2) moe_dispatch_send(const __grid_constant__ SendArgs a) {
    extern __shared__ u64 shared[];
    const Common &c = a.c;
    const int tid = threadIdx.x, each = a.each;
    u64 *mask = shared; // [each] ranks of a token
    u64 *peers = mask + each; // [RANKS]
    u32 *hist = (u32 *)(peers + RANKS); // [EXPERTS] earlier copies for an expert
    u32 *rows = hist + EXPERTS; // [RANKS] earlier rows for a rank
    int *ids = (int *)(rows + RANKS); // [each * TOPK]
    u32 *place = (u32 *)ids + each * TOPK; // [each * TOPK]
    u32 *slot = place + each * TOPK; // [each * FAN] place of a token's row at its n-th rank
    u32 *to = slot + each * FAN; // [each * FAN] that rank
    float *weights = (float *)(to + each * FAN); // [each * TOPK]
    const u32 broken = c.local->broken, epoch = c.local->begun[c.slot] + 1;
    const int first = blockIdx.x * each, said = a.live ? *a.live : a.tokens;
    // What can be read at once is on its way: ids of the first tokens before, the first token of each group of lanes.
    const int given = first < a.tokens ? first : a.tokens;
#if CHUNKS == 1
    Before<8, THREADS> some;
    some.read(a, 0, given);
#endif
    const u64 peer = tid < RANKS ? c.peers[tid] : 0;
    const int live = live_tokens(a, said);
    const int own = live - first < each ? (live > first ? live - first : 0) : each;

    const int groups = each < WARPS ? each : WARPS, wide = THREADS / groups;
    const int group = tid / wide, in = tid % wide;
    Vec ahead[AHEAD];
    if (group < own) {
        const Vec *x = (const Vec *)(a.x + (i64)(first + group) * TOKEN_BYTES);
#pragma unroll
        for (int n = 0; n < AHEAD; n++)
            if (in + n * wide < VECS) ahead[n] = x[in + n * wide];
    }

#if SCALE_BYTES
    Svec scale_ahead;
    if (group < own && in < SVECS) scale_ahead = ((const Svec *)(a.scales + (i64)(first + group) * SCALE_BYTES))[in];
#endif
    i64 id = tid < own * TOPK ? raw_id(a, first + tid / TOPK, tid % TOPK) : -1;
    float weight = tid < own * TOPK ? weight_at(a, first + tid / TOPK, tid % TOPK) : 1.f;
    for (int i = tid; i < EXPERTS + RANKS; i += THREADS) hist[i] = 0;
    if (tid < RANKS) peers[tid] = peer;
    bool wrong = false;
#pragma unroll 1
    for (int p = tid; p < each * TOPK; p += THREADS) {
        if (p != tid) {
            id = p < own * TOPK ? raw_id(a, first + p / TOPK, p % TOPK) : -1;
            weight = p < own * TOPK ? weight_at(a, first + p / TOPK, p % TOPK) : 1.f;
        }
        const int e = reachable(a, id);
        wrong |= e < 0 && id != -1;
        ids[p] = e;
        weights[p] = weight;
    }
    if (broken) return;
    __syncthreads();

    const int before = first < live ? first : live;
#if CHUNKS == 1
    some.count(a, before, hist, rows);
#else
    count_long(a, before, hist, rows);
#endif
#pragma unroll 1
    for (int t = tid; t < each; t += THREADS) {
        u64 m = 0;
        for (int j = 0; j < TOPK; j++) {
            int e = ids[t * TOPK + j];
            if (e >= 0) m |= 1ull << owner(e);
        }
        mask[t] = m;
        if (first + t < a.tokens) c.turns[first + t] = (u8)__popcll(m);
    }
    __syncthreads();
#pragma unroll 1
    for (int p = tid; p < own * TOPK; p += THREADS) {
        int e = ids[p];
        u32 n = e >= 0 ? hist[e] : 0;
#pragma unroll 8
        for (int q = 0; q < p; q++) n += ids[q] == e;
        place[p] = n;
    }
#pragma unroll 1
    for (int q = tid; q < own * FAN; q += THREADS) {
        u64 m = mask[q / FAN];
        if (q % FAN >= __popcll(m)) continue;
        for (int i = q % FAN; i; i--) m &= m - 1;
        int d = __ffsll((i64)m) - 1;
        u32 n = rows[d];
        for (int t = 0; t < q / FAN; t++) n += (u32)(mask[t] >> d & 1);
        slot[q] = n;
        to[q] = d;
    }
    __syncthreads();

    const u64 slab = IN_ROWS + c.slot * (u64)IN_STRIDE + (u64)c.rank * MAX_TOKENS * ROW_BYTES;
    for (int t = group; t < own; t += groups) {
        const Vec *x = (const Vec *)(a.x + (i64)(first + t) * TOKEN_BYTES);
        const int n = __popcll(mask[t]);
        for (int v = in; v < VECS; v += AHEAD * wide) {
            if (t != group || v != in) {
#pragma unroll
                for (int i = 0; i < AHEAD; i++)
                    if (v + i * wide < VECS) ahead[i] = x[v + i * wide];
            }
            for (int q = t * FAN; q < t * FAN + n; q++) {
                Vec *row = (Vec *)(peers[to[q]] + slab + (u64)slot[q] * ROW_BYTES);
#pragma unroll
                for (int i = 0; i < AHEAD; i++)
                    if (v + i * wide < VECS) row[v + i * wide] = ahead[i];
            }
        }
#if SCALE_BYTES
        const Svec *s = (const Svec *)(a.scales + (i64)(first + t) * SCALE_BYTES);
        for (int v = in; v < SVECS; v += wide) {
            Svec value = t != group || v != in ? s[v] : scale_ahead;
            for (int q = t * FAN; q < t * FAN + n; q++)
                ((Svec *)(peers[to[q]] + slab + (u64)slot[q] * ROW_BYTES + SCALE_AT))[v] = value;
        }
#endif
#pragma unroll 1
        for (int w = in; w < META_WORDS * n; w += wide) {
            int i = w / META_WORDS, k = w % META_WORDS, j = k % TOPK, q = t * FAN + i, d = to[q], e = ids[t * TOPK + j];
            u32 value;
            if (k < TOPK) value = e >= 0 && owner(e) == d ? e - first_of(d) : -1;
            else if (k < 2 * TOPK) value = place[t * TOPK + j];
            else if (k < 3 * TOPK) value = __float_as_uint(weights[t * TOPK + j]);
            else value = (first + t) * FAN + i;
            u64 meta = peers[d] + IN_META + c.slot * (u64)IN_STRIDE + ((u64)c.rank * MAX_TOKENS + slot[q]) * META_BYTES;
            ((u32 *)meta)[k] = value;
        }
    }

    rows_are_sent(c, epoch, peer, hist, gridDim.x - 1, blockIdx.x, 0);
    if (wrong)
        for (int p = tid; p < own * TOPK; p += THREADS) {
            const i64 found = raw_id(a, first + p / TOPK, p % TOPK);
            if (reachable(a, found) < 0 && found != -1) complain(a, found, first + p / TOPK);
        }
    if (said != live) bad_live(a, said);
}
