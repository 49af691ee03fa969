// Dispatch, the receiving half: one block waits for the proxy's word, and finds out where everything lies and goes; then rows are
// laid out for the experts.

#define CONTIGUOUS 0
#define MASKED 1
#define COMPACT 2
#define RANK_MAJOR 3

// Waits until a word of the proxy's carries the epoch. The whole block; `missing(s)`: whether something of rank s is not here,
// asked of each thread for one rank, when a rank is gone or time is over. Returns false if this rank takes no further step.
template <class Missing> __device__ __forceinline__ bool wait_for(const Nic &c, const u32 *word, u32 epoch, Missing missing) {
    // ranks that somebody gave up because of; that had left before anybody looked; of which something is missing
    __shared__ u64 why, left, lacking;
    __shared__ int state; // 0: it has come; 1: look at who is missing; 2: that for the last time
    const int tid = threadIdx.x;
    u64 begin = 0, known = 0; // thread 0's
    if (tid == 0) begin = now();
    while (true) {
        if (tid == 0) {
            why = left = lacking = 0;
            for (u32 n = 0;; n++) {
                state = 0;
                if (load_acquire(word) == epoch) break;
                if (n & 7) continue;
                if ((why = *(volatile u64 *)&c.mail->noted)) break;
                left = load_acquire(&c.mail->gone) & c.alive; // before the look: who leaves has done its part before
                state = now() - begin > c.limit ? 2 : 1;
                if (state == 2 || (left & ~known)) {
                    known |= left;
                    break;
                }
            }
        }
        __syncthreads();
        if (why) {
            if (tid == 0) give_up(c, why);
            return false;
        }
        const int how = state; // thread 0 goes on to write it after the last barrier
        if (how == 0) return true;
        if (tid < RANKS && (c.alive >> tid & 1) && missing(tid)) atomicOr(&lacking, 1ull << tid);
        __syncthreads();
        const u64 found = how == 2 ? lacking : lacking & left;
        __syncthreads();
        if (how == 1 && !found) continue; // who has gone has done its part
        // All seems to be here, but our own proxy does not say so: a part of one that left came half, or it is ourselves.
        if (tid == 0) give_up(c, found ? found : left ? left : 1ull << c.rank);
        return false;
    }
}

struct RecvArgs {
    Nic c;
    u8 *tokens; // [rows, TOKEN_BYTES]
    u8 *scales; // [rows, SCALE_BYTES]
    int *counts; // [held] rows of each expert
    i64 *offsets; // [held + 1]
    u32 *starts; // [RANKS + 1] where each source's rows begin
    u32 *plan; // [rows][2 * TOPK] for combine: where the copies for each of its top-k lie (~0: none here), their weights
    int *local_ids; // [rows, TOPK], for views that hold a row once
    float *weights; // [rows, TOPK]
    i64 *expert_rows; // [all copies] row numbers by expert
    i64 capacity; // rows; MASKED: of each expert
    int alignment, kind, held;
};

extern "C" __global__ void __launch_bounds__(THREADS) moe_nic_wait_rows(const __grid_constant__ RecvArgs a) {
    extern __shared__ u64 begin[]; // [held + 1]
    u32 *count = (u32 *)(begin + a.held + 1); // [held]
    __shared__ u32 arrived[RANKS];
    const Nic &c = a.c;
    const int tid = threadIdx.x;
    const u32 broken = c.local->broken, epoch = c.local->epoch[c.slot];
    if (broken) return;
    if (!wait_for(c, &c.mail->rows_here[c.slot], epoch, [&](int s) {
            if (load_acquire(&c.mail->begun[c.slot]) != epoch) return false; // nobody was told yet: our own proxy's fault
            const u64 heads = *(volatile u64 *)&c.mail->heads[c.slot];
            if ((heads & c.alive) != c.alive) return s != (int)c.rank && !(heads >> s & 1);
            u32 late = 0, n = 0;
            for (int q = 0; q <= s; q++) {
                n = c.alive >> q & 1 ? ((const volatile u32 *)c.arrived)[q] : 0;
                if (q < s && n > PRIVATE) late += n - PRIVATE;
            }
            const auto stale = [&](u64 at) {
                return ((const volatile u32 *)(c.in + at * ROW_BYTES + META_AT))[META_WORDS - 1] != epoch;
            };
            const u32 early = n > PRIVATE ? PRIVATE : n; // two writes: the last row of each is looked at
            if (early && stale((u64)s * PRIVATE + early - 1)) return true;
            return n > early && stale((u64)RANKS * PRIVATE + late + n - 1 - early);
        }))
        return;
    for (int s = tid; s < RANKS; s += THREADS) arrived[s] = c.alive >> s & 1 ? c.arrived[s] : 0;
    for (int q = tid; q < RANKS * HELD; q += THREADS) TAB(c)[q] = c.alive >> (q / HELD) & 1 ? c.arrived[RANKS + q] : 0;
    __syncthreads();
    for (int e = tid; e < a.held; e += THREADS) {
        u32 n = 0;
        for (int s = 0; s < RANKS; s++) {
            const u32 some = TAB(c)[s * HELD + e];
            TAB(c)[s * HELD + e] = n;
            n += some;
        }
        count[e] = n;
    }
    __shared__ i64 needed;
    __syncthreads();
    if (tid == 0) {
        u32 all = 0, late = 0;
        for (int s = 0; s < RANKS; s++) {
            THEIRS(c)[s] = a.starts[s] = all;
            LATE(c)[s] = late;
            all += arrived[s];
            late += arrived[s] > PRIVATE ? arrived[s] - PRIVATE : 0;
        }
        THEIRS(c)[RANKS] = a.starts[RANKS] = all;
        u64 at = 0;
        u32 most = 0;
        for (int e = 0; e < a.held; e++) {
            begin[e] = at;
            most = count[e] > most ? count[e] : most;
            at += a.kind == MASKED ? a.capacity : (u64)(count[e] + a.alignment - 1) / a.alignment * a.alignment;
        }
        begin[a.held] = at;
        needed = a.kind == MASKED ? most : a.kind == COMPACT ? all : a.kind == RANK_MAJOR ? 0 : (i64)at;
        if (needed > a.capacity) {
            tell(c, OVERFLOW, needed, a.capacity);
            give_up(c, 1ull << c.rank);
        }
    }
    __syncthreads();
    if (needed > a.capacity) return;
    for (int e = tid; e <= a.held; e += THREADS) {
        a.offsets[e] = begin[e];
        if (e == a.held) continue;
        a.counts[e] = count[e];
        for (int s = 0; s < RANKS; s++) TAB(c)[s * HELD + e] += (u32)begin[e];
    }
}

