// Dispatch, the receiving half: waits for the rows of all ranks, and lays them out for the experts.

#define CONTIGUOUS 0
#define MASKED 1
#define COMPACT 2
#define RANK_MAJOR 3
#define TOGETHER 8 // counts of an expert that are read at a time

struct RecvArgs {
    Common c;
    u8 *tokens; // [rows, TOKEN_BYTES]
    u8 *scales; // [rows, SCALE_BYTES]
    int *counts; // [held] rows of each expert
    i64 *offsets; // [held + 1]
    u32 *starts; // [RANKS + 1] where each source's rows begin
    u32 *plan; // [RANKS * MAX_TOKENS][PLAN_WORDS] what combine does with each row, see plan_row
    int *local_ids; // [rows, TOPK], for views that hold a row once
    float *weights; // [rows, TOPK]
    i64 *expert_rows; // [all copies] row numbers by expert
    i64 capacity; // rows; MASKED: of each expert
    int alignment, kind, held;
};

// Rows of expert `e` from source `s`.
__device__ __forceinline__ u32 count_of(const RecvArgs &a, const u32 *counts, int s, int e) {
    return a.c.alive >> s & 1 ? counts[s * HELD + e] : 0;
}
// A warp: the sum of `size` over the lanes before this one, and over all.
__device__ __forceinline__ u64 before_lane(u64 size, u64 *all) {
    u64 upto = size;
    for (int d = 1; d < 32; d *= 2) {
        const u64 left = __shfl_up_sync(~0u, upto, d);
        if ((int)(threadIdx.x & 31) >= d) upto += left;
    }
    *all = __shfl_sync(~0u, upto, 31);
    return upto - size;
}
__device__ __forceinline__ u64 room_of(const RecvArgs &a, u32 count) {
    if (a.kind == MASKED) return a.capacity;
    const u32 group = a.alignment;
    return group == 1 ? count : (u64)((count + group - 1) / group) * group;
}

