// Dispatch, the receiving half: waits for the rows of all ranks, and lays them out for the experts.

#define CONTIGUOUS 0
#define MASKED 1
#define COMPACT 2
#define RANK_MAJOR 3

struct RecvArgs {
    Common c;
    u8 *tokens; // [rows, TOKEN_BYTES]
    u8 *scales; // [rows, SCALE_BYTES]
    int *counts; // [held] rows of each expert
    i64 *offsets; // [held + 1]
    u32 *table; // [RANKS * held] where copies begin, then [RANKS + 1] where each source's rows begin
    int *local_ids; // [rows, TOPK], for views that hold a row once
    float *weights; // [rows, TOPK]
    i64 *expert_rows; // [all copies] row numbers by expert
    i64 capacity; // rows; MASKED: of each expert
    int alignment, kind, held;
};

__device__ __forceinline__ void lay_out(u32 *table, u32 *count, u64 *begin, const RecvArgs &a) {
    for (int e = threadIdx.x; e < a.held; e += THREADS) {
        u32 n = 0;
        for (int s = 0; s < RANKS; s++) {
            u32 more = table[s * a.held + e];
            table[s * a.held + e] = n;
            n += more;
        }
        count[e] = n;
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        const int lane = threadIdx.x;
        u64 sum = 0;
        for (int base = 0; base < a.held; base += 32) {
            int e = base + lane;
            u64 size = e < a.held ? (a.kind == MASKED ? (u64)a.capacity
                                                      : ((u64)count[e] + a.alignment - 1) / a.alignment * a.alignment)
                                  : 0,
                upto = size;
            for (int d = 1; d < 32; d *= 2) {
                u64 left = __shfl_up_sync(~0u, upto, d);
                if (lane >= d) upto += left;
            }
            if (e < a.held) begin[e] = sum + upto - size;
            sum += __shfl_sync(~0u, upto, 31);
        }
        if (lane == 0) begin[a.held] = sum;
    }
    __syncthreads();
    for (int q = threadIdx.x; q < RANKS * a.held; q += THREADS) table[q] += (u32)begin[q % a.held];
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) moe_dispatch_recv(RecvArgs a) {
    extern __shared__ u64 shared[];
    const Common &c = a.c;
    const int tid = threadIdx.x, lane = tid & 31;
    u64 *begin = shared; // [held + 1]
    u32 *table = (u32 *)(begin + a.held + 1); // [RANKS * held]
    u32 *starts = table + RANKS * a.held; // [RANKS + 1]
    u32 *rows = starts + RANKS + 1; // [RANKS]
    u32 *count = rows + RANKS; // [held]
    __shared__ u32 full;
    u32 epoch;
    if (!await_all(c, IN_ROW_FLAGS, rows, &epoch)) return;
    const u64 mine = c.mine + c.slot * (u64)IN_STRIDE;
    for (int s = tid; s <= RANKS; s += THREADS) {
        u32 n = 0;
        for (int r = 0; r < s; r++) n += rows[r];
        starts[s] = n;
    }
    if (tid == 0) full = 0;
    __syncthreads();
    auto count_of = [&](int q) {
        int s = q / a.held;
        return c.alive >> s & 1 ? ((const u32 *)(mine + IN_COUNTS))[s * HELD + q % a.held] : 0;
    };
    const u32 first_count = tid < RANKS * a.held ? count_of(tid) : 0;
    // The first rows are on their way while the places are found.
    const u32 all = starts[RANKS];
    const Share share(all, VECS, AHEAD * 32);
    const u32 first = share.first();
    Chosen chosen = {};
    Vec ahead[AHEAD];
#if SCALE_BYTES
    Svec scale_ahead;
#endif
    if (first < share.items) {
        const u32 row = first / share.parts, part = first % share.parts;
        const int s = source_of(starts, row), low = part * share.span;
        const u64 at = (u64)s * MAX_TOKENS + row - starts[s];
        read_meta(chosen, (const u32 *)(mine + IN_META + at * META_BYTES));
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
    for (int q = tid; q < RANKS * a.held; q += THREADS) table[q] = q == tid ? first_count : count_of(q);
    __syncthreads();
    lay_out(table, count, begin, a);
    __syncthreads();
    const bool once = a.kind == COMPACT || a.kind == RANK_MAJOR;
    i64 needed = 0;
    if (a.kind == MASKED) {
        for (int e = tid; e < a.held; e += THREADS)
            if (count[e] > a.capacity) atomicMax(&full, count[e]);
    } else if (a.kind == RANK_MAJOR) {
        if (tid == 0 && a.capacity < MAX_TOKENS) full = MAX_TOKENS;
    } else if (tid == 0) {
        needed = a.kind == COMPACT ? (i64)all : (i64)begin[a.held];
        if (needed > a.capacity) full = (u32)needed;
    }
    __syncthreads();
    if (full) {
        if (tid == 0) tell(c, OVERFLOW, full, a.capacity);
        give_up(c, 1ull << c.rank);
        return;
    }
    if (blockIdx.x == 0) {
        for (int e = tid; e < a.held; e += THREADS) a.counts[e] = count[e];
        for (int e = tid; e <= a.held; e += THREADS) a.offsets[e] = begin[e];
        for (int q = tid; q < RANKS * a.held + RANKS + 1; q += THREADS) a.table[q] = table[q]; // starts lie behind
    }

    for (u32 item = first; item < share.items; item += share.step) {
        const u32 row = item / share.parts, part = item % share.parts;
        const int low = part * share.span, high = low + share.span < VECS ? low + share.span : VECS;
        const int s = source_of(starts, row);
        const u64 at = (u64)s * MAX_TOKENS + row - starts[s];
        const i64 alone = a.kind == COMPACT ? row : at;
        if (item != first) read_meta(chosen, (const u32 *)(mine + IN_META + at * META_BYTES));
        place_copies(chosen, once ? 0 : table, s, a.held, alone);
        if (once && part == 0) {
#pragma unroll
            for (int k = 0; k < CHUNKS; k++) {
                int j = k * 32 + lane;
                if (j >= TOPK) break;
                a.local_ids[alone * TOPK + j] = chosen.id[k];
                a.weights[alone * TOPK + j] = chosen.weight[k];
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
                    i64 copy = __shfl_sync(~0u, chosen.at[k], __ffs(m) - 1);
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
                    i64 copy = __shfl_sync(~0u, chosen.at[k], __ffs(m) - 1);
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
