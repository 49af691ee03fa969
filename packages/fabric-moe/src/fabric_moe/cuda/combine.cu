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
#define BATCH 2 // of these at a time
#define DEPTH 4 // experts of a row whose numbers are under way at a time

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

template <int T> __device__ __forceinline__ void send_back(const BackArgs &a) {
    const Common &c = a.c;
    const int tid = threadIdx.x, in = tid & 31;
    const u32 broken = c.local->broken, epoch = c.local->epoch[c.slot];
    const u64 peer = tid < RANKS ? c.peers[tid] : 0;
    const u32 counted = a.starts[RANKS], most = RANKS * MAX_TOKENS;
    // If all rows that can come are shared out finely, the first plan can be read before it is known how many came.
    Share<UNITS, BATCH * 32, 16> share(most);
    const bool early = share.fine();
    Planned coming;
    u32 item = share.first();
    if (early && item < most * share.FINE) coming.read(a.plan + (u64)share.row(item) * PLAN_WORDS);
    if (broken) return;
    const u32 all = a.flags & FLAG_DISCARDED ? 0 : counted;
    if (!early) share = Share<UNITS, BATCH * 32, 16>(all);
    const u32 items = all * share.parts();
    if (!early && item < items) coming.read(a.plan + (u64)share.row(item) * PLAN_WORDS);
#pragma unroll 1
    for (; item < items; item += share.step) {
        const Planned row = coming;
        if (item + share.step < items) coming.read(a.plan + (u64)share.row(item + share.step) * PLAN_WORDS);
        const int low = share.low(item), high = low + share.span() < UNITS ? low + share.span() : UNITS;
#pragma unroll 1
        for (int b = low + in; b - in < high; b += BATCH * 32) {
            float sum[BATCH][UNIT] = {};
#pragma unroll
            for (int k = 0; k < CHUNKS; k++) {
                u32 m = __ballot_sync(~0u, row.at[k] != ~0u); // experts of the row, which are added in their order
#pragma unroll 1
                while (m) {
                    const int deep = T == F32 ? DEPTH / 2 : DEPTH; // as a thread's registers hold them
                    Pack<T> v[deep][BATCH];
                    float weight[deep];
                    u32 left = m;
#pragma unroll
                    for (int q = 0; q < deep; q++) {
                        if (!left) break;
                        const int lane = __ffs(left) - 1;
                        left &= left - 1;
                        const u8 *y = a.y + __shfl_sync(~0u, row.at[k], lane) * (u64)(HIDDEN * Size<T>::value);
                        weight[q] = __shfl_sync(~0u, row.weight[k], lane);
#pragma unroll
                        for (int n = 0; n < BATCH; n++)
                            if (b + n * 32 < high) v[q][n].load(y + (b + n * 32) * Pack<T>::bytes);
                    }
#pragma unroll
                    for (int q = 0; q < deep; q++) {
                        if (!m) break;
                        m &= m - 1;
#pragma unroll
                        for (int n = 0; n < BATCH; n++)
#pragma unroll
                            for (int i = 0; i < UNIT; i++) {
                                const float term = widen(v[q][n], i);
                                sum[n][i] = __fadd_rn(sum[n][i], a.weighted ? __fmul_rn(term, weight[q]) : term);
                            }
                    }
                }
            }
#pragma unroll
            for (int n = 0; n < BATCH; n++) {
                Pack<WIRE> p;
#pragma unroll
                for (int i = 0; i < UNIT; i++) narrow(p, i, sum[n][i]);
                if (b + n * 32 < high) p.store((u8 *)row.sum + (b + n * 32) * Pack<WIRE>::bytes);
            }
        }
    }
#if SUM_PARTS
    tell_all<SUM_PARTS>(c, IN_SUM_FLAGS, peer, blockIdx.x == 0, gridDim.x - 1, blockIdx.x - 1, epoch, a.flags, true);
#else
    if (last_block(&c.local->done[1]) && tid < RANKS && (c.alive >> tid & 1))
        store_release(peer + IN_SUM_FLAGS + c.slot * (u64)IN_STRIDE + 8 * c.rank, (u64)epoch << 32 | a.flags);
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
