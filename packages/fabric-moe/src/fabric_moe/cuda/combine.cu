// Combine. Sums are made in float32, one product and one addition at a time, never fused: at the experts' rank in the
// order of a token's top-k, at its own rank in the order of the ranks. The bits are those of the path in host memory.

#define BF16 0
#define F32 1
#define F16 2

template <int T> struct Size {
    static const int value = T == F32 ? 4 : 2;
};
#define UNIT widest(HIDDEN, 8)  // elements that a lane works on at a time
#define UNITS (HIDDEN / UNIT)
#define BATCH 2  // of these at a time

template <int T> struct Num {
    typedef u16 type;
};
template <> struct Num<F32> {
    typedef float type;
};

// UNIT numbers of type T, as few loads as that takes.
template <int T> struct Pack {
    static const int bytes = UNIT * Size<T>::value, step = bytes > 16 ? 16 : bytes;
    typedef typename Bits<step>::type Word;
    union {
        Word word[bytes / step];
        typename Num<T>::type num[UNIT];
    };
    __device__ __forceinline__ void load(const u8 *at) {
#pragma unroll
        for (int i = 0; i < bytes / step; i++) word[i] = ((const Word *)at)[i];
    }
    __device__ __forceinline__ void store(u8 *at) const {
#pragma unroll
        for (int i = 0; i < bytes / step; i++) ((Word *)at)[i] = word[i];
    }
};
__device__ __forceinline__ float widen(const Pack<F32> &p, int i) { return p.num[i]; }
__device__ __forceinline__ float widen(const Pack<BF16> &p, int i) { return __uint_as_float((u32)p.num[i] << 16); }
__device__ __forceinline__ float widen(const Pack<F16> &p, int i) {
    float v;
    asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"(p.num[i]));
    return v;
}
__device__ __forceinline__ void narrow(Pack<F32> &p, int i, float v) { p.num[i] = v; }
__device__ __forceinline__ void narrow(Pack<BF16> &p, int i, float v) {
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(p.num[i]) : "f"(v));
}
__device__ __forceinline__ void narrow(Pack<F16> &p, int i, float v) {
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(p.num[i]) : "f"(v));
}

struct BackArgs {
    Common c;
    const u8 *y; // [rows of the view, HIDDEN]
    const u32 *plan, *starts; // see RecvArgs
    int weighted, flags; // weighted: by the plan's weights
};

// Where a warp is in its rows, as far as reading goes: which part of which row, which units of it, which of its
// experts. All lanes walk alike. The next row's plan is under way.
struct Walk {
    Planned row, next_row;
    u32 item, m;
    int b, high, k;
    __device__ __forceinline__ void top() { // the row's first expert
        k = 0;
        m = __ballot_sync(~0u, row.at[0] != ~0u);
        while (CHUNKS > 1 && m == 0 && k + 1 < CHUNKS) seek();
    }
    __device__ __forceinline__ void seek() {
        k++;
#pragma unroll
        for (int i = 1; i < CHUNKS; i++)
            if (i == k) m = __ballot_sync(~0u, row.at[i] != ~0u);
    }
    __device__ __forceinline__ void begin(const Share &share) {
        b = item % share.parts * share.span;
        high = b + share.span < UNITS ? b + share.span : UNITS;
        top();
    }
    // The next expert, or the first one for the next units or of the next row. Returns whether the former sum is whole.
    __device__ __forceinline__ bool next(const Share &share, u32 items, const u32 *plan) {
        m &= m - 1;
        while (CHUNKS > 1 && m == 0 && k + 1 < CHUNKS) seek();
        if (m) return false;
        b += BATCH * 32;
        if (b < high) {
            top();
            return true;
        }
        item += share.step;
        if (item >= items) return true;
        row = next_row;
        if (item + share.step < items) next_row.read(plan + (u64)((item + share.step) / share.parts) * PLAN_WORDS);
        begin(share);
        return true;
    }
};

