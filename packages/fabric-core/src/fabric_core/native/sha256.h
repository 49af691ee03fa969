/* SHA-256 and HMAC (FIPS 180-4, RFC 2104): what authenticates a handshake. Not for bulk data. */
#ifndef FAB_SHA256_H
#define FAB_SHA256_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define FAB_SHA256_BYTES 32u

typedef struct fab_sha256 {
    uint32_t h[8];
    uint64_t len; /* bytes so far */
    uint8_t block[64];
} fab_sha256;

void fab_sha256_init(fab_sha256 *s);
void fab_sha256_add(fab_sha256 *s, const void *data, size_t len);
void fab_sha256_end(fab_sha256 *s, uint8_t out[FAB_SHA256_BYTES]);

typedef struct fab_hmac {
    fab_sha256 inner, outer;
} fab_hmac;

void fab_hmac_init(fab_hmac *m, const void *key, size_t len);
void fab_hmac_add(fab_hmac *m, const void *data, size_t len);
void fab_hmac_end(fab_hmac *m, uint8_t out[FAB_SHA256_BYTES]);
void fab_hmac_sha256(const void *key, size_t key_len, const void *data, size_t len, uint8_t out[FAB_SHA256_BYTES]);

/* In a time that does not depend on where they differ. */
bool fab_mac_equal(const uint8_t a[FAB_SHA256_BYTES], const uint8_t b[FAB_SHA256_BYTES]);

#endif
