/* The GPU side: compiled to PTX once (tools/make_ptx.py, clang 14, no CUDA installation needed), which every driver
 * translates for its GPU. */
#define GLOBAL extern "C" __attribute__((global))
typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

struct piece {
    u64 dst, src, len;
};

static __attribute__((device)) inline u32 tid() { return __nvvm_read_ptx_sreg_tid_x(); }
static __attribute__((device)) inline u32 threads() { return __nvvm_read_ptx_sreg_ntid_x(); }
static __attribute__((device)) inline u32 block() { return __nvvm_read_ptx_sreg_ctaid_x(); }
static __attribute__((device)) inline u32 blocks() { return __nvvm_read_ptx_sreg_nctaid_x(); }
static __attribute__((device)) inline void sync_block() { __syncthreads(); }

struct v4 {
    u32 x, y, z, w;
};
/* What a copy reads does not change while its kernel runs (C7): the read-only path keeps many loads under way. A kernel that
 * stays (STAY) reads again what was written anew meanwhile: the fence before each command empties L1. */
template <bool STAY> static __attribute__((device)) inline v4 load16(u64 at) {
    v4 v;
    if (STAY)
        asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
    else asm("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
    return v;
}
static __attribute__((device)) inline void store16(u64 at, v4 v) {
    asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
template <bool STAY> static __attribute__((device)) inline u64 load8(u64 at) {
    u64 v;
    if (STAY) asm volatile("ld.global.u64 %0, [%1];" : "=l"(v) : "l"(at));
    else asm("ld.global.nc.u64 %0, [%1];" : "=l"(v) : "l"(at));
    return v;
}
template <bool STAY> static __attribute__((device)) inline u32 load4(u64 at) {
    u32 v;
    if (STAY) asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(at));
    else asm("ld.global.nc.u32 %0, [%1];" : "=r"(v) : "l"(at));
    return v;
}
template <bool STAY> static __attribute__((device)) inline void copy4(u64 dst, u64 src) {
    asm volatile("st.global.u32 [%0], %1;" ::"l"(dst), "r"(load4<STAY>(src)) : "memory");
}
template <bool STAY> static __attribute__((device)) inline void copy1(u64 dst, u64 src) {
    u32 v;
    if (STAY) asm volatile("ld.global.u8 %0, [%1];" : "=r"(v) : "l"(src));
    else asm("ld.global.nc.u8 %0, [%1];" : "=r"(v) : "l"(src));
    asm volatile("st.global.u8 [%0], %1;" ::"l"(dst), "r"(v) : "memory");
}

template <bool STAY, int N> static __attribute__((device)) inline u64 copy_step(u64 dst, u64 src, u64 i) {
    v4 v[N];
#pragma unroll
    for (int k = 0; k < N; k++) v[k] = load16<STAY>(src + (i + 32 * k) * 16);
#pragma unroll
    for (int k = 0; k < N; k++) store16(dst + (i + 32 * k) * 16, v[k]);
    return i + 32 * N;
}

/* One warp, one stretch of bytes. */
template <bool STAY> static __attribute__((device)) inline void copy_warp(u64 dst, u64 src, u64 len, u32 lane) {
    u64 odd = dst | src | len;
    if ((odd & 15) == 0) {
        u64 n = len >> 4, i = lane;
        while (i + 7 * 32 < n) i = copy_step<STAY, 8>(dst, src, i); /* so many loads under way per lane */
        if (i + 3 * 32 < n) i = copy_step<STAY, 4>(dst, src, i);
        if (i + 32 < n) i = copy_step<STAY, 2>(dst, src, i);
        while (i < n) i = copy_step<STAY, 1>(dst, src, i);
    } else if ((odd & 3) == 0) {
        for (u64 i = lane; i < len >> 2; i += 32) copy4<STAY>(dst + i * 4, src + i * 4);
    } else if (((dst ^ src) & 15) == 0 && len >= 64) { /* the same step at both: a ragged head and tail */
        u64 head = (16 - (dst & 15)) & 15, body = (len - head) & ~15ull;
        if (lane < head) copy1<STAY>(dst + lane, src + lane);
        for (u64 i = lane; i < body >> 4; i += 32) store16(dst + head + i * 16, load16<STAY>(src + head + i * 16));
        for (u64 i = head + body + lane; i < len; i += 32) copy1<STAY>(dst + i, src + i);
    } else {
        for (u64 i = lane; i < len; i += 32) copy1<STAY>(dst + i, src + i);
    }
}

/* The last of `all` blocks to end says so in `word`, when all that was copied is visible to the whole system: each block's
 * fence makes its part visible to the GPU before it counts, the last one's makes all of them visible to everybody. `left`: a
 * counter in GPU memory, 0 between kernels. */
static __attribute__((device)) inline void tell(u64 left, u32 all, u64 word, u64 value) {
    sync_block();
    if (tid()) return;
    u32 old;
    asm volatile("membar.gl;" ::: "memory");
    asm volatile("atom.global.add.u32 %0, [%1], 1;" : "=r"(old) : "l"(left) : "memory");
    if (old != all - 1) return;
    asm volatile("st.global.u32 [%0], 0;" ::"l"(left) : "memory");
    asm volatile("membar.sys;" ::: "memory");
    asm volatile("st.volatile.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

/* `n` pieces (dst, src, len) of at most per * chunk bytes: one warp takes one chunk of one piece at a time. This block is
 * number `me` of `all`. */
template <bool STAY>
static __attribute__((device)) inline void copy_list(u64 list, u32 n, u32 per, u32 chunk, u32 me, u32 all) {
    u32 warps = threads() >> 5, lane = tid() & 31;
    for (u32 w = me * warps + (tid() >> 5); w < n * per; w += all * warps) {
        u32 i = w / per, part = w - i * per;
        u64 at = list + i * 24ull;
        u64 dst = load8<STAY>(at), src = load8<STAY>(at + 8), len = load8<STAY>(at + 16), off = (u64)part * chunk;
        if (off >= len) continue;
        u64 rest = len - off;
        copy_warp<STAY>(dst + off, src + off, rest < chunk ? rest : chunk, lane);
    }
}

static __attribute__((device)) inline u32 of_lane(u32 v, u32 lane) {
    return (u32)__nvvm_shfl_sync_idx_i32(0xffffffff, (int)v, (int)lane, 31);
}
static __attribute__((device)) inline u64 of_lane(u64 v, u32 lane) {
    return (u64)of_lane((u32)(v >> 32), lane) << 32 | of_lane((u32)v, lane);
}

/* Pages of one length by their numbers: `n` source numbers, then `n` target numbers. A warp reads the numbers of its next 32
 * chunks at once, one by each lane: they may lie in host memory, which is over a microsecond away. */
template <bool STAY>
static __attribute__((device)) inline void copy_pages(u64 numbers, u32 n, u64 src, u64 sstride, u64 dst, u64 dstride,
                                                      u32 len, u32 per, u32 chunk, u32 me, u32 all) {
    u32 warps = threads() >> 5, lane = tid() & 31, total = n * per, step = all * warps;
    for (u32 first = me * warps + (tid() >> 5); first < total; first += 32 * step) {
        u32 mine = first + lane * step, from = 0, to = 0, rounds = (total - first + step - 1) / step;
        if (lane < rounds) {
            from = load4<STAY>(numbers + 4ull * (mine / per));
            to = load4<STAY>(numbers + 4ull * (n + mine / per));
        }
        for (u32 k = 0; k < rounds && k < 32; k++) {
            u32 off = (first + k * step) % per * chunk, rest = len - off;
            u64 s = src + of_lane(from, k) * sstride, d = dst + of_lane(to, k) * dstride;
            if (off >= len) continue;
            copy_warp<STAY>(d + off, s + off, rest < chunk ? rest : chunk, lane);
        }
    }
}

GLOBAL void fab_copy(u64 list, u32 n, u32 per, u32 chunk, u64 left, u64 word, u64 value) {
    copy_list<false>(list, n, per, chunk, block(), blocks());
    tell(left, blocks(), word, value);
}

GLOBAL void fab_copy_pages(u64 numbers, u32 n, u64 src, u64 sstride, u64 dst, u64 dstride, u32 len, u32 per, u32 chunk,
                           u64 left, u64 word, u64 value) {
    copy_pages<false>(numbers, n, src, sstride, dst, dstride, len, per, chunk, block(), blocks());
    tell(left, blocks(), word, value);
}

/* ---- the kernel that stays ------------------------------------------------------------------------- */

/* Words that others write: always from memory; `hear` and `take` with acquire, from the host and from another block. One warp
 * alone reads a word of the host's: strong loads of one host line come one after the other, a microsecond each. */
static __attribute__((device)) inline u64 hear(u64 at) {
    u64 v;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(at) : "memory");
    return v;
}
static __attribute__((device)) inline u64 take(u64 at) {
    u64 v;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(at) : "memory");
    return v;
}
static __attribute__((device)) inline void tell_host(u64 at, u64 v) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(at), "l"(v) : "memory");
}
static __attribute__((device)) inline void tell_blocks(u64 at, u64 v) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(at), "l"(v) : "memory");
}
static __attribute__((device)) inline void fence_sys() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
static __attribute__((device)) inline void fence_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
static __attribute__((device)) inline u64 clock_ns() {
    u64 t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}

