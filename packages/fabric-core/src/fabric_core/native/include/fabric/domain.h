/* fabric/domain.h - what a NIC backend hands to the engine.
 *
 * A backend opens one context per NIC ("domain") and gives the engine a table of functions.
 * Structs are versioned by abi_version and sized by struct_size, so that an engine can refuse
 * a table that it does not understand; fields are only ever appended.
 *
 * Threads. The engine calls peer_open, peer_close, post, post_recv, poll, cancel and arm with the
 * group's lock held: never two at a time for the domains of one group, but from changing threads.
 * mr_reg, mr_dereg and address may be called from any thread at any time. close is the last call.
 * None of them may block: what cannot be done now is reported as such (post returns fewer).
 *
 * Order. None is promised and none is assumed, neither of deliveries nor of completions (C2).
 * The one promise: a FAB_WC_IMM is raised only when the payload of that write is in memory (C10).
 */
#ifndef FABRIC_DOMAIN_H
#define FABRIC_DOMAIN_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define FAB_ABI_VERSION 1u
#define FAB_MAX_NICS 8u       /* domains of one group: the split's denominator has three bits on the wire */
#define FAB_PEER_NONE UINT32_MAX

/* ---- work requests ------------------------------------------------------------------------- */

enum { FAB_WR_WRITE = 1, FAB_WR_SEND = 2 };
enum { FAB_WR_IMM = 1u };     /* flags: this write raises `imm` at the receiver */

typedef struct fab_wr {
    uint64_t id;              /* comes back in the completion; several requests may share one */
    uint64_t len;             /* bytes; 0 is valid for a write with an immediate */
    uint64_t local_addr;
    uint64_t local_key;       /* of fab_mr_keys; 0 for a SEND (a backend that needs one copies the message) */
    uint64_t remote_addr;     /* remote_base + offset */
    uint64_t remote_key;
    uint32_t imm;
    uint16_t kind;
    uint16_t flags;
} fab_wr;

/* Writes of one length: page i goes from local_addr + local_numbers[i * step] * local_stride, likewise at the peer. */
typedef struct fab_pages {
    uint64_t id, len;
    uint64_t local_addr, local_stride, local_key;
    uint64_t remote_addr, remote_stride, remote_key;
    const uint32_t *local_numbers, *remote_numbers;
    uint32_t count, step;
    uint32_t imm;
    uint32_t flags;           /* FAB_WR_IMM: each raises `imm` */
} fab_pages;

/* ---- completions --------------------------------------------------------------------------- */

enum {
    FAB_WC_OP = 1,            /* `count` requests of `id` ended with `status` */
    FAB_WC_IMM = 2,           /* `imm` arrived `count` times; the payload is visible */
    FAB_WC_RECV = 3,          /* the receive `id` holds `len` bytes from `peer` (or FAB_PEER_NONE) */
    FAB_WC_PEER_UP = 4,       /* peer_open's peer can be posted to */
    FAB_WC_PEER_DOWN = 5,     /* `peer` is lost, for the reason in `status`; see peer_open */
    FAB_WC_NIC_DOWN = 6,      /* this domain cannot be posted to: see poll */
    FAB_WC_FAULT = 7,         /* something was refused on the receiving side (counted; engine.on_error): `status` */
    FAB_WC_NIC_UP = 8         /* after NIC_DOWN: it can be posted to again; links are opened anew */
};

typedef struct fab_wc {
    uint64_t id;
    uint64_t len;
    uint32_t kind;
    int32_t status;           /* 0 or a negative errno, see the table at the end */
    uint32_t imm;
    uint32_t peer; /* of OP and RECV (FAB_PEER_NONE: unknown, not of an OP that failed), PEER_UP, PEER_DOWN */
    uint32_t count; /* >= 1 for OP and IMM */
    uint32_t reserved;
} fab_wc;

/* ---- memory -------------------------------------------------------------------------------- */

enum { FAB_ACCESS_LOCAL = 0u, FAB_ACCESS_REMOTE_WRITE = 1u };

typedef struct fab_mr {
    uint64_t addr;
    uint64_t len;
    uint32_t access;
    int32_t fd; /* shareable memory: a descriptor a peer on this host may map; -1: none */
    uint64_t fd_offset; /* where `addr` lies in it */
    uint32_t device_kind; /* 0 host, 1 CUDA */
    int32_t device_id;
} fab_mr;

typedef struct fab_mr_keys {
    uint64_t local_key; /* goes into fab_wr.local_key */
    uint64_t remote_key; /* goes into the descriptor, comes back as fab_wr.remote_key at the peer */
    uint64_t remote_base; /* the remote address of the first byte (the virtual address, or 0 for offsets) */
} fab_mr_keys;

typedef struct fab_domain_caps {
    uint64_t max_write; /* bytes of one write; the engine splits longer ones. 0: no limit */
    uint64_t max_send; /* bytes of one message */
    uint64_t bandwidth; /* bytes per second of the link, 0: unknown */
    uint32_t numa_node; /* UINT32_MAX: unknown */
    uint32_t flags; /* none yet */
} fab_domain_caps;