// A block takes a row.
extern "C" __global__ void __launch_bounds__(WORKERS) moe_nic_lay_out(const __grid_constant__ RecvArgs a) {
    const Nic &c = a.c;
    const int tid = threadIdx.x;
    __shared__ u32 to[TOPK];
    if (c.local->broken) return;
    const u32 epoch = c.local->epoch[c.slot], rows = THEIRS(c)[RANKS];
    const bool once = a.kind == COMPACT || a.kind == RANK_MAJOR;
    const i64 room = a.kind == MASKED ? a.capacity * a.held : a.kind == RANK_MAJOR ? (i64)RANKS * MAX_TOKENS : a.capacity;
    for (u32 row = blockIdx.x; row < rows; row += gridDim.x) {
        const int s = source_of(THEIRS(c), row);
        const u32 n = row - THEIRS(c)[s], alone = a.kind == COMPACT ? row : s * MAX_TOKENS + n;
        const u8 *from = c.in + lies_at(LATE(c), s, n) * ROW_BYTES;
        const u32 *meta = (const u32 *)(from + META_AT);
        __syncthreads(); // the former row is done
        if (tid == 0 && meta[META_WORDS - 1] != epoch) give_up(c, 1ull << s); // memory was written out of turn
        for (int j = tid; j < TOPK; j += WORKERS) {
            const int id = (int)meta[j];
            const bool here = id >= 0 && id < a.held;
            u32 at = here ? TAB(c)[s * HELD + id] + meta[TOPK + j] : ~0u;
            if (once) {
                a.local_ids[(u64)alone * TOPK + j] = here ? id : -1;
                ((u32 *)a.weights)[(u64)alone * TOPK + j] = meta[2 * TOPK + j];
                if (here && at < a.offsets[a.held]) a.expert_rows[at] = alone;
                at = j == 0 ? alone : ~0u;
            }
            if (at >= room) at = ~0u; // which no rank of good faith sends
            to[j] = at;
            a.plan[(u64)row * 2 * TOPK + j] = at;
            a.plan[(u64)row * 2 * TOPK + TOPK + j] = meta[2 * TOPK + j];
        }
        __syncthreads();
        for (int v = tid; v < VECS; v += WORKERS) {
            const Vec some = ((const Vec *)from)[v];
            for (int j = 0; j < TOPK; j++)
                if (to[j] != ~0u) ((Vec *)(a.tokens + (u64)to[j] * TOKEN_BYTES))[v] = some;
        }
        for (int b = tid; b < SCALE_BYTES; b += WORKERS)
            for (int j = 0; j < TOPK; j++)
                if (to[j] != ~0u) a.scales[(u64)to[j] * SCALE_BYTES + b] = from[SCALE_AT + b];
    }
    if (a.kind == CONTIGUOUS && a.alignment > 1) // padding holds zeros, never what lay there
        for (int q = blockIdx.x; q < a.held * a.alignment; q += gridDim.x) {
            const int e = q / a.alignment;
            const i64 pad = a.offsets[e] + a.counts[e] + q % a.alignment;
            if (pad >= a.offsets[e + 1]) continue;
            for (int b = tid; b < TOKEN_BYTES; b += WORKERS) a.tokens[pad * TOKEN_BYTES + b] = 0;
            for (int b = tid; b < SCALE_BYTES; b += WORKERS) a.scales[pad * SCALE_BYTES + b] = 0;
        }
    if (a.kind == RANK_MAJOR)
        for (int q = blockIdx.x; q < RANKS * MAX_TOKENS; q += gridDim.x) {
            const int s = q / MAX_TOKENS;
            if ((u32)(q % MAX_TOKENS) < THEIRS(c)[s + 1] - THEIRS(c)[s]) continue;
            for (int j = tid; j < TOPK; j += WORKERS) {
                a.local_ids[(i64)q * TOPK + j] = -1;
                a.weights[(i64)q * TOPK + j] = 0;
            }
        }
}