#define RING 4         /* commands: local/gpu.c has as many batches in flight at most */
#define COMMAND \
    128 /* bytes from one to the next: four sectors of three words and a tag, so that whoever reads a sector with that tag
            * has read those words too. The host's tag is the command's number plus one; the one inside the GPU, which also
            * names the launch, grows from one to the next */
#define TAGGED(lane) (((lane) & 3) == 3)
#define LEAVE 2 /* in `kind` */
#define COUNTERS 64 /* in `mine`, behind the number of batches that this launch has ended: of tell_end() */
#define COMMANDS 128 /* in `mine`: for the other blocks */

/* This block's part of a batch is copied; the last of `all` parts to end says so in the host's word of that batch. Not the
 * first warp: it looks for the next command meanwhile. */
static __attribute__((device)) inline void tell_end(u64 mine, u64 seq, u32 all, u64 ended, u64 value) {
    sync_block();
    if (tid() != 32) return;
    if (all > 1) {
        u64 left = mine + COUNTERS + seq % RING * 4;
        u32 before;
        fence_gpu();
        asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(left) : "memory");
        if (before != all - 1) return;
        asm volatile("st.relaxed.gpu.global.u32 [%0], 0;" ::"l"(left) : "memory");
    }
    fence_sys();
    tell_host(ended + value % RING * 8, value);
    asm volatile("red.relaxed.gpu.global.add.u64 [%0], 1;" ::"l"(mine) : "memory");
}

