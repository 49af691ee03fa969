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

// Wait until a peer's word carries this epoch. One thread; returns 0, or because of whom it does not come: the peer, or
// whom it has given up because of.
__device__ COLD u64 await(const Common &c, u64 flag, int rank, u32 epoch) {
    const u64 note = c.mine + IN_NOTES + 8 * rank;
    u64 begin = 0;
    for (u32 n = 0;; n++) {
        u64 v = load_acquire((const void *)flag);
        if ((u32)(v >> 32) == epoch) return 0;
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

// The whole block waits for the words of all ranks that take part, PARTS of each. `low`: what the first of them
// carries. Returns whether all came, and the epoch.
template <int PARTS> __device__ __forceinline__ bool await_all(const Common &c, u64 flags, u32 *low, u32 *epoch) {
    static_assert(RANKS * PARTS <= THREADS, "a thread looks at one word");
    const u32 broken = c.local->broken, e = c.local->epoch[c.slot]; // these and the first look are under way together
    const int tid = threadIdx.x, rank = tid / PARTS;
    const u64 at = c.mine + flags + c.slot * (u64)IN_STRIDE + 8 * tid;
    u64 missing = 0;
    if (tid < RANKS * PARTS) {
        const u64 v = load_acquire((const void *)at);
        u32 word = c.alive >> rank & 1 ? (u32)v : 0;
        if ((c.alive >> rank & 1) && (u32)(v >> 32) != e && !broken) {
            missing = await(c, at, rank, e);
            word = *(volatile u32 *)at;
        }
        if (tid % PARTS == 0) low[rank] = word;
    }
    *epoch = e;
    if (!__syncthreads_or(broken || missing)) return true;
    end_step(c, missing, broken);
    return false;
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
