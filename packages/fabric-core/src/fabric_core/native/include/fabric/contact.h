/* fabric/contact.h - first contact, heartbeat and farewell over datagrams that may be lost.
 *
 * For backends whose only path before a connection exists is an unreliable datagram (verbs UD, a libfabric message, the
 * simulator). Pure: datagrams and time go in, datagrams and callbacks come out; no thread, no socket, no clock of its
 * own. With a seed, the same calls give the same bytes.
 *
 * Roles. A contact opens peers (it is then the initiator; the peer has an "out" number) and is opened by others (the
 * responder; "in" numbers). The two directions are independent: A opening B says nothing about B opening A.
 *
 *     HELLO ->   <- CHALLENGE   CONFIRM(body) ->   <- ACCEPT(body)       then PING ->  <- PONG,  BYE ->,  <- REFUSE
 *
 * A stranger's HELLO costs the responder one CHALLENGE, never longer than the HELLO, and no memory: what it must
 * remember travels in the challenge as a cookie. Every datagram ends in an HMAC-SHA256 under a key derived from the
 * secret and the label. docs/decisions/0005-one-contact-protocol.md gives the reasons and the wire form.
 *
 * The caller: one thread at a time (a lock of the caller's). Feed every datagram that came, then call run(now); call
 * run again at the time that it returned, and after open and datagram (it is cheap when nothing is due: use what it
 * returns). `now` is monotonic nanoseconds; it may jump forward or stand still.
 * Callbacks come from inside open, datagram and run; they may call open, close and drop, but not free.
 *
 * Life of a number. out: from open until close, also after `down`; close it then. in: from `accept` until `gone` has
 * returned, or drop. Numbers are small (below max_out, max_in) and used again. */
#ifndef FABRIC_CONTACT_H
#define FABRIC_CONTACT_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define FAB_CONTACT_VERSION 1u
#define FAB_CONTACT_BODY 256u /* bytes of a backend's own parameters: queue pair numbers, GIDs, keys */
#define FAB_CONTACT_MAX 512u  /* bytes of a datagram: have room for these; ours are at most 376 */
#define FAB_CONTACT_ADDR 64u  /* bytes of a datagram address, opaque here; equal addresses must be equal bytes */
#define FAB_CONTACT_NONE UINT32_MAX

typedef struct fab_contact fab_contact;

typedef struct fab_contact_cfg {
    uint64_t incarnation; /* not 0: differs after each restart */
    uint64_t interval_ns; /* heartbeat. A pair uses the smaller of both sides'. 0: one second */
    uint64_t connect_ns;  /* how long an open tries. 0: two seconds */
    uint64_t seed;        /* 0: random numbers from the system; else all of them follow from it: for tests only */
    const void *secret;   /* copied as a derived key only. NULL: the key is public, which finds corruption, no more */
    const char *label;    /* job and role, part of the key: other labels are strangers. NULL: none */
    const void *self;     /* our address as those who open us write it. If given, each MAC covers both addresses, and
                           * a datagram led to another member of the job is refused. All of a job give it, or none */
    size_t secret_len;
    uint32_t self_len;
    uint32_t max_out, max_in; /* table sizes, allocated in new; nothing is allocated later */
    uint32_t answers_per_s; /* to peers without a connection, and again as many to those without the secret. 0: 16384 */
    void *ctx;

    /* Sends a datagram, or loses it. */
    void (*send)(void *ctx, const void *addr, uint32_t addr_len, const void *msg, uint32_t len);
    /* Somebody with the secret wants in. Returns the bytes written to `reply`, or a negative errno: refused, the other
     * side ends with it. Called once per handshake. fab_contact_in_info tells more. NULL: nobody is let in. */
    int (*accept)(void *ctx, uint32_t in, const void *addr, uint32_t addr_len, const void *body, uint32_t len,
                  void *reply, uint32_t cap);
    /* Exactly one of up and down ends an open; a down may follow an up. None after close. */
    void (*up)(void *ctx, uint32_t out, const void *body, uint32_t len);
    void (*down)(void *ctx, uint32_t out, int32_t status);
    /* Exactly once for each accepted that was not dropped: -ECONNRESET it said goodbye or connected anew, -ESTALE its
     * next incarnation is here, -ETIMEDOUT it fell silent. */
    void (*gone)(void *ctx, uint32_t in, int32_t status);
} fab_contact_cfg;

/* Status of down: -ETIMEDOUT no answer, or it lives and gave this path up; -ECONNRESET it said goodbye; -ESTALE another
 * incarnation is there;
 * -EACCES the secret or the label differs; -EPROTO it speaks another version (fab_contact_out_info names it); -ENOSPC
 * its table is full; or what its `accept` returned. -EACCES, and -EPROTO of a peer whose MAC we cannot check, are only
 * said at the deadline, so that a stranger's word ends nothing. */

enum { FAB_CONTACT_FREE = 0, FAB_CONTACT_HELLO, FAB_CONTACT_CONFIRM, FAB_CONTACT_UP, FAB_CONTACT_DOWN };

typedef struct fab_contact_info {
    uint32_t state; /* FAB_CONTACT_*; an inbound one is UP from accept on */
    uint32_t version; /* that the peer speaks; 0: unknown */
    uint64_t incarnation; /* of the peer; 0: unknown */
    uint64_t interval_ns; /* that this pair uses */
    uint64_t heard_ns; /* when the last sign of life came */
    uint64_t rtt_ns; /* of the last answered ping; 0: none yet, or inbound */
    uint32_t addr_len;
    uint8_t addr[FAB_CONTACT_ADDR];
} fab_contact_info;