/* A list that is to stay in GPU memory, by one warp. */
static __attribute__((device)) inline void fetch(u64 to, u64 from, u32 bytes) {
    for (u32 i = (tid() & 31) * 16; i < bytes; i += 8 * 512) {
        v4 v[8];
#pragma unroll
        for (u32 k = 0; k < 8; k++)
            if (i + 512 * k < bytes) v[k] = load16<true>(from + i + 512 * k);
#pragma unroll
        for (u32 k = 0; k < 8; k++)
            if (i + 512 * k < bytes) store16(to + i + 512 * k, v[k]);
    }
}

/* One warp hears the host's commands and passes them on. */
static __attribute__((device)) inline void pass_on(u64 ring, u64 gone, u64 mine, u64 seq, u64 epoch, u64 idle,
                                                   u64 life) {
    u32 lane = tid() & 31;
    u64 born = clock_ns(), since = born, first = seq;
    for (;; seq++) {
        u64 at = seq % RING * COMMAND + (lane & 15) * 8, v;
        u32 rung;
        for (;;) {
            v = hear(ring + at);
            rung = __nvvm_vote_all_sync(0xffffffff, !TAGGED(lane) || v == seq + 1);
            u64 now = clock_ns();
            if (rung || __nvvm_vote_any_sync(0xffffffff, now - born > life)) break;
            if (!__nvvm_vote_any_sync(0xffffffff, now - since > idle)) continue;
            if (__nvvm_vote_any_sync(0xffffffff, take(mine) == seq - first)) break; /* and nothing is being copied */
            since = now;
        }
        rung = rung && of_lane(v, 12) != LEAVE;
        u64 from = of_lane(v, 10);
        if (rung && from) fetch(of_lane(v, 0), from, 8 * (u32)of_lane(v, 8));
        if (TAGGED(lane)) v = epoch << 40 | (seq + 1);
        if (lane == 12 && !rung) v = LEAVE;
        __nvvm_bar_warp_sync(0xffffffff);
        fence_gpu(); /* what the host wrote before the command, and the list, come before it for the other blocks too */
        if (lane < 16) tell_blocks(mine + COMMANDS + at, v);
        since = clock_ns();
        if (!rung) break;
    }
    if (lane) return;
    tell_host(gone, seq);
    fence_sys();
    tell_host(gone + 8, epoch);
}