template <int T> __device__ __forceinline__ void send_back(const BackArgs &a) {
    const Common &c = a.c;
    const int tid = threadIdx.x, in = tid & 31;
    const u32 broken = c.local->broken, epoch = c.local->epoch[c.slot];
    const u64 peer = tid < RANKS ? c.peers[tid] : 0;
    const u32 counted = a.starts[RANKS], most = RANKS * MAX_TOKENS;
    // If all rows that can come are shared out finely, the first plan can be read before it is known how many came.
    Share share(most, UNITS, BATCH * 32);
    const bool fine = share.span <= 64;
    Walk ahead;
    ahead.item = share.first();
    if (fine && ahead.item < most * share.parts) ahead.row.read(a.plan + (u64)(ahead.item / share.parts) * PLAN_WORDS);
    if (broken) return;
    const u32 all = a.flags & FLAG_DISCARDED ? 0 : counted;
    if (!fine) share = Share(all, UNITS, BATCH * 32);
    const u32 items = all * share.parts;
    if (ahead.item < items) {
        if (!fine) ahead.row.read(a.plan + (u64)(ahead.item / share.parts) * PLAN_WORDS);
        if (ahead.item + share.step < items)
            ahead.next_row.read(a.plan + (u64)((ahead.item + share.step) / share.parts) * PLAN_WORDS);
        ahead.begin(share);
        auto fetch = [&](Pack<T> *into) {
            const int lane = __ffs(ahead.m) - 1;
            u32 at = __shfl_sync(~0u, ahead.row.at[0], lane);
            float weight = __shfl_sync(~0u, ahead.row.weight[0], lane);
#pragma unroll
            for (int i = 1; i < CHUNKS; i++) {
                const u32 other = __shfl_sync(~0u, ahead.row.at[i], lane);
                const float heavy = __shfl_sync(~0u, ahead.row.weight[i], lane);
                if (i == ahead.k) at = other, weight = heavy;
            }
            const u8 *y = a.y + at * (u64)(HIDDEN * Size<T>::value);
#pragma unroll
            for (int n = 0; n < BATCH; n++)
                if (ahead.b + n * 32 + in < ahead.high) into[n].load(y + (ahead.b + n * 32 + in) * Pack<T>::bytes);
            return weight;
        };
        Pack<T> now[BATCH];
        float weight = fetch(now);
        float sum[BATCH][UNIT] = {};
        while (true) { // the next numbers are on their way while these are added
            u8 *out = (u8 *)ahead.row.sum + (ahead.b + in) * Pack<WIRE>::bytes;
            const int left = ahead.high - ahead.b - in;
            const bool complete = ahead.next(share, items, a.plan), more = ahead.item < items;
            Pack<T> coming[BATCH];
            float following = 0;
            if (more) following = fetch(coming);
#pragma unroll
            for (int n = 0; n < BATCH; n++)
#pragma unroll
                for (int i = 0; i < UNIT; i++) {
                    const float term = widen(now[n], i);
                    sum[n][i] = __fadd_rn(sum[n][i], a.weighted ? __fmul_rn(term, weight) : term);
                }
            if (complete) {
#pragma unroll
                for (int n = 0; n < BATCH; n++) {
                    Pack<WIRE> p;
#pragma unroll
                    for (int i = 0; i < UNIT; i++) {
                        narrow(p, i, sum[n][i]);
                        sum[n][i] = 0;
                    }
                    if (n * 32 < left) p.store(out + n * 32 * Pack<WIRE>::bytes);
                }
            }
            if (!more) break;
            weight = following;
#pragma unroll
            for (int n = 0; n < BATCH; n++) now[n] = coming[n];
        }
    }
    const u64 flags = peer + IN_SUM_FLAGS + c.slot * (u64)IN_STRIDE + 8 * c.rank * SUM_PARTS;
    const bool told = tid < RANKS && (c.alive >> tid & 1);
    const u64 word = (u64)epoch << 32 | a.flags;
#if SUM_PARTS > 1
    __syncthreads();
    if (told) store_release(flags + 8 * blockIdx.x, word);
    if (told && blockIdx.x == 0)
        for (int p = gridDim.x; p < SUM_PARTS; p++) store_relaxed(flags + 8 * p, word);
#else
    if (last_block(&c.local->done[1]) && told) store_release(flags, word);
#endif
}
extern "C" __global__ void __launch_bounds__(THREADS, 2) moe_combine_send_bfloat16(const __grid_constant__ BackArgs a) {
    send_back<BF16>(a);
}
extern "C" __global__ void __launch_bounds__(THREADS, 2) moe_combine_send_float16(const __grid_constant__ BackArgs a) {
    send_back<F16>(a);
}
extern "C" __global__ void __launch_bounds__(THREADS, 2) moe_combine_send_float32(const __grid_constant__ BackArgs a) {
    send_back<F32>(a);
}

