#include "sha256.h"

#include <string.h>

static const uint32_t K[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

static inline uint32_t rotr(uint32_t x, unsigned n) { return x >> n | x << (32 - n); }

static inline void round_of(uint32_t v[8], unsigned r, uint32_t kw) {
#define V(i) v[((i) - r) % 8u]
    uint32_t s1 = rotr(V(4), 6) ^ rotr(V(4), 11) ^ rotr(V(4), 25), ch = (V(4) & V(5)) ^ (~V(4) & V(6));
    uint32_t s0 = rotr(V(0), 2) ^ rotr(V(0), 13) ^ rotr(V(0), 22);
    uint32_t maj = (V(0) & V(1)) ^ (V(0) & V(2)) ^ (V(1) & V(2)), t1 = V(7) + s1 + ch + kw;
    V(3) += t1;
    V(7) = t1 + s0 + maj;
#undef V
}

static void compress(uint32_t h[8], const uint8_t *p) {
    uint32_t w[64], v[8];
    for (size_t i = 0; i < 16; i++)
        w[i] = (uint32_t)p[4 * i] << 24 | (uint32_t)p[4 * i + 1] << 16 | (uint32_t)p[4 * i + 2] << 8 | p[4 * i + 3];
    for (int i = 16; i < 64; i++) {
        uint32_t s0 = rotr(w[i - 15], 7) ^ rotr(w[i - 15], 18) ^ w[i - 15] >> 3;
        uint32_t s1 = rotr(w[i - 2], 17) ^ rotr(w[i - 2], 19) ^ w[i - 2] >> 10;
        w[i] = w[i - 16] + s0 + w[i - 7] + s1;
    }
    memcpy(v, h, sizeof v);
    /* The names move and not the values: eight rounds bring them home. */
    for (int i = 0; i < 64; i += 8) {
        round_of(v, 0, K[i] + w[i]);
        round_of(v, 1, K[i + 1] + w[i + 1]);
        round_of(v, 2, K[i + 2] + w[i + 2]);
        round_of(v, 3, K[i + 3] + w[i + 3]);
        round_of(v, 4, K[i + 4] + w[i + 4]);
        round_of(v, 5, K[i + 5] + w[i + 5]);
        round_of(v, 6, K[i + 6] + w[i + 6]);
        round_of(v, 7, K[i + 7] + w[i + 7]);
    }
    for (int i = 0; i < 8; i++) h[i] += v[i];
}

void fab_sha256_init(fab_sha256 *s) {
    static const uint32_t start[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                      0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    memcpy(s->h, start, sizeof start);
    s->len = 0;
}

void fab_sha256_add(fab_sha256 *s, const void *data, size_t len) {
    const uint8_t *p = data;
    while (len) {
        size_t at = s->len % 64, n = 64 - at < len ? 64 - at : len;
        memcpy(s->block + at, p, n);
        s->len += n;
        p += n;
        len -= n;
        if (s->len % 64 == 0) compress(s->h, s->block);
    }
}

void fab_sha256_end(fab_sha256 *s, uint8_t out[FAB_SHA256_BYTES]) {
    uint64_t bits = s->len * 8;
    uint8_t tail[72] = {0x80};
    size_t pad = (s->len % 64 < 56 ? 56 : 120) - s->len % 64;
    for (size_t i = 0; i < 8; i++) tail[pad + i] = (uint8_t)(bits >> (56 - 8 * i));
    fab_sha256_add(s, tail, pad + 8);
    for (int i = 0; i < 32; i++) out[i] = (uint8_t)(s->h[i / 4] >> (24 - 8 * (i % 4)));
}

void fab_hmac_init(fab_hmac *m, const void *key, size_t len) {
    uint8_t k[64] = {0}, pad[64];
    if (len > 64) {
        fab_sha256_init(&m->inner);
        fab_sha256_add(&m->inner, key, len);
        fab_sha256_end(&m->inner, k);
    } else if (len) {
        memcpy(k, key, len);
    }
    for (int i = 0; i < 64; i++) pad[i] = k[i] ^ 0x36;
    fab_sha256_init(&m->inner);
    fab_sha256_add(&m->inner, pad, 64);
    for (int i = 0; i < 64; i++) pad[i] = k[i] ^ 0x5c;
    fab_sha256_init(&m->outer);
    fab_sha256_add(&m->outer, pad, 64);
}

void fab_hmac_add(fab_hmac *m, const void *data, size_t len) { fab_sha256_add(&m->inner, data, len); }

void fab_hmac_end(fab_hmac *m, uint8_t out[FAB_SHA256_BYTES]) {
    uint8_t digest[FAB_SHA256_BYTES];
    fab_sha256_end(&m->inner, digest);
    fab_sha256_add(&m->outer, digest, sizeof digest);
    fab_sha256_end(&m->outer, out);
}

void fab_hmac_sha256(const void *key, size_t key_len, const void *data, size_t len, uint8_t out[FAB_SHA256_BYTES]) {
    fab_hmac m;
    fab_hmac_init(&m, key, key_len);
    fab_hmac_add(&m, data, len);
    fab_hmac_end(&m, out);
}

bool fab_mac_equal(const uint8_t a[FAB_SHA256_BYTES], const uint8_t b[FAB_SHA256_BYTES]) {
    unsigned differ = 0;
    for (unsigned i = 0; i < FAB_SHA256_BYTES; i++) differ |= (unsigned)(a[i] ^ b[i]);
    return differ == 0;
}
