// Combine. Sums are made in float32, one product and one addition at a time, never fused: at the experts' rank in the order of a
// token's top-k, at its own rank in the order of the ranks. The bits are those of the path in host memory.

#define BF16 0
#define F32 1
#define F16 2

template <int T> struct Size {
    static const int value = T == F32 ? 4 : 2;
};
#define UNIT widest(HIDDEN, 8) // elements of a thread at a time
#define UNITS (HIDDEN / UNIT)

template <int T> struct Num {
    typedef u16 type;
};
template <> struct Num<F32> {
    typedef float type;
};
template <int T> struct Pack { // UNIT numbers, as few loads as that takes
    static const int bytes = UNIT * Size<T>::value, step = bytes > 16 ? 16 : bytes;
    typedef typename Bits<step>::type Word;
    union {
        Word word[bytes / step];
        typename Num<T>::type num[UNIT];
    };
    __device__ __forceinline__ void load(const u8 *at) {
        for (int i = 0; i < bytes / step; i++) word[i] = ((const Word *)at)[i];
    }
    __device__ __forceinline__ void store(u8 *at) const {
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
    Nic c;
    const u8 *y; // [rows of the view, HIDDEN]
    const u32 *plan; // see RecvArgs
    int weighted, flags;
};

// A block takes a row. The last one adds a head in front of each source's sums, and tells the proxy.
template <int T> __device__ __forceinline__ void send_back(const BackArgs &a) {
    const Nic &c = a.c;
    const int tid = threadIdx.x;
    __shared__ u32 plan[2 * TOPK];
    const u32 broken = c.local->broken, epoch = c.local->epoch[c.slot];
    if (broken) return;
    const u32 *theirs = THEIRS(c), rows = a.flags & FLAG_DISCARDED ? 0 : theirs[RANKS];
    u8 *sums = c.out + OUT_SUMS;
    for (u32 row = blockIdx.x; row < rows; row += gridDim.x) {
        u8 *out = sums + (u64)row * SUM_BYTES + (source_of(theirs, row) + 1) * LINE;
        __syncthreads(); // the former row is done
        for (int j = tid; j < 2 * TOPK; j += WORKERS) plan[j] = a.plan[(u64)row * 2 * TOPK + j];
        __syncthreads();
        for (int u = tid; u < UNITS; u += WORKERS) {
            float sum[UNIT] = {};
            for (int j = 0; j < TOPK; j++) {
                if (plan[j] == ~0u) continue;
                const float weight = __uint_as_float(plan[TOPK + j]);
                Pack<T> y;
                y.load(a.y + (u64)plan[j] * (HIDDEN * Size<T>::value) + (u64)u * Pack<T>::bytes);
#pragma unroll
                for (int i = 0; i < UNIT; i++) {
                    const float term = widen(y, i);
                    sum[i] = __fadd_rn(sum[i], a.weighted ? __fmul_rn(term, weight) : term);
                }
            }
            Pack<WIRE> p;
#pragma unroll
            for (int i = 0; i < UNIT; i++) narrow(p, i, sum[i]);
            p.store(out + (u64)u * Pack<WIRE>::bytes);
        }
    }
    if (!last_block(&c.local->done[1])) return;
    if (tid < RANKS) {
        *(u64 *)(sums + (u64)theirs[tid] * SUM_BYTES + tid * LINE) = (u64)epoch << 32 | a.flags;
        __threadfence_system();
    }
    __syncthreads();
    if (tid == 0) store_release(&c.mail->summed[c.slot], epoch);
}
extern "C" __global__ void __launch_bounds__(WORKERS) moe_nic_combine_bfloat16(const __grid_constant__ BackArgs a) {
    send_back<BF16>(a);
}
extern "C" __global__ void __launch_bounds__(WORKERS) moe_nic_combine_float16(const __grid_constant__ BackArgs a) {
    send_back<F16>(a);
}
extern "C" __global__ void __launch_bounds__(WORKERS) moe_nic_combine_float32(const __grid_constant__ BackArgs a) {
    send_back<F32>(a);
}

struct SumArgs {
    Nic c;
    u8 *out; // [tokens, HIDDEN]
    int tokens, accumulate;
};

__device__ __forceinline__ u64 sums_head(const Nic &c, int d) {
    return *(const volatile u64 *)(c.in + IN_SUMS + (u64)MINE(c)[d] * SUM_BYTES + d * LINE);
}

extern "C" __global__ void __launch_bounds__(THREADS) moe_nic_wait_sums(const __grid_constant__ SumArgs a) {
    const Nic &c = a.c;
    __shared__ u64 wrong, discarded;
    const int d = threadIdx.x;
    const u32 broken = c.local->broken, epoch = c.local->epoch[c.slot];
    if (broken) return;
    if (d == 0) wrong = discarded = 0;
    if (!wait_for(c, &c.mail->sums_here[c.slot], epoch, [&](int s) { return (u32)(sums_head(c, s) >> 32) != epoch; }))
        return;
    if (d < RANKS && (c.alive >> d & 1)) {
        const u64 head = sums_head(c, d);
        if ((u32)(head >> 32) != epoch) atomicOr(&wrong, 1ull << d);
        else if (head & FLAG_DISCARDED) atomicOr(&discarded, 1ull << d);
    }
    __syncthreads();
    if (d == 0 && wrong) give_up(c, wrong); // memory was written out of turn
    else if (d == 0 && discarded) tell(c, DISCARDED, (i64)discarded, 0);
}

// A block takes a token.
extern "C" __global__ void __launch_bounds__(WORKERS) moe_nic_combine_recv(const __grid_constant__ SumArgs a) {
    const Nic &c = a.c;
    if (c.local->broken) return;
    for (int t = blockIdx.x; t < a.tokens; t += gridDim.x) {
        const int n = __popcll(MASK(c)[t]);
        u8 *out = a.out + (i64)t * (HIDDEN * Size<OUT>::value);
        for (int u = threadIdx.x; u < UNITS; u += WORKERS) {
            float sum[UNIT] = {};
            for (int i = 0; i < n; i++) {
                Pack<WIRE> p;
                p.load(c.in + 16ull * TABLE(c)[(i64)t * FAN + i] + (u64)u * Pack<WIRE>::bytes);
#pragma unroll
                for (int k = 0; k < UNIT; k++) sum[k] = __fadd_rn(sum[k], widen(p, k));
            }
            Pack<OUT> p;
            if (a.accumulate) {
                p.load(out + (u64)u * Pack<OUT>::bytes);
#pragma unroll
                for (int k = 0; k < UNIT; k++) sum[k] = __fadd_rn(sum[k], widen(p, k));
            }
#pragma unroll
            for (int k = 0; k < UNIT; k++) narrow(p, k, sum[k]);
            p.store(out + (u64)u * Pack<OUT>::bytes);
        }
    }
}
