// Dispatch, the receiving half: where copies of rows go. Experts come one after the other, within an expert sources, and
// within a source its tokens, which their senders have counted.

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
// Rows of the view for so many of an expert; with all experts they are below 2^32 (halves.py).
__device__ __forceinline__ u32 room_of(const RecvArgs &a, u32 count) {
    if (a.kind == MASKED) return (u32)a.capacity;
    const u32 group = a.alignment;
    return group == 1 ? count : (count + group - 1) / group * group;
}
// A warp: the sum of `size` over the lanes before this one, and over all.
__device__ __forceinline__ u32 before_lane(u32 size, u32 *all) {
    u32 upto = size;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const u32 left = __shfl_up_sync(~0u, upto, d);
        if ((int)(threadIdx.x & 31) >= d) upto += left;
    }
    *all = __shfl_sync(~0u, upto, 31);
    return upto - size;
}

#if HELD <= 32 && RANKS <= 8
// Few experts and ranks: each warp finds the places by itself, lane e those of expert e.
struct Places {
    u32 from[RANKS]; // rows of each source
    u32 rows, begins, end; // rows of the expert, where they begin; end of all
    __device__ __forceinline__ void read(const RecvArgs &a, const u32 *counts, u32 *) {
        const int e = threadIdx.x & 31;
#    pragma unroll
        for (int s = 0; s < RANKS; s++) from[s] = e < a.held ? count_of(a, counts, s, e) : 0;
    }
    __device__ __forceinline__ void find(const RecvArgs &a) {
        rows = 0;
#    pragma unroll
        for (int s = 0; s < RANKS; s++) rows += from[s];
        begins = before_lane((int)(threadIdx.x & 31) < a.held ? room_of(a, rows) : 0, &end);
    }
    __device__ __forceinline__ u32 count(int e) const { return __shfl_sync(~0u, rows, e); }
    __device__ __forceinline__ u32 begin(int e) const { return __shfl_sync(~0u, begins, e); }
    // Where the copies of a source's rows begin: for expert `e` of this lane, or what e < 0 gives.
    __device__ __forceinline__ u32 of(int s, int e) const {
        u32 at = begins;
#    pragma unroll
        for (int q = 0; q < RANKS - 1; q++) at += q < s ? from[q] : 0;
        return __shfl_sync(~0u, at, e & 31);
    }
    static const bool BY_WARP = true;
};
#else
// The block finds them together, and keeps them in its memory. Whole warps ask.
struct Places {
    u32 *table, *rows, *begins; // [RANKS * held] where copies begin, [held], [held + 1]
    const u32 *counts;
    u32 end;
    __device__ __forceinline__ void read(const RecvArgs &a, const u32 *counted, u32 *room) {
        begins = room;
        rows = begins + a.held + 1;
        table = rows + a.held;
        counts = counted;
    }
    __device__ __forceinline__ void find(const RecvArgs &a) {
        const int held = a.held;
        for (int e = threadIdx.x; e < held; e += blockDim.x) {
            u32 n = 0;
#    pragma unroll 1
            for (int s = 0; s < RANKS; s += TOGETHER) {
                u32 more[TOGETHER];
#    pragma unroll
                for (int i = 0; i < TOGETHER; i++) more[i] = s + i < RANKS ? count_of(a, counts, s + i, e) : 0;
#    pragma unroll
                for (int i = 0; i < TOGETHER; i++) {
                    if (s + i < RANKS) table[(s + i) * held + e] = n;
                    n += more[i];
                }
            }
            rows[e] = n;
        }
        __syncthreads();
        if (threadIdx.x < 32) {
            u32 sum = 0;
            for (int base = 0; base < held; base += 32) {
                const int e = base + threadIdx.x;
                u32 all;
                const u32 at = before_lane(e < held ? room_of(a, rows[e]) : 0, &all);
                if (e < held) begins[e] = sum + at;
                sum += all;
            }
            if (threadIdx.x == 0) begins[held] = sum;
        }
        __syncthreads();
        end = begins[held];
    }
    __device__ __forceinline__ u32 count(int e) const { return rows[e]; }
    __device__ __forceinline__ u32 begin(int e) const { return begins[e]; }
    __device__ __forceinline__ u32 of(int s, int e) const {
        return e < 0 ? 0 : begins[e] + table[s * (int)(table - rows) + e]; // `rows` are as many as `held`
    }
    static const bool BY_WARP = false;
};
#endif

// How many rows there should be: of the view, or, MASKED, of the expert that has the most. Whole warps ask.
__device__ __forceinline__ i64 needed(const RecvArgs &a, u32 all, const Places &places) {
    if (a.kind == COMPACT) return all;
    if (a.kind == RANK_MAJOR) return MAX_TOKENS;
    if (a.kind == CONTIGUOUS) return places.end;
    u32 most = 0;
#pragma unroll 1
    for (int e = threadIdx.x & 31; e - (int)(threadIdx.x & 31) < a.held; e += 32) {
        const u32 n = places.count(e < a.held ? e : 0);
        most = n > most ? n : most;
    }
    return __reduce_max_sync(~0u, most);
}
__device__ COLD void overflow(const RecvArgs &a, i64 wanted) {
    if (threadIdx.x == 0) tell(a.c, OVERFLOW, wanted, a.capacity);
    give_up(a.c, 1ull << a.c.rank);
}