enum { /* indices of sent[] and received[]: the type of a datagram */
       FAB_CONTACT_T_HELLO = 1,
       FAB_CONTACT_T_CHALLENGE,
       FAB_CONTACT_T_CONFIRM,
       FAB_CONTACT_T_ACCEPT,
       FAB_CONTACT_T_PING,
       FAB_CONTACT_T_PONG,
       FAB_CONTACT_T_BYE,
       FAB_CONTACT_T_REFUSE,
       FAB_CONTACT_TYPES
};

typedef struct fab_contact_stats {
    uint64_t sent[FAB_CONTACT_TYPES], received[FAB_CONTACT_TYPES]; /* received: well-formed, before any check */
    uint64_t sent_bytes, received_bytes, resent;
    /* Why a datagram was refused; each is counted once. */
    uint64_t bad_magic, bad_length, bad_version, bad_type;
    uint64_t bad_mac; /* another secret or label, or corrupted */
    uint64_t bad_cookie; /* CONFIRM: not a cookie of ours for this address */
    uint64_t replay; /* seen before: a ping's number, a CONFIRM that was answered already (it is answered again) */
    uint64_t stale; /* of a handshake or connection that is over, or for another incarnation */
    uint64_t reflected; /* our own HELLO or CONFIRM came back */
    uint64_t full; /* the table of inbound ones */
    uint64_t refused; /* `accept` said no */
    uint64_t limited; /* not answered: more than answers_per_s */
    uint64_t ups, downs, ins, gones, stalls; /* stalls: run() was called so late that silence was forgiven */
    uint32_t out_used, in_used; /* now */
} fab_contact_stats;

/* NULL: errno says EINVAL (a field), ENOMEM, or why the system gave no random numbers. */
fab_contact *fab_contact_new(const fab_contact_cfg *cfg);
/* Silent, as a crash is: no datagram, no callback. The derived key is wiped. */
void fab_contact_free(fab_contact *c);
/* BYE to everyone, both ways; every number is free afterwards. No callbacks. */
void fab_contact_farewell(fab_contact *c);

/* First contact. `incarnation` 0: whoever answers there. Returns the number; -EINVAL, -ENOSPC, or -EEXIST (this address
 * is open already and not down). */
int fab_contact_open(fab_contact *c, const void *addr, uint32_t addr_len, uint64_t incarnation, const void *body,
                     uint32_t len, uint64_t now);
int fab_contact_close(fab_contact *c, uint32_t out, uint64_t now); /* BYE if it lives, then forgotten; -EINVAL */
int fab_contact_drop(fab_contact *c, uint32_t in, uint64_t now); /* the same for an inbound one; no `gone` follows */

/* A datagram came. 0: taken. Else counted, nothing changed: -EBADMSG malformed, -EPROTO version, -EACCES MAC, -ESTALE
 * old, replayed or misdirected, -EALREADY a repeated CONFIRM (answered again), -ENOSPC, -ECONNREFUSED by accept,
 * -EAGAIN rate limit, -EINVAL arguments. */
int fab_contact_datagram(fab_contact *c, const void *from, uint32_t from_len, const void *msg, uint32_t len,
                         uint64_t now);
/* Resends, pings, deadlines. Returns when it wants to be called again at the latest (UINT64_MAX: never). */
uint64_t fab_contact_run(fab_contact *c, uint64_t now);

/* A sign of life that came another way (a completion, a write): spares pings. Cheap enough for each of them. */
void fab_contact_heard(fab_contact *c, uint32_t out, uint64_t now);
void fab_contact_heard_in(fab_contact *c, uint32_t in, uint64_t now);

int fab_contact_out_info(const fab_contact *c, uint32_t out, fab_contact_info *info); /* 0, -EINVAL: not in use */
int fab_contact_in_info(const fab_contact *c, uint32_t in, fab_contact_info *info);
void fab_contact_stats_get(const fab_contact *c, fab_contact_stats *stats);

/* The same for packages that do not link with the engine. Fields are only appended; the structs above belong to
 * the version. */
typedef struct fab_contact_api {
    uint32_t version, struct_size; /* 1, sizeof(fab_contact_api) */
    fab_contact *(*create)(const fab_contact_cfg *);
    void (*destroy)(fab_contact *);
    void (*farewell)(fab_contact *);
    int (*open)(fab_contact *, const void *, uint32_t, uint64_t, const void *, uint32_t, uint64_t);
    int (*close)(fab_contact *, uint32_t, uint64_t);
    int (*drop)(fab_contact *, uint32_t, uint64_t);
    int (*datagram)(fab_contact *, const void *, uint32_t, const void *, uint32_t, uint64_t);
    uint64_t (*run)(fab_contact *, uint64_t);
    void (*heard)(fab_contact *, uint32_t, uint64_t);
    void (*heard_in)(fab_contact *, uint32_t, uint64_t);
    int (*out_info)(const fab_contact *, uint32_t, fab_contact_info *);
    int (*in_info)(const fab_contact *, uint32_t, fab_contact_info *);
    void (*stats_get)(const fab_contact *, fab_contact_stats *);
} fab_contact_api;
const fab_contact_api *fab_contact_api_get(void);

#ifdef __cplusplus
}
#endif
#endif
