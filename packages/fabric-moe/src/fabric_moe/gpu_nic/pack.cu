// Dispatch, the sending half: who goes where is counted, and told to the proxy, which tells the other ranks; then rows are packed
// by destination, and the proxy is told again. Nothing here waits.

struct SendArgs {
    Nic c;
    const u8 *x;
    const u8 *scales;
    const void *ids;
    const float *weights; // null: 1
    const int *live; // null: all
    int tokens, given; // rows, and ids of each
    int wide; // ids are of 64 bits
};

__device__ __forceinline__ i64 raw_id(const SendArgs &a, int t, int j) {
    if (j >= a.given) return -1;
    const i64 at = (i64)t * a.given + j;
    return a.wide ? ((const i64 *)a.ids)[at] : ((const int *)a.ids)[at];
}
// The expert, of ours or of another rank that takes part, else -1; what is wrong with it is reported.
__device__ __forceinline__ int checked(const SendArgs &a, i64 id, int t) {
    if (id >= 0 && id < EXPERTS) {
        if (a.c.alive >> owner((int)id) & 1) return (int)id;
        atomicAdd(&a.c.local->unreachable, 1u);
    } else if (id != -1) {
        tell(a.c, BAD_ID, t, id);
    }
    return -1;
}
__device__ __forceinline__ int live_tokens(const SendArgs &a) {
    const int live = a.live ? *a.live : a.tokens;
    if (live >= 0 && live <= a.tokens) return live;
    if (threadIdx.x == 0) tell(a.c, BAD_LIVE, live, a.tokens);
    return live < 0 ? 0 : a.tokens;
}

// Earlier rows for the same rank, of each token: in the order of tokens, which are a block's threads.
__device__ __forceinline__ void seats(const SendArgs &a, u32 *rows, u32 *upto) {
    const int tid = threadIdx.x, lane = tid & 31, warp = tid / 32;
    for (int base = 0; base < a.tokens; base += THREADS) {
        const int t = base + tid;
        const u64 m = t < a.tokens ? MASK(a.c)[t] : 0;
        for (int d = 0; d < RANKS; d++) {
            const u32 with = __ballot_sync(~0u, m >> d & 1);
            if (lane == 0) upto[warp * RANKS + d] = __popc(with);
        }
        __syncthreads();
        if (tid < RANKS) {
            u32 n = rows[tid];
            for (int w = 0; w < WARPS; w++) {
                const u32 some = upto[w * RANKS + tid];
                upto[w * RANKS + tid] = n;
                n += some;
            }
            rows[tid] = n;
        }
        __syncthreads();
        int i = 0;
        for (int d = 0; d < RANKS; d++) {
            const u32 with = __ballot_sync(~0u, m >> d & 1);
            if (m >> d & 1) SEAT(a.c)[(i64)t * FAN + i++] = upto[warp * RANKS + d] + __popc(with & ((1u << lane) - 1));
        }
        __syncthreads();
    }
}