// Where the copies of each source begin for each expert, rows of each expert, where each expert begins. Experts of at
// most a warp's lanes: by the first warp alone, which the others need not wait for in between.
__device__ __forceinline__ void lay_out_few(u32 *table, u32 *count, u64 *begin, const RecvArgs &a, const u32 *counts) {
    const int e = threadIdx.x;
    if (e >= 32) return;
    u32 n = 0;
#pragma unroll 1
    for (int s = 0; s < RANKS; s += TOGETHER) {
        u32 more[TOGETHER];
#pragma unroll
        for (int i = 0; i < TOGETHER; i++)
            more[i] = s + i < RANKS && e < a.held ? count_of(a, counts, s + i, e) : 0;
#pragma unroll
        for (int i = 0; i < TOGETHER; i++) {
            if (s + i < RANKS && e < a.held) table[(s + i) * a.held + e] = n;
            n += more[i];
        }
    }
    u64 all;
    const u64 at = before_lane(e < a.held ? room_of(a, n) : 0, &all);
    if (e < a.held) {
        count[e] = n;
        begin[e] = at;
#pragma unroll 4
        for (int s = 0; s < RANKS; s++) table[s * a.held + e] += (u32)at;
    }
    if (e == 0) begin[a.held] = all;
}
__device__ COLD void lay_out_many(u32 *table, u32 *count, u64 *begin, const RecvArgs &a, const u32 *counts) {
    for (int e = threadIdx.x; e < a.held; e += THREADS) {
        u32 n = 0;
        for (int s = 0; s < RANKS; s++) {
            table[s * a.held + e] = n;
            n += count_of(a, counts, s, e);
        }
        count[e] = n;
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        u64 sum = 0;
        for (int base = 0; base < a.held; base += 32) {
            const int e = base + threadIdx.x;
            u64 all;
            const u64 at = before_lane(e < a.held ? room_of(a, count[e]) : 0, &all);
            if (e < a.held) begin[e] = sum + at;
            sum += all;
        }
        if (threadIdx.x == 0) begin[a.held] = sum;
    }
    __syncthreads();
    for (int q = threadIdx.x; q < RANKS * a.held; q += THREADS) table[q] += (u32)begin[q % a.held];
}
// The block finds alike whether there is too little room, and for how many rows there should be.
__device__ __forceinline__ bool too_many(const RecvArgs &a, u32 all, const u32 *count, const u64 *begin) {
    if (a.kind != MASKED)
        return (a.kind == COMPACT ? (i64)all : a.kind == RANK_MAJOR ? MAX_TOKENS : (i64)begin[a.held]) > a.capacity;
    bool found = false;
#pragma unroll 1
    for (int e = threadIdx.x & 31; e < a.held; e += 32) found |= count[e] > a.capacity;
    return __any_sync(~0u, found);
}
__device__ COLD void overflow(const RecvArgs &a, u32 all, const u32 *count, const u64 *begin) {
    if (threadIdx.x == 0) {
        i64 needed = a.kind == COMPACT ? (i64)all : a.kind == RANK_MAJOR ? MAX_TOKENS : (i64)begin[a.held];
        if (a.kind == MASKED) needed = 0;
        for (int e = 0; a.kind == MASKED && e < a.held; e++) needed = count[e] > needed ? count[e] : needed;
        tell(a.c, OVERFLOW, needed, a.capacity);
    }
    give_up(a.c, 1ull << a.c.rank);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) moe_dispatch_recv(const __grid_constant__ RecvArgs a) {
    extern __shared__ u64 shared[];
    const Common &c = a.c;
    const int tid = threadIdx.x, lane = tid & 31;
    u64 *begin = shared; // [held + 1]
    u32 *table = (u32 *)(begin + a.held + 1); // [RANKS * held]
    u32 *rows = table + RANKS * a.held; // [RANKS]
    u32 *count = rows + RANKS; // [held]
    u32 epoch;
    if (!await_all<ROW_PARTS>(c, IN_ROW_FLAGS, rows, &epoch)) return;
    if (blockIdx.x == 0 && tid == 0) c.local->begun[c.slot] = epoch;
    const u64 mine = c.mine + c.slot * (u64)IN_STRIDE;
    const u32 *counts = (const u32 *)(mine + IN_COUNTS);
    const Sources sources(rows);
    // The first rows are on their way while the places are found.
    const u32 all = sources.all;
    const Share share(all, a.kind == RANK_MAJOR ? 1 : VECS, AHEAD * 32);
    const u32 first = share.first(), items = all * share.parts;
    Chosen chosen = {};
    Vec ahead[AHEAD];
#if SCALE_BYTES
    Svec scale_ahead;
#endif
    u64 home = 0; // memory of the row's source
    if (first < items) {
        const u32 row = first / share.parts, part = first % share.parts;
        const int s = sources.of(row), low = part * share.span;
        const u64 at = (u64)s * MAX_TOKENS + row - sources.begin(s);
        read_meta(chosen, (const u32 *)(mine + IN_META + at * META_BYTES));
        if (part == 0) home = c.peers[s];
        if (a.kind != RANK_MAJOR) {
            const Vec *from = (const Vec *)(mine + IN_ROWS + at * ROW_BYTES);
#pragma unroll
            for (int i = 0; i < AHEAD; i++)
                if (low + i * 32 + lane < VECS) ahead[i] = from[low + i * 32 + lane];
#if SCALE_BYTES
            if (part == 0 && lane < SVECS)
                scale_ahead = ((const Svec *)(mine + IN_ROWS + at * ROW_BYTES + SCALE_AT))[lane];
#endif
        }
    }
    if (a.held <= 32) lay_out_few(table, count, begin, a, counts);
    else lay_out_many(table, count, begin, a, counts);
    __syncthreads();
    if (too_many(a, all, count, begin)) return overflow(a, all, count, begin);
    const bool once = a.kind == COMPACT || a.kind == RANK_MAJOR;
    if (blockIdx.x == 0) {
        for (int e = tid; e < a.held; e += THREADS) a.counts[e] = count[e];
        for (int e = tid; e <= a.held; e += THREADS) a.offsets[e] = begin[e];
        if (tid < 32) {
#pragma unroll
            for (int k = 0; k < RANK_CHUNKS; k++)
                if (k * 32 + lane < RANKS) a.starts[k * 32 + lane] = sources.upto[k] - sources.rows[k];
            if (lane == 0) a.starts[RANKS] = all;
        }
    }

    for (u32 item = first; item < items; item += share.step) {
        const u32 row = item / share.parts, part = item % share.parts;
        const int low = part * share.span, high = low + share.span < VECS ? low + share.span : VECS;
        const int s = sources.of(row);
        const u64 at = (u64)s * MAX_TOKENS + row - sources.begin(s);
        const u32 alone = a.kind == COMPACT ? row : at;
        if (item != first) {
            read_meta(chosen, (const u32 *)(mine + IN_META + at * META_BYTES));
            if (part == 0) home = c.peers[s];
        }
        place_copies(chosen, once ? 0 : table, s, a.held, alone);
        if (part == 0) plan_row(a.plan + (u64)row * PLAN_WORDS, chosen, home + c.slot * (u64)IN_STRIDE + IN_SUMS);
        if (once && part == 0) {
#pragma unroll
            for (int k = 0; k < CHUNKS; k++) {
                int j = k * 32 + lane;
                if (j >= TOPK) break;
                a.local_ids[(u64)alone * TOPK + j] = chosen.id[k];
                a.weights[(u64)alone * TOPK + j] = chosen.weight[k];
                if (chosen.id[k] >= 0) a.expert_rows[table[s * a.held + chosen.id[k]] + chosen.place[k]] = alone;
            }
        }
        if (a.kind == RANK_MAJOR) continue; // the rows stay where they are
        const Vec *from = (const Vec *)(mine + IN_ROWS + at * ROW_BYTES);
        for (int b = low; b < high; b += AHEAD * 32) {
            if (item != first || b != low) {
#pragma unroll
                for (int i = 0; i < AHEAD; i++)
                    if (b + i * 32 + lane < high) ahead[i] = from[b + i * 32 + lane];
            }
#pragma unroll
            for (int k = 0; k < CHUNKS; k++)
                for (u32 m = chosen.mask[k]; m; m &= m - 1) {
                    u64 copy = __shfl_sync(~0u, chosen.at[k], __ffs(m) - 1);
                    Vec *out = (Vec *)(a.tokens + copy * TOKEN_BYTES);
#pragma unroll
                    for (int i = 0; i < AHEAD; i++)
                        if (b + i * 32 + lane < high) out[b + i * 32 + lane] = ahead[i];
                }
        }
#if SCALE_BYTES
        if (part) continue;
        const Svec *scale = (const Svec *)(mine + IN_ROWS + at * ROW_BYTES + SCALE_AT);
        for (int b = 0; b < SVECS; b += 32) {
            Svec v;
            if (b + lane < SVECS) v = item == first && b == 0 ? scale_ahead : scale[b + lane];
#    pragma unroll
            for (int k = 0; k < CHUNKS; k++)
                for (u32 m = chosen.mask[k]; m; m &= m - 1) {
                    u64 copy = __shfl_sync(~0u, chosen.at[k], __ffs(m) - 1);
                    if (b + lane < SVECS) ((Svec *)(a.scales + copy * SCALE_BYTES))[b + lane] = v;
                }
        }
#endif
    }
    const int warp = blockIdx.x * WARPS + tid / 32, warps = gridDim.x * WARPS;
    if (a.kind == CONTIGUOUS && a.alignment > 1) // padding holds zeros, never what lay there
        for (int q = warp; q < a.held * a.alignment; q += warps) {
            int e = q / a.alignment, i = q % a.alignment;
            if (begin[e] + count[e] + i >= begin[e + 1]) continue;
            u64 pad = begin[e] + count[e] + i;
            for (int b = lane; b < TOKEN_BYTES / widest(TOKEN_BYTES, 4); b += 32)
                ((Bits<widest(TOKEN_BYTES, 4)>::type *)(a.tokens + pad * TOKEN_BYTES))[b] = 0;
            for (int b = lane; b < SCALE_BYTES; b += 32) a.scales[pad * SCALE_BYTES + b] = 0;
        }
    if (a.kind == RANK_MAJOR)
        for (int q = warp; q < RANKS * MAX_TOKENS; q += warps)
            if ((u32)(q % MAX_TOKENS) >= rows[q / MAX_TOKENS])
                for (int j = lane; j < TOPK; j += 32) {
                    a.local_ids[(i64)q * TOPK + j] = -1;
                    a.weights[(i64)q * TOPK + j] = 0;
                }
}
