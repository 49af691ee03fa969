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
    const u8 *y;        // [rows of the view, HIDDEN]
    const u32 *table;   // of the view, see RecvArgs
    int weighted, kind, held, flags;
};

// Where a lane is in a row: which units, and which of the row's experts. All lanes of a warp walk alike.
struct Walk {
    int b, k;
    u32 m;
    __device__ __forceinline__ void begin(const Chosen &c) {
        k = 0;
        m = c.mask[0];
        while (CHUNKS > 1 && m == 0 && k + 1 < CHUNKS) m = c.mask[++k];
    }
    // The next expert, or the first one for the next units. Returns whether the sum of the former units is complete.
    __device__ __forceinline__ bool next(const Chosen &c, int units) {
        m &= m - 1;
        while (CHUNKS > 1 && m == 0 && k + 1 < CHUNKS) m = c.mask[++k];
        if (m) return false;
        b += units;
        begin(c);
        return true;
    }
};

template <int T> __device__ __forceinline__ void send_back(const BackArgs &a) {
    extern __shared__ u32 words[];
    const Common &c = a.c;
    const int tid = threadIdx.x;
    u32 *table = words;                      // [RANKS * held]
    u32 *starts = table + RANKS * a.held;    // [RANKS + 1]
    const u32 broken = c.local->broken, epoch = c.local->epoch[c.slot];
    for (int q = tid; q < RANKS * a.held + RANKS + 1; q += THREADS) table[q] = a.table[q];
    if (broken) return;
    __syncthreads();
    const u32 all = a.flags & FLAG_DISCARDED ? 0 : starts[RANKS];
    const u64 mine = c.mine + c.slot * (u64)IN_STRIDE;
    const Share share(all, UNITS, BATCH * 32);
    const bool once = a.kind == COMPACT || a.kind == RANK_MAJOR, weighted = a.weighted && !once;
    const int in = tid & 31;
    for (u32 item = share.first(); item < share.items; item += share.step) {
        const u32 row = item / share.parts;
        const int low = item % share.parts * share.span, high = low + share.span < UNITS ? low + share.span : UNITS;
        if (low >= UNITS) continue;
        const int s = source_of(starts, row);
        const u64 at = (u64)s * MAX_TOKENS + row - starts[s];
        const u32 *meta = (const u32 *)(mine + IN_META + at * META_BYTES);
        Chosen chosen;
        read_meta(chosen, meta);
        u8 *out = (u8 *)(region(c, s, IN_SUMS) + (u64)meta[3 * TOPK] * SUM_BYTES);
        place_copies(chosen, once ? 0 : table, s, a.held, a.kind == COMPACT ? row : at);

        Walk here;
        here.b = low;
        here.begin(chosen);
        Pack<T> now[BATCH];
        float weight;
        auto fetch = [&](Pack<T> *into, const Walk &w) {
            const int lane = __ffs(w.m) - 1;
            const u8 *y = a.y + __shfl_sync(~0u, chosen.at[w.k], lane) * (i64)(HIDDEN * Size<T>::value);
#pragma unroll
            for (int n = 0; n < BATCH; n++)
                if (w.b + n * 32 + in < high) into[n].load(y + (w.b + n * 32 + in) * Pack<T>::bytes);
            return weighted ? __shfl_sync(~0u, chosen.weight[w.k], lane) : 1.f;
        };
        weight = fetch(now, here);
        float sum[BATCH][UNIT] = {};
        while (here.b < high) {  // the next numbers are on their way while these are added
            Walk then = here;
            const bool complete = then.next(chosen, BATCH * 32);
            Pack<T> coming[BATCH];
            float following = 0;
            if (then.b < high) following = fetch(coming, then);
#pragma unroll
            for (int n = 0; n < BATCH; n++)
#pragma unroll
                for (int i = 0; i < UNIT; i++) {
                    float term = widen(now[n], i);
                    sum[n][i] = __fadd_rn(sum[n][i], weighted ? __fmul_rn(term, weight) : term);
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
                    if (here.b + n * 32 + in < high) p.store(out + (here.b + n * 32 + in) * Pack<WIRE>::bytes);
                }
            }
            here = then;
            weight = following;
#pragma unroll
            for (int n = 0; n < BATCH; n++) now[n] = coming[n];
        }
    }
    if (last_block(&c.local->done[1]))
        for (int d = tid; d < RANKS; d += THREADS)
            if (c.alive >> d & 1) store_release(region(c, d, IN_SUM_FLAGS) + 8 * c.rank, (u64)epoch << 32 | a.flags);
}
extern "C" __global__ void __launch_bounds__(THREADS, 2) moe_combine_send_bfloat16(BackArgs a) { send_back<BF16>(a); }
extern "C" __global__ void __launch_bounds__(THREADS, 2) moe_combine_send_float16(BackArgs a) { send_back<F16>(a); }
extern "C" __global__ void __launch_bounds__(THREADS, 2) moe_combine_send_float32(BackArgs a) { send_back<F32>(a); }

struct SumArgs {
    Common c;
    u8 *out;  // [tokens, HIDDEN]
    int tokens, each, parts, accumulate;  // a block takes `each` tokens, or one `parts`-th of a token
};

#define TURNS (FAN < 8 ? FAN : 8)  // sums of a token that are under way at a time

extern "C" __global__ void __launch_bounds__(THREADS, 2) moe_combine_recv(SumArgs a) {
    const Common &c = a.c;
    const int tid = threadIdx.x;
    __shared__ u32 flags[RANKS];
    u32 epoch;
    const int groups = a.each < WARPS ? a.each : WARPS, wide = THREADS / groups, group = tid / wide, in = tid % wide;
    const int first = blockIdx.x / a.parts * a.each, part = blockIdx.x % a.parts;
    int n = first + group < a.tokens ? c.turns[first + group] : 0;
    if (!await_all(c, IN_SUM_FLAGS, flags, &epoch)) return;
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
