// Waiting for peers with a limit, and what becomes of it when they do not come; the end of a grid.

__device__ COLD void tell(const Common &c, u32 kind, i64 first, i64 second) {
    volatile Host *h = c.host;
    const u32 heard = h->heard[kind];
    if (atomicCAS(&c.local->claimed[kind], heard, heard + 1) != heard) return; // the host has yet to read the last one
    h->epoch[kind] = c.local->epoch[c.slot];
    h->first[kind] = first;
    h->second[kind] = second;
    __threadfence_system(); // the host reads these when it sees the count
    h->told[kind] = heard + 1;
}

// This rank takes no further step: tells the host, and leaves a note with all others. The first block to do so leaves
// it, once: whoever finds our note may free its memory. Called by whole blocks.
__device__ COLD void give_up(const Common &c, u64 culprits) {
    if (threadIdx.x) return;
    volatile Host *h = c.host;
    volatile u64 *all = &c.local->culprits;
    atomicOr(&c.local->culprits, culprits);
    u64 known;
    do { // another block may have added one meanwhile, and stored before us
        h->culprits = known = *all;
        __threadfence_system();
    } while (known != *all);
    h->lost_epoch = c.local->epoch[c.slot];
    __threadfence_system();
    h->lost = 1;
    if (atomicOr(&c.local->broken, 1u)) return;
    for (int r = 0; r < RANKS; r++)
        if (r != (int)c.rank && (c.alive >> r & 1)) store_release(c.peers[r] + IN_NOTES + 8 * c.rank, culprits);
}

__device__ __forceinline__ bool all_are(const uint4 &v, u32 epoch) {
    return v.x == epoch && v.y == epoch && v.z == epoch && v.w == epoch;
}
// Wait until a peer's word carries this epoch, or four marks do. One thread; returns 0, or because of whom it does not
// come: the peer, or whom it has given up because of.
__device__ COLD u64 await(const Common &c, u64 at, bool four, int rank, u32 epoch) {
    const u64 note = c.mine + IN_NOTES + 8 * rank;
    u64 begin = 0;
    for (u32 n = 0;; n++) {
        if (four ? all_are(load_four_acquire(at), epoch) : (u32)(load_acquire((const void *)at) >> 32) == epoch)
            return 0;
        if ((n & 15) == 0) {
            u64 t = now(), noted = *(volatile u64 *)note;
            if (n == 0) begin = t;
            if (noted || t - begin > c.limit) return noted ? noted : 1ull << rank;
        }
    }
}

// Some threads of the block know that the step cannot be: because peers are missing, or this rank is broken already.
__device__ COLD void end_step(const Common &c, u64 missing, u32 broken) {
    __shared__ u64 all;
    if (threadIdx.x == 0) all = 0;
    if (__syncthreads_or(broken)) return; // who broke it has told
    if (missing) atomicOr(&all, missing);
    __syncthreads();
    give_up(c, all);
}

// What a source tells a receiver: a word, and, if PARTS is not 0, a mark of each of its other blocks. Words of all
// sources come first, then PARTS marks of each.
#define MARKS_AT ((8 * RANKS + 15) / 16 * 16)

// The whole block waits for the words and marks of all ranks that take part. `low`: what the words carry. Returns whether
// all came, and the epoch.
template <int PARTS> __device__ __forceinline__ bool await_all(const Common &c, u64 flags, u32 *low, u32 *epoch) {
    const int apart = (RANKS + 31) / 32 * 32, tid = threadIdx.x; // one warp waits for words, others meanwhile for marks
    const u32 broken = c.local->broken, e = c.local->epoch[c.slot]; // these and the first look are under way together
    const u64 at = c.mine + flags + c.slot * (u64)IN_STRIDE;
    u64 missing = 0;
    if (tid < RANKS) {
        const u64 v = load_acquire((const void *)(at + 8 * tid));
        u32 word = c.alive >> tid & 1 ? (u32)v : 0;
        if ((c.alive >> tid & 1) && (u32)(v >> 32) != e && !broken) {
            missing = await(c, at + 8 * tid, false, tid, e);
            word = *(volatile u32 *)(at + 8 * tid);
        }
        low[tid] = word;
    }
    if (PARTS && tid >= apart) {
#pragma unroll 1
        for (int q = tid - apart; q < RANKS * PARTS / 4 && !missing; q += blockDim.x - apart) {
            const u64 marks = at + MARKS_AT + 16 * q;
            const int rank = q / (PARTS ? PARTS / 4 : 1);
            const uint4 v = load_four_acquire(marks);
            if ((c.alive >> rank & 1) && !all_are(v, e) && !broken) missing = await(c, marks, true, rank, e);
        }
    }
    *epoch = e;
    if (!__syncthreads_or(broken || missing)) return true;
    end_step(c, missing, broken);
    return false;
}

// The whole block is over, and what it wrote may be read. The `head` block writes the word, and the marks of blocks that
// this step does not have, of which there are `there`; another one its own mark. Thread r does so at rank r, if it is told
// (`mine`), whose memory is at `peer`.
template <int PARTS>
__device__ __forceinline__ void tell_all(const Common &c, u64 flags, u64 peer, bool head, u32 there, u32 index,
                                         u32 epoch, u32 low, bool mine) {
    const u32 tid = threadIdx.x;
    const u64 at = peer + flags + c.slot * (u64)IN_STRIDE, marks = at + MARKS_AT + 4ull * PARTS * c.rank;
    const bool told = tid < RANKS && mine && (c.alive >> tid & 1);
    __syncthreads();
    if (!told) return;
    if (!head) return store_mark(marks + 4 * index, epoch);
    store_release(at + 8 * c.rank, (u64)epoch << 32 | low);
    u32 p = there;
#pragma unroll 1
    for (; p < PARTS && p % 4; p++) store_relaxed(marks + 4 * p, epoch);
#pragma unroll 1
    for (; p < PARTS; p += 4) store_four_relaxed(marks + 4 * p, epoch);
}

// The whole block is over. The last one of the grid returns true: what all blocks wrote happened before, by way of the
// counter, so that every GPU sees it that acquires what the last block then releases to the system.
__device__ __forceinline__ bool last_block(u32 *done) {
    __shared__ u32 last;
    __syncthreads();
    if (threadIdx.x == 0) {
        last = count_up(done) == gridDim.x - 1;
        if (last) *done = 0;
    }
    __syncthreads();
    return last;
}
