/* contact_int.h - what the files of the contact share: contact.c (tables, checks, time), contact_out.c (the initiator),
 * contact_in.c (the responder). */
#ifndef FAB_CONTACT_INT_H
#define FAB_CONTACT_INT_H

#include <errno.h>
#include <stdbool.h>
#include <string.h>

#include "contact_wire.h"

#define FAB_CT_PINGS 16u /* unanswered ones that an answer may still refer to: more than two intervals hold */

/* What both directions of a connection have. */
typedef struct fab_ct_end {
    fab_cw_addr addr;
    uint32_t state; /* FAB_CONTACT_FREE .. FAB_CONTACT_DOWN */
    uint32_t next_free;
    uint32_t other; /* the peer's number for this connection */
    uint32_t quiet; /* pings unanswered (out) or looks in vain (in) since the last sign of life */
    uint64_t inc; /* the peer's incarnation */
    uint64_t stamp; /* when the cookie was made, by the responder's clock */
    uint64_t interval, heard, due;
    uint64_t seq; /* out: of the last ping sent; in: of the last one taken */
    uint8_t nonce_i[FAB_CW_NONCE], nonce_r[FAB_CW_NONCE];
    uint16_t version, body_len;
    uint8_t body[FAB_CONTACT_BODY]; /* out: ours, for CONFIRM; in: ours, for ACCEPT */
} fab_ct_end;

typedef struct fab_ct_out {
    fab_ct_end e;
    uint64_t deadline, rto;
    uint64_t acked, rtt;
    uint64_t ping_at[FAB_CT_PINGS]; /* when, of the last ones */
    bool knocked; /* this HELLO or CONFIRM was sent before */
    int32_t hint; /* what an unsigned REFUSE claimed: said at the deadline, if nothing signed came after it */
} fab_ct_out;

typedef struct fab_ct_bucket {
    uint64_t at;
    uint32_t tokens;
} fab_ct_bucket;

struct fab_contact {
    fab_contact_cfg cfg;
    fab_cw_addr self;
    bool bound; /* MACs cover the addresses */
    fab_hmac key; /* HMAC begun with the derived key: the secret itself is not kept */
    fab_hmac cookie_key, random_key;
    uint64_t random_count;
    uint64_t next; /* the earliest thing due */
    bool was_late;
    uint64_t last_stamp; /* cookies have stamps of their own, so that they have an order */
    uint64_t floor; /* cookies up to this stamp admit nobody: one of them has been used up */
    fab_ct_bucket known, strangers;
    fab_ct_out *out;
    fab_ct_end *in;
    uint32_t *in_hash; /* of the addresses, side by side: a search touches little memory; 0: free */
    uint32_t free_out, free_in;
    fab_contact_stats st;
};

static inline uint64_t fab_ct_since(uint64_t now, uint64_t then) { return now > then ? now - then : 0; }
static inline uint64_t fab_ct_after(uint64_t now, uint64_t ns) { return now > UINT64_MAX - ns ? UINT64_MAX : now + ns; }
static inline void fab_ct_want(fab_contact *c, uint64_t at) {
    if (at < c->next) c->next = at;
}
static inline bool fab_ct_same_addr(const fab_cw_addr *a, const fab_cw_addr *b) {
    return a->len == b->len && memcmp(a->b, b->b, a->len) == 0;
}

void fab_ct_random(fab_contact *c, void *out, uint32_t len); /* up to 32 bytes */
/* Fills version and incarnation, signs (unless `sign` is false: a MAC of zeros, which proves nothing), counts, sends. */
void fab_ct_send(fab_contact *c, const fab_cw_addr *to, fab_cw_msg *m, bool sign);
bool fab_ct_signed(const fab_contact *c, const uint8_t *msg, uint32_t len, const fab_cw_addr *from, bool to_responder);
bool fab_ct_allow(fab_contact *c, fab_ct_bucket *b, uint64_t now);

/* contact_out.c: `m` is well-formed and its MAC is right, except in fab_ct_out_claim. */
int fab_ct_out_datagram(fab_contact *c, const fab_cw_addr *from, const fab_cw_msg *m, uint64_t now);
void fab_ct_out_claim(fab_contact *c, const fab_cw_addr *from, const fab_cw_msg *m, int32_t status);
uint64_t fab_ct_out_service(fab_contact *c, uint32_t out, uint64_t now, uint64_t late); /* when again */
void fab_ct_out_bye(fab_contact *c, const fab_ct_out *o);

/* contact_in.c */
int fab_ct_in_datagram(fab_contact *c, const fab_cw_addr *from, const fab_cw_msg *m, uint64_t now);
void fab_ct_in_turn_away(fab_contact *c, const fab_cw_addr *from, const fab_cw_msg *q, int32_t status, bool sign,
                         uint64_t now);
uint64_t fab_ct_in_service(fab_contact *c, uint32_t in, uint64_t now, uint64_t late);
void fab_ct_in_bye(fab_contact *c, uint32_t in, int32_t status);
void fab_ct_in_forget(fab_contact *c, uint32_t in);

#endif