/* ---- counters ------------------------------------------------------------------------------ */

typedef struct fab_counter {
    char name[32]; /* short, lower case, the same in every backend that has it (docs/backend.md) */
    uint64_t value; /* since open */
} fab_counter;

/* ---- the table ----------------------------------------------------------------------------- */

typedef struct fab_domain_ops {
    uint32_t abi_version; /* FAB_ABI_VERSION */
    uint32_t struct_size; /* sizeof(fab_domain_ops) */

    int (*caps)(void *ctx, fab_domain_caps *out);

    /* Writes this domain's address, a printable string without commas or blanks; returns its length, or -ENOSPC. */
    int (*address)(void *ctx, char *buf, size_t cap);

    int (*mr_reg)(void *ctx, const fab_mr *mr, fab_mr_keys *out);
    int (*mr_dereg)(void *ctx, uint64_t local_key);

    /* Begins first contact and returns at once with a peer number. Exactly one FAB_WC_PEER_UP or FAB_WC_PEER_DOWN
     * follows, in bounded time. After UP, DOWN follows when the peer is lost, whether or not anything is in flight;
     * every request posted to it ends with its own FAB_WC_OP (before or after DOWN). With -ENETDOWN, -ETIMEDOUT, -EHOSTUNREACH
     * or -ENETUNREACH it is this path that is lost: the engine goes on over its other NICs, and opens this one again after a
     * while. Any other status says that the peer itself is gone, on all paths. After DOWN the number is dead:
     * the engine calls peer_close and opens the address again if it wants to. peer_close of a living peer (a request
     * that would not end) cuts the link: what is still posted to it ends with -ECANCELED, and no DOWN follows. */
    int (*peer_open)(void *ctx, const char *addr, size_t len, uint32_t *peer);
    int (*peer_close)(void *ctx, uint32_t peer);

    /* Takes a prefix of the n requests, all for `peer`, and returns how many (0: full, try again after poll).
     * What was taken ends exactly once through poll (C1); until then the NIC may read the local range (C7).
     * A negative errno refuses the first request: it fails alone. */
    int (*post)(void *ctx, uint32_t peer, const fab_wr *wr, uint32_t n);

    /* A receive buffer; consumed by one message. Returns 0, or -EAGAIN when no more fit. */
    int (*post_recv)(void *ctx, uint64_t id, uint64_t addr, uint64_t len);

    /* Makes progress and returns up to `cap` completions. `now_ns`: monotonic time, as the caller knows it.
     * After NIC_DOWN it goes on being called: requests that the NIC holds still end (once peer_close cut their links at the
     * latest), posted receives come back as FAB_WC_RECV with -ENETDOWN, and NIC_UP may follow. A negative errno says that
     * nothing of this can be expected any more: the domain is closed at once, and what it held ends with -ENETDOWN. */
    int (*poll)(void *ctx, fab_wc *wc, uint32_t cap, uint64_t now_ns);

    /* Every request of `id` still in flight must end soon (-ECANCELED, or as it would have). */
    int (*cancel)(void *ctx, uint64_t id);

    /* A descriptor that becomes readable while armed and something happens; -1: this domain must be polled.
     * The domain itself makes it unreadable again, in poll or arm. */
    int (*wait_fd)(void *ctx);

    /* on=1: ask for wait_fd to become readable; returns 1 if there is something already (do not sleep).
     * on=0: no wake-ups wanted, the caller polls. */
    int (*arm)(void *ctx, int on);

    /* Ends everything: no NIC touches registered memory after it returns. Frees ctx. */
    void (*close)(void *ctx);

    /* Optional: NULL, or a table that ends before it (struct_size says so). Writes what this domain has refused, by kind,
     * and returns how many entries it wrote (at most cap). From any thread at any time until close; never blocks. */
    int (*counters)(void *ctx, fab_counter *out, uint32_t cap);

    /* Optional, for backends that take many pages at less cost than so many requests. As post, of `pages->count` writes of
     * one id: takes a prefix and returns how many; each counts as a request (FAB_WC_OP's `count`). The numbers are read
     * before it returns. -EOPNOTSUPP: these are not for this way, use post. */
    int (*post_pages)(void *ctx, uint32_t peer, const fab_pages *pages);
} fab_domain_ops;

#define FAB_DOMAIN_OPS_MIN offsetof(fab_domain_ops, counters) /* the least struct_size that an engine takes */

/* Status values that the engine understands (negative errno):
 *   -ECONNREFUSED  nobody answers at this address        -ECONNRESET  the peer is gone (died, closed)
 *   -ESTALE        another incarnation answers there      -ETIMEDOUT   it did not answer, or stopped moving
 *   -EACCES        it refused us (uid, secret, rights)    -EPROTO      it speaks another version
 *   -EFAULT        the memory there is not reachable      -EMSGSIZE    longer than the posted receive
 *   -EKEYREVOKED   that registration no longer exists      -ENETDOWN    the NIC is gone
 *   -ECANCELED     ended by cancel or close
 * Any other value is passed on as it is. */

#ifdef __cplusplus
}
#endif
#endif
