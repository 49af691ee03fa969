// Dispatch, the receiving half: waits for the rows of all ranks, and lays them out for the experts.

extern "C" __global__ void __launch_bounds__(THREADS, 2) moe_dispatch_recv(const __grid_constant__ RecvArgs a) {
    extern __shared__ u64 shared[];
    const Common &c = a.c;
    const int tid = threadIdx.x, lane = tid & 31;
    u32 *rows = (u32 *)shared; // [RANKS]; what is behind them is for Places
    u32 epoch;
    if (!await_all<ROW_PARTS>(c, IN_ROW_FLAGS, rows, &epoch)) return;
    if (blockIdx.x == 0 && tid == 0) c.local->begun[c.slot] = epoch;
    const u64 mine = c.mine + c.slot * (u64)IN_STRIDE;
    Places places;
    places.read(a, (const u32 *)(mine + IN_COUNTS), rows + RANKS);
    const Sources sources(rows);
    // The first rows are on their way while the places are found.
    const u32 all = sources.all;
    const Share<VECS, AHEAD * 32, 4> share(all, a.kind == RANK_MAJOR); // whose rows stay where they are
    const u32 first = share.first(), items = all * share.parts();
    Chosen chosen = {};
    Vec ahead[AHEAD];
#if SCALE_BYTES
    Svec scale_ahead;
#endif
    u64 home = 0; // memory of the row's source
    if (first < items) {
        const u32 row = share.row(first);
        const int s = sources.of(row), low = share.low(first);
        const u64 at = (u64)s * MAX_TOKENS + row - sources.begin(s);
        read_meta(chosen, (const u32 *)(mine + IN_META + at * META_BYTES));
        if (low == 0) home = c.peers[s];
        if (a.kind != RANK_MAJOR) {
            const Vec *from = (const Vec *)(mine + IN_ROWS + at * ROW_BYTES);
#pragma unroll
            for (int i = 0; i < AHEAD; i++)
                if (low + i * 32 + lane < VECS) ahead[i] = from[low + i * 32 + lane];
#if SCALE_BYTES
            if (low == 0 && lane < SVECS)
                scale_ahead = ((const Svec *)(mine + IN_ROWS + at * ROW_BYTES + SCALE_AT))[lane];
#endif
        }
    }
    const bool tidy = a.kind == RANK_MAJOR || (a.kind == CONTIGUOUS && a.alignment > 1); // more to write than rows
    if (Places::BY_WARP && first >= items && blockIdx.x && !tidy) return;
    places.find(a);
    const i64 wanted = needed(a, all, places);
    if (wanted > a.capacity) return overflow(a, wanted);
    const bool once = a.kind == COMPACT || a.kind == RANK_MAJOR;
    if (blockIdx.x == 0) {
        if (tid < 32) {
            for (int e = lane; e - lane < a.held; e += 32) {
                const u32 n = places.count(e < a.held ? e : 0), begin = places.begin(e < a.held ? e : 0);
                if (e < a.held) a.counts[e] = n, a.offsets[e] = begin;
            }
            if (lane == 0) a.offsets[a.held] = places.end;
#pragma unroll
            for (int k = 0; k < RANK_CHUNKS; k++)
                if (k * 32 + lane < RANKS) a.starts[k * 32 + lane] = sources.upto[k] - sources.rows[k];
            if (lane == 0) a.starts[RANKS] = all;
        }
    }

    for (u32 item = first; item < items; item += share.step) {
        const u32 row = share.row(item);
        const int low = share.low(item), high = low + share.span() < VECS ? low + share.span() : VECS;
        const int s = sources.of(row);
        const u64 at = (u64)s * MAX_TOKENS + row - sources.begin(s);
        const u32 alone = a.kind == COMPACT ? row : at;
        if (item != first) {
            read_meta(chosen, (const u32 *)(mine + IN_META + at * META_BYTES));
            if (low == 0) home = c.peers[s];
        }
#pragma unroll
        for (int k = 0; k < CHUNKS; k++) {
            chosen.at[k] = places.of(s, chosen.id[k]) + chosen.place[k];
            chosen.mask[k] = __ballot_sync(~0u, chosen.id[k] >= 0);
        }
        if (once && low == 0)
#pragma unroll
            for (int k = 0; k < CHUNKS; k++) {
                const int j = k * 32 + lane;
                if (j >= TOPK) break;
                a.local_ids[(u64)alone * TOPK + j] = chosen.id[k];
                a.weights[(u64)alone * TOPK + j] = chosen.weight[k];
                if (chosen.id[k] >= 0) a.expert_rows[chosen.at[k]] = alone;
            }
        if (once)
#pragma unroll
            for (int k = 0; k < CHUNKS; k++) {
                chosen.mask[k] = k == 0;
                chosen.at[k] = alone;
            }
        if (low == 0) plan_row(a.plan + (u64)row * PLAN_WORDS, chosen, home + c.slot * (u64)IN_STRIDE + IN_SUMS);
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
        if (low) continue;
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
    const int warp = blockIdx.x * (blockDim.x / 32) + tid / 32, warps = gridDim.x * (blockDim.x / 32);
    if (a.kind == CONTIGUOUS && a.alignment > 1) // padding holds zeros, never what lay there
        for (int q = warp; q < a.held * a.alignment; q += warps) {
            const int e = q / a.alignment, i = q % a.alignment;
            const u32 rows_of_e = places.count(e), pad = places.begin(e) + rows_of_e + i;
            if (rows_of_e + i >= room_of(a, rows_of_e)) continue;
            for (int b = lane; b < TOKEN_BYTES / widest(TOKEN_BYTES, 4); b += 32)
                ((Bits<widest(TOKEN_BYTES, 4)>::type *)(a.tokens + (u64)pad * TOKEN_BYTES))[b] = 0;
            for (int b = lane; b < SCALE_BYTES; b += 32) a.scales[(u64)pad * SCALE_BYTES + b] = 0;
        }
    if (a.kind == RANK_MAJOR)
        for (int q = warp; q < RANKS * MAX_TOKENS; q += warps)
            if ((u32)(q % MAX_TOKENS) >= rows[q / MAX_TOKENS])
                for (int j = lane; j < TOPK; j += 32) {
                    a.local_ids[(i64)q * TOPK + j] = -1;
                    a.weights[(i64)q * TOPK + j] = 0;
                }
}