struct SumArgs {
    Common c;
    u8 *out;  // [tokens, HIDDEN]
    int tokens, each, parts, accumulate;  // a block takes `each` tokens, or one `parts`-th of a token
};

#define TURNS (FAN < 8 ? FAN : 8)  // sums of a token that are under way at a time

extern "C" __global__ void __launch_bounds__(THREADS, 2) moe_combine_recv(const __grid_constant__ SumArgs a) {
    const Common &c = a.c;
    const int tid = threadIdx.x;
    __shared__ u32 flags[RANKS];
    u32 epoch;
    const int groups = a.each < WARPS ? a.each : WARPS, wide = THREADS / groups, group = tid / wide, in = tid % wide;
    const int first = blockIdx.x / a.parts * a.each, part = blockIdx.x % a.parts;
    int n = first + group < a.tokens ? c.turns[first + group] : 0;
    if (!await_all<SUM_PARTS>(c, IN_SUM_FLAGS, flags, &epoch)) return;
    if (blockIdx.x == 0 && tid == 0) {
        u64 gone = 0;
        for (int r = 0; r < RANKS; r++)
            if ((c.alive >> r & 1) && (flags[r] & FLAG_DISCARDED)) gone |= 1ull << r;
        if (gone) tell(c, DISCARDED, (i64)gone, 0);
    }
    const u64 sums = c.mine + c.slot * (u64)IN_STRIDE + IN_SUMS;
    for (int i = group; i < a.each; i += groups) {
        const int t = first + i;
        if (t >= a.tokens) break;
        if (i != group) n = c.turns[t];
        u8 *out = a.out + (i64)t * (HIDDEN * Size<OUT>::value);
        for (int b = part * wide + in; b < UNITS; b += a.parts * wide) {
            float sum[UNIT] = {};
            const u8 *from = (const u8 *)(sums + (u64)t * FAN * SUM_BYTES) + b * Pack<WIRE>::bytes;
            for (int k = 0; k < n; k += TURNS) {
                Pack<WIRE> v[TURNS];
#pragma unroll
                for (int q = 0; q < TURNS; q++)
                    if (k + q < n) v[q].load(from + (u64)(k + q) * SUM_BYTES);
#pragma unroll
                for (int q = 0; q < TURNS; q++)
                    if (k + q < n)
#pragma unroll
                        for (int j = 0; j < UNIT; j++) sum[j] = __fadd_rn(sum[j], widen(v[q], j));
            }
            Pack<OUT> p;
            if (a.accumulate) {
                p.load(out + b * Pack<OUT>::bytes);
#pragma unroll
                for (int j = 0; j < UNIT; j++) sum[j] = __fadd_rn(sum[j], widen(p, j));
            }
#pragma unroll
            for (int j = 0; j < UNIT; j++) narrow(p, j, sum[j]);
            p.store(out + b * Pack<OUT>::bytes);
        }
    }
}
