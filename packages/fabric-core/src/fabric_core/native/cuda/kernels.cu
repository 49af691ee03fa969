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

/* `n` pieces (dst, src, len) of at most per * chunk bytes: one warp takes one chunk of one piece at a time. */
template <bool STAY> static __attribute__((device)) inline void copy_list(u64 list, u32 n, u32 per, u32 chunk) {
    u32 warps = threads() >> 5, lane = tid() & 31;
    for (u32 w = block() * warps + (tid() >> 5); w < n * per; w += blocks() * warps) {
        u32 i = w / per, part = w - i * per;
        u64 at = list + i * 24ull;
        u64 dst = load8<STAY>(at), src = load8<STAY>(at + 8), len = load8<STAY>(at + 16), off = (u64)part * chunk;
        if (off >= len) continue;
        u64 rest = len - off;
        copy_warp<STAY>(dst + off, src + off, rest < chunk ? rest : chunk, lane);
    }
}

/* Pages of one length by their numbers: `n` source numbers, then `n` target numbers. */
template <bool STAY>
static __attribute__((device)) inline void copy_pages(u64 numbers, u32 n, u64 src, u64 sstride, u64 dst, u64 dstride,
                                                      u32 len, u32 per, u32 chunk) {
    u32 warps = threads() >> 5, lane = tid() & 31;
    for (u32 w = block() * warps + (tid() >> 5); w < n * per; w += blocks() * warps) {
        u32 i = w / per, off = (w - i * per) * chunk, rest = len - off;
        if (off >= len) continue;
        u64 from = src + load4<STAY>(numbers + 4ull * i) * sstride,
            to = dst + load4<STAY>(numbers + 4ull * (n + i)) * dstride;
        copy_warp<STAY>(to + off, from + off, rest < chunk ? rest : chunk, lane);
    }
}

GLOBAL void fab_copy(u64 list, u32 n, u32 per, u32 chunk, u64 left, u64 word, u64 value) {
    copy_list<false>(list, n, per, chunk);
    tell(left, blocks(), word, value);
}

GLOBAL void fab_copy_pages(u64 numbers, u32 n, u64 src, u64 sstride, u64 dst, u64 dstride, u32 len, u32 per, u32 chunk,
                           u64 left, u64 word, u64 value) {
    copy_pages<false>(numbers, n, src, sstride, dst, dstride, len, per, chunk);
    tell(left, blocks(), word, value);
}

/* ---- the kernel that stays ------------------------------------------------------------------------- */

static __attribute__((device)) inline u64 peek(u64 at) {
    u64 v;
    asm volatile("ld.volatile.global.u64 %0, [%1];" : "=l"(v) : "l"(at) : "memory");
    return v;
}
static __attribute__((device)) inline void poke(u64 at, u64 v) {
    asm volatile("st.volatile.global.u64 [%0], %1;" ::"l"(at), "l"(v) : "memory");
}
static __attribute__((device)) inline void fence() { asm volatile("membar.sys;" ::: "memory"); }
static __attribute__((device)) inline u64 clock_ns() {
    u64 t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}

#define RING 4         /* commands: local/gpu.c has as many batches in flight at most */
#define COMMAND \
    128    /* bytes from one to the next: four sectors of three words and the command's number plus one, so that
                        * whoever reads a sector with that number has read those words too */
#define LEAVING (1ull << 63)
#define LEAVE 2        /* in `kind` */

/* Carries out commands of a ring in host memory, from number `seq` on, until none has come for `idle` ns, it is `life` ns old
 * or is told to: then it says how far it got, and is launched again when there is more. `mine`, in GPU memory: the number
 * up to which block 0 has passed commands on, the counters of tell(), and the commands; `other` is the same of the launch
 * before and after. Only block 0 looks at the host. */
GLOBAL void fab_stay(u64 ring, u64 gone, u64 mine, u64 other, u64 word, u64 seq, u64 epoch, u64 idle, u64 life) {
    __attribute__((shared)) static u64 next, c[16];
    u64 born = clock_ns(), since = born, left = mine + 64, copies = mine + 128;
    u32 warps = threads() >> 5;
    if (block() == 0 && tid() == 0) poke(other, 0); /* for the next launch, which comes after all blocks of this one */
    for (;; seq++) {
        if (block() == 0 && tid() < 32) {
            u64 at = seq % RING * COMMAND + (tid() & 15) * 8, v;
            u32 rung;
            for (;;) {
                v = peek(ring + at);
                rung = __nvvm_vote_all_sync(0xffffffff, (tid() & 3) != 3 || v == seq + 1);
                u64 now = clock_ns();
                if (rung || __nvvm_vote_any_sync(0xffffffff, now - since > idle || now - born > life)) break;
            }
            rung = rung && __nvvm_shfl_sync_idx_i32(0xffffffff, (u32)v, 12, 31) != LEAVE;
            if (rung && tid() < 16) poke(copies + at, v);
            fence(); /* what the command reads is as it was when it was written; the copy is there before its number */
            __nvvm_bar_warp_sync(0xffffffff);
            if (tid() == 0) poke(mine, rung ? seq + 1 : LEAVING | seq);
        }
        if (tid() == 0) {
            u64 go;
            while (((go = peek(mine)) & ~LEAVING) <= seq && !(go & LEAVING)) {
            }
            next = (go & ~LEAVING) > seq;
            asm volatile("membar.gl;" ::: "memory");
        }
        sync_block();
        if (!next) break;
        if (tid() < 16) c[tid()] = peek(copies + seq % RING * COMMAND + tid() * 8);
        sync_block();
        u32 n = (u32)c[8], len = (u32)(c[8] >> 32), per = (u32)c[9], chunk = (u32)(c[9] >> 32);
        u32 all = (n * per + warps - 1) / warps; /* so many blocks have something to do */
        if (all > blocks()) all = blocks();
        /* A block that came late, because others had the GPU, finds a later command here: this one has ended without it. */
        if (c[3] != seq + 1 || c[7] != seq + 1 || c[11] != seq + 1 || c[15] != seq + 1) all = 0;
        if (block() < all) {
            if (c[12]) copy_list<true>(c[0], n, per, chunk);
            else copy_pages<true>(c[0], n, c[1], c[2], c[4], c[5], len, per, chunk);
            tell(left + seq % RING * 4, all, word, c[6]);
        }
        since = clock_ns();
        sync_block(); /* before the command is overwritten */
    }
    if (block() == 0 && tid() == 0) {
        poke(gone, seq);
        fence();
        poke(gone + 8, epoch);
    }
}

/* Adds to a word that the host, or another GPU, watches; everything before it in the stream is visible first. */
GLOBAL void fab_bump(u64 word, u64 by) {
    asm volatile("membar.sys;" ::: "memory");
    asm volatile("red.global.sys.add.u64 [%0], %1;" ::"l"(word), "l"(by) : "memory");
}
