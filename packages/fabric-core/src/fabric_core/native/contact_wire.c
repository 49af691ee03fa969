#include "contact_wire.h"

#include <string.h>

static const uint8_t MAGIC[4] = {'f', 'a', 'b', 0xC7};

static void put16(uint8_t *p, uint16_t v) {
    p[0] = (uint8_t)v;
    p[1] = (uint8_t)(v >> 8);
}
static void put32(uint8_t *p, uint32_t v) {
    for (int i = 0; i < 4; i++) p[i] = (uint8_t)(v >> 8 * i);
}
static void put64(uint8_t *p, uint64_t v) {
    for (int i = 0; i < 8; i++) p[i] = (uint8_t)(v >> 8 * i);
}
static uint16_t get16(const uint8_t *p) { return (uint16_t)(p[0] | p[1] << 8); }
static uint32_t get32(const uint8_t *p) {
    uint32_t v = 0;
    for (int i = 0; i < 4; i++) v |= (uint32_t)p[i] << 8 * i;
    return v;
}
static uint64_t get64(const uint8_t *p) { return get32(p) | (uint64_t)get32(p + 4) << 32; }

uint32_t fab_cw_put(uint8_t buf[FAB_CW_LONG], const fab_cw_msg *m) {
    uint32_t len = m->type == FAB_CONTACT_T_CONFIRM ? FAB_CW_LONG : FAB_CW_MIN + m->body_len;
    memset(buf, 0, len);
    memcpy(buf, MAGIC, 4);
    put16(buf + 4, m->version);
    buf[6] = m->type;
    put16(buf + 8, (uint16_t)len);
    put16(buf + 10, m->body_len);
    put32(buf + 12, (uint32_t)m->status);
    put64(buf + 16, m->from_inc);
    put64(buf + 24, m->to_inc);
    memcpy(buf + 32, m->nonce_i, FAB_CW_NONCE);
    memcpy(buf + 48, m->nonce_r, FAB_CW_NONCE);
    put32(buf + 64, m->slot_i);
    put32(buf + 68, m->slot_r);
    put64(buf + 72, m->seq);
    put64(buf + 80, m->interval);
    if (m->body_len) memcpy(buf + FAB_CW_HEADER, m->body, m->body_len);
    return len;
}

int fab_cw_get(fab_cw_msg *m, const uint8_t *msg, uint32_t len) {
    if (len < 4 || memcmp(msg, MAGIC, 4) != 0) return FAB_CW_MAGIC;
    if (len < FAB_CW_MIN || len > FAB_CONTACT_MAX || get16(msg + 8) != len) return FAB_CW_LENGTH;
    *m = (fab_cw_msg){
        .version = get16(msg + 4),
        .type = msg[6],
        .body_len = get16(msg + 10),
        .status = (int32_t)get32(msg + 12),
        .from_inc = get64(msg + 16),
        .to_inc = get64(msg + 24),
        .slot_i = get32(msg + 64),
        .slot_r = get32(msg + 68),
        .seq = get64(msg + 72),
        .interval = get64(msg + 80),
        .body = msg + FAB_CW_HEADER,
    };
    memcpy(m->nonce_i, msg + 32, FAB_CW_NONCE);
    memcpy(m->nonce_r, msg + 48, FAB_CW_NONCE);
    if (m->version != FAB_CONTACT_VERSION) return FAB_CW_VERSION;
    switch (m->type) {
    case FAB_CONTACT_T_CONFIRM:
        return len == FAB_CW_LONG && m->body_len <= FAB_CONTACT_BODY ? FAB_CW_OK : FAB_CW_LENGTH;
    case FAB_CONTACT_T_ACCEPT:
        return m->body_len <= FAB_CONTACT_BODY && len == FAB_CW_MIN + m->body_len ? FAB_CW_OK : FAB_CW_LENGTH;
    case FAB_CONTACT_T_HELLO:
    case FAB_CONTACT_T_CHALLENGE:
    case FAB_CONTACT_T_PING:
    case FAB_CONTACT_T_PONG:
    case FAB_CONTACT_T_BYE:
    case FAB_CONTACT_T_REFUSE: return len == FAB_CW_MIN && !m->body_len ? FAB_CW_OK : FAB_CW_LENGTH;
    default: return FAB_CW_TYPE;
    }
}

void fab_cw_mac(const fab_hmac *key, const uint8_t *msg, uint32_t len, const fab_cw_addr *initiator,
                const fab_cw_addr *responder, uint8_t mac[FAB_SHA256_BYTES]) {
    fab_hmac m = *key;
    fab_hmac_add(&m, msg, len - FAB_SHA256_BYTES);
    const fab_cw_addr *both[] = {initiator, responder};
    for (int i = 0; i < 2; i++)
        if (both[i]) {
            uint8_t n[4];
            put32(n, both[i]->len);
            fab_hmac_add(&m, n, 4);
            fab_hmac_add(&m, both[i]->b, both[i]->len);
        }
    fab_hmac_end(&m, mac);
}