// Earlier copies for the same expert, of each of a token's: warps in turn.
__device__ __forceinline__ void places(const SendArgs &a, u32 *hist) {
    const int tid = threadIdx.x, lane = tid & 31, warp = tid / 32, copies = a.tokens * TOPK;
    for (int base = 0; base < copies; base += THREADS) {
        const int p = base + tid, e = p < copies ? IDS(a.c)[p] : -1;
        const u32 same = __match_any_sync(~0u, e), before = __popc(same & ((1u << lane) - 1));
        for (int w = 0; w < WARPS; w++) {
            if (warp == w) {
                const u32 n = e >= 0 ? hist[e] : 0;
                __syncwarp();
                if (e >= 0) PLACE(a.c)[p] = n + before;
                if (e >= 0 && before == 0) hist[e] = n + __popc(same);
            }
            __syncthreads();
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) moe_nic_count(const __grid_constant__ SendArgs a) {
    extern __shared__ u32 hist[]; // [EXPERTS] copies for each expert
    u32 *rows = hist + EXPERTS, *upto = rows + RANKS; // [RANKS] rows for each rank, [WARPS][RANKS]
    const Nic &c = a.c;
    const int tid = threadIdx.x;
    const u32 broken = c.local->broken, epoch = c.local->epoch[c.slot] + 1;
    if (broken) return;
    const int live = live_tokens(a);
    for (int i = tid; i < EXPERTS + RANKS; i += THREADS) hist[i] = 0;
    for (int t = tid; t < a.tokens; t += THREADS) {
        u64 m = 0;
        for (int j = 0; j < TOPK; j++) {
            const int e = t < live ? checked(a, raw_id(a, t, j), t) : -1;
            IDS(c)[(i64)t * TOPK + j] = e;
            if (e >= 0) m |= 1ull << owner(e);
        }
        MASK(c)[t] = m;
    }
    __syncthreads();
    seats(a, rows, upto);
    places(a, hist);
    if (tid == 0) {
        u32 n = 0;
        for (int d = 0; d < RANKS; d++) {
            MINE(c)[d] = upto[d] = n;
            n += rows[d];
        }
        MINE(c)[RANKS] = n;
    }
    __syncthreads();
    for (int t = tid; t < a.tokens; t += THREADS) {
        int i = 0;
        for (u64 m = MASK(c)[t]; m; m &= m - 1, i++) {
            const int d = __ffsll((i64)m) - 1;
            const u64 row = upto[d] + SEAT(c)[(i64)t * FAN + i];
            TABLE(c)[(i64)t * FAN + i] = (u32)((IN_SUMS + row * SUM_BYTES + (d + 1) * LINE) / 16);
        }
    }
    for (int d = tid; d < RANKS; d += THREADS) c.counted[d] = rows[d];
    for (int e = tid; e < EXPERTS; e += THREADS) {
        const int d = owner(e);
        c.counted[RANKS + d * HELD + e - first_of(d)] = hist[e];
    }
    __threadfence_system();
    __syncthreads();
    if (tid == 0) {
        c.local->epoch[c.slot] = epoch;
        store_release(&c.mail->counted[c.slot], epoch);
    }
}

// A block takes a token: reads it once, and writes it for each of its ranks.
extern "C" __global__ void __launch_bounds__(WORKERS) moe_nic_pack(const __grid_constant__ SendArgs a) {
    const Nic &c = a.c;
    const int tid = threadIdx.x;
    __shared__ u8 *to[FAN];
    __shared__ int rank[FAN];
    const u32 broken = c.local->broken, epoch = c.local->epoch[c.slot];
    if (broken) return;
    for (int t = blockIdx.x; t < a.tokens; t += gridDim.x) {
        const u64 mask = MASK(c)[t];
        const int n = __popcll(mask);
        __syncthreads(); // the former token is done
        if (tid == 0) {
            u64 m = mask;
            for (int i = 0; i < n; i++, m &= m - 1) {
                const int d = rank[i] = __ffsll((i64)m) - 1;
                to[i] = c.out + ((u64)MINE(c)[d] + SEAT(c)[(i64)t * FAN + i]) * ROW_BYTES;
            }
        }
        __syncthreads();
        if (!n) continue;
        const Vec *x = (const Vec *)(a.x + (i64)t * TOKEN_BYTES);
        for (int v = tid; v < VECS; v += WORKERS) {
            const Vec some = x[v];
            for (int i = 0; i < n; i++) ((Vec *)to[i])[v] = some;
        }
        for (int b = tid; b < SCALE_BYTES; b += WORKERS) {
            const u8 some = a.scales[(i64)t * SCALE_BYTES + b];
            for (int i = 0; i < n; i++) to[i][SCALE_AT + b] = some;
        }
        for (int w = tid; w < META_WORDS * n; w += WORKERS) {
            const int i = w / META_WORDS, k = w % META_WORDS, j = k % TOPK, d = rank[i];
            const int e = IDS(c)[(i64)t * TOPK + j];
            u32 value;
            if (k < TOPK) value = e >= 0 && owner(e) == d ? e - first_of(d) : -1;
            else if (k < 2 * TOPK) value = PLACE(c)[(i64)t * TOPK + j];
            else if (k < 3 * TOPK)
                value = __float_as_uint(a.weights && j < a.given ? a.weights[(i64)t * a.given + j] : 1.f);
            else value = epoch;
            ((u32 *)(to[i] + META_AT))[k] = value;
        }
    }
    if (last_block(&c.local->done[0]) && tid == 0) store_release(&c.mail->packed[c.slot], epoch);
}
