// Tokens on a GPU that travel through the engine: what the kernels share. Compiled at run time for one shape; layout.py makes the
// macros. The proxy (native/gpu_*.c) moves the bytes; kernels and proxy tell each other how far they are by words in pinned memory,
// which carry the number of the use of a slot ("epoch"). Epochs live on the GPU, so a graph can be replayed.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define THREADS 512 // of kernels of one block
#define WORKERS 256 // of the others
#define WARPS (THREADS / 32)
#define LINE 64 // a head
#define META_WORDS (3 * TOPK + 1) // local ids, places, weights, stamp

// What a kernel may have to say, besides that a peer did not come (report.py).
#define BAD_ID 0
#define BAD_LIVE 1
#define OVERFLOW 2
#define DISCARDED 3

#define FLAG_DISCARDED 16 // in a head: this rank computes nothing for the step

struct Mail { // moe_gpu_mail of gpu.h
    u32 counted[16], packed[16], summed[16]; // ours
    u32 rows_here[16], sums_here[16]; // the proxy's, as all that follows
    u32 begun[16]; // it has seen that we counted
    u64 heads[16]; // ranks whose counts it has found since
    u64 gone, noted;
};

struct Host { // report.py
    u32 lost, lost_epoch;
    u64 culprits;
    u32 told[4], heard[4], epoch[4];
    i64 first[4], second[4];
};

struct Local { // this rank's own words
    u32 epoch[16];
    u32 done[2]; // blocks that have ended
    u32 broken, unreachable;
    u32 claimed[4];
    u64 culprits;
};

struct Nic { // of one slot
    Mail *mail;
    Host *host;
    Local *local;
    u32 *counted; // pinned: [RANKS] rows for each rank, [RANKS][HELD] copies for each of its experts
    const u32 *arrived; // pinned, likewise: of each source, for us
    u8 *out; // what is sent: rows, at OUT_SUMS sums
    const u8 *in; // what comes: rows, at IN_SUMS sums
    u8 *scratch; // what the kernels of a step tell each other, see below
    u64 alive, limit; // a set of ranks; ns that a kernel waits
    u32 rank, slot;
};
#define MINE(c) ((u32 *)((c).scratch + S_MINE)) // [RANKS + 1] where our rows for each rank begin
#define THEIRS(c) ((u32 *)((c).scratch + S_THEIRS)) // [RANKS + 1] where each source's rows begin among all that came
#define LATE(c) ((u32 *)((c).scratch + S_LATE)) // [RANKS] where those beyond the private ones begin, in the shared memory
#define MASK(c) ((u64 *)((c).scratch + S_MASK)) // [MAX_TOKENS] ranks of each token
#define IDS(c) ((int *)((c).scratch + S_IDS)) // [MAX_TOKENS][TOPK] experts, checked
#define PLACE(c) ((u32 *)((c).scratch + S_PLACE)) // likewise: earlier copies of ours for the same expert
#define SEAT(c) ((u32 *)((c).scratch + S_SEAT)) // [MAX_TOKENS][FAN] earlier rows of ours for the same rank
#define TABLE(c) ((u32 *)((c).scratch + S_TABLE)) // likewise: where the sum of it will lie in `in`, in units of 16 bytes
#define TAB(c) ((u32 *)((c).scratch + S_TAB)) // [RANKS][HELD] where each source's copies for an expert begin in the view

__device__ __forceinline__ u32 load_acquire(const u32 *at) {
    u32 v;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
    return v;
}
__device__ __forceinline__ u64 load_acquire(const u64 *at) {
    u64 v;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(at) : "memory");
    return v;
}
__device__ __forceinline__ void store_release(u32 *at, u32 v) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(at), "r"(v) : "memory");
}
__device__ __forceinline__ u64 now() {
    u64 t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}

// Bytes that one thread moves at a time.
template <int N> struct Bits;
template <> struct Bits<16> {
    typedef uint4 type;
};
template <> struct Bits<8> {
    typedef uint2 type;
};
template <> struct Bits<4> {
    typedef u32 type;
};
template <> struct Bits<2> {
    typedef u16 type;
};
template <> struct Bits<1> {
    typedef u8 type;
};
__host__ __device__ constexpr int widest(int bytes, int most) {
    return bytes % most == 0 || most == 1 ? most : widest(bytes, most / 2);
}
#define VEC widest(TOKEN_BYTES, 16)
#define VECS (TOKEN_BYTES / VEC)
typedef Bits<VEC>::type Vec;

__device__ __forceinline__ int owner(int expert) {
#if EACH == 0
    return expert;
#else
    return expert < MORE * (EACH + 1) ? expert / (EACH + 1) : MORE + (expert - MORE * (EACH + 1)) / EACH;
#endif
}
__device__ __forceinline__ int first_of(int rank) { return rank * EACH + (rank < MORE ? rank : MORE); }

// Which source a row is of: the last one that begins at it or before.
__device__ __forceinline__ int source_of(const u32 *theirs, u32 row) {
    int low = 0, high = RANKS - 1;
    while (low < high) {
        const int mid = (low + high + 1) / 2;
        if (theirs[mid] <= row) low = mid;
        else high = mid - 1;
    }
    return low;
}
// Where row n of source s lies among those that came, in rows.
__device__ __forceinline__ u64 lies_at(const u32 *late, int s, u32 n) {
    return n < PRIVATE ? (u64)s * PRIVATE + n : (u64)RANKS * PRIVATE + late[s] + (n - PRIVATE);
}

// The whole block is over; whether it is the last one of the grid. What all blocks wrote happened before.
__device__ __forceinline__ bool last_block(u32 *done) {
    __shared__ u32 last;
    __syncthreads();
    if (threadIdx.x == 0) {
        u32 old;
        asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(old) : "l"(done) : "memory");
        last = old == gridDim.x - 1;
        if (last) *done = 0;
    }
    __syncthreads();
    return last;
}

__device__ __noinline__ void tell(const Nic &c, u32 kind, i64 first, i64 second) {
    volatile Host *h = c.host;
    const u32 heard = h->heard[kind];
    if (atomicCAS(&c.local->claimed[kind], heard, heard + 1) != heard) return; // the host has yet to read the last one
    h->epoch[kind] = c.local->epoch[c.slot];
    h->first[kind] = first;
    h->second[kind] = second;
    __threadfence_system(); // the host reads these when it sees the count
    h->told[kind] = heard + 1;
}

// This rank takes no further step. One thread. The proxy tells the others.
__device__ __noinline__ void give_up(const Nic &c, u64 culprits) {
    volatile Host *h = c.host;
    if (atomicOr(&c.local->broken, 1u)) return;
    h->culprits = culprits;
    h->lost_epoch = c.local->epoch[c.slot];
    __threadfence_system();
    h->lost = 1;
}