/* Carries out commands of a ring in host memory, from number `seq` on, until none has come for `idle` ns, it is `life` ns old
 * or is told to: then it says how far it got, and is launched again when there is more. The first block passes commands on, the
 * others copy. `mine`, in GPU memory, is this launch's; `other` that of the launch before and after. */
GLOBAL void fab_stay(u64 ring, u64 gone, u64 mine, u64 other, u64 ended, u64 seq, u64 epoch, u64 idle, u64 life) {
    __attribute__((shared)) static u64 both[2][16]; /* slow warps still read one while the first writes the next */
    if (block() == 0) {
        if (tid() == 0) tell_blocks(other, 0); /* for the next launch, which comes after all blocks of this one */
        if (tid() < 32) pass_on(ring, gone, mine, seq, epoch, idle, life);
        return;
    }
    u32 warps = threads() >> 5, me = block() - 1, others = blocks() - 1;
    for (;; seq++) {
        u64 *c = both[seq & 1], tag = epoch << 40 | (seq + 1);
        if (tid() < 32) {
            u64 at = mine + COMMANDS + seq % RING * COMMAND + (tid() & 15) * 8, v;
            do v = take(at);
            while (!__nvvm_vote_all_sync(0xffffffff, !TAGGED(tid()) || v >= tag));
            if (tid() < 16) c[tid()] = v;
        }
        sync_block();
        /* A block that came late, because others had the GPU, finds a later command here: this one has ended without it. */
        if (c[3] != tag || c[7] != tag || c[11] != tag || c[15] != tag) continue;
        if (c[12] == LEAVE) break;
        u32 n = (u32)c[8], len = (u32)(c[8] >> 32), per = (u32)c[9], chunk = (u32)(c[9] >> 32);
        u32 all = (n * per + warps - 1) / warps; /* so many blocks have something to do */
        if (all > others) all = others;
        if (me >= all) continue;
        if (c[12]) copy_list<true>(c[0], n, per, chunk, me, all);
        else copy_pages<true>(c[0], n, c[1], c[2], c[4], c[5], len, per, chunk, me, all);
        tell_end(mine, seq, all, ended, c[6]);
    }
}

/* Adds to a word that the host, or another GPU, watches; everything before it in the stream is visible first. */
GLOBAL void fab_bump(u64 word, u64 by) {
    asm volatile("membar.sys;" ::: "memory");
    asm volatile("red.global.sys.add.u64 [%0], %1;" ::"l"(word), "l"(by) : "memory");
}
