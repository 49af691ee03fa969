/* contact_wire.h - the datagrams of fabric/contact.h: bytes to fields and back, and the MAC at their end.
 *
 * Little-endian. HELLO and REFUSE keep this header, their type numbers and the MAC at the end in all versions, so that
 * any two versions can tell each other that they differ. */
#ifndef FAB_CONTACT_WIRE_H
#define FAB_CONTACT_WIRE_H

#include "fabric/contact.h"
#include "sha256.h"

#define FAB_CW_NONCE 16u
#define FAB_CW_HEADER 88u
#define FAB_CW_MIN (FAB_CW_HEADER + FAB_SHA256_BYTES)   /* all but CONFIRM and ACCEPT */
#define FAB_CW_LONG (FAB_CW_MIN + FAB_CONTACT_BODY) /* CONFIRM is padded to it: no answer is longer than its question */

typedef struct fab_cw_addr {
    uint32_t len;
    uint8_t b[FAB_CONTACT_ADDR];
} fab_cw_addr;

typedef struct fab_cw_msg {
    uint16_t version, body_len;
    uint8_t type;
    int32_t status; /* REFUSE */
    uint64_t from_inc, to_inc; /* to_inc 0: whoever answers */
    uint8_t nonce_i[FAB_CW_NONCE]; /* the initiator's, new for each attempt */
    uint8_t nonce_r[FAB_CW_NONCE]; /* the responder's: the cookie */
    uint32_t slot_i, slot_r; /* numbers of the tables, echoed, so that nobody searches */
    uint64_t seq; /* CHALLENGE, CONFIRM: when the cookie was made; PING, PONG: the ping's number;
                                    * REFUSE -EPROTO: the version that was refused */
    uint64_t interval; /* CONFIRM, ACCEPT */
    const uint8_t *body;
} fab_cw_msg;

/* Writes all but the MAC, which is zero; returns the length, MAC included. */
uint32_t fab_cw_put(uint8_t buf[FAB_CW_LONG], const fab_cw_msg *m);

enum { FAB_CW_OK = 0, FAB_CW_MAGIC, FAB_CW_LENGTH, FAB_CW_VERSION, FAB_CW_TYPE };
/* Any bytes. VERSION: `m` is filled, but only what all versions share means something. `m->body` points into `msg`. */
int fab_cw_get(fab_cw_msg *m, const uint8_t *msg, uint32_t len);

/* The MAC of a datagram of `len` bytes; the addresses are covered too if they are not NULL. */
void fab_cw_mac(const fab_hmac *key, const uint8_t *msg, uint32_t len, const fab_cw_addr *initiator,
                const fab_cw_addr *responder, uint8_t mac[FAB_SHA256_BYTES]);

#endif
