/* libFuzzer target (C12, S2): two contacts, one of them real prey. The first byte chooses the side, how far the
 * handshake has come and whether there is a secret; what follows are steps: raw bytes as a datagram, an earlier datagram
 * repeated, changed, or changed and signed again as a malicious member of the job would, and calls
 * of the API. `make fuzz` builds and runs it. */
#include <errno.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "contact_wire.h"

#define TABLE 3u
#define TAPE 32u
#define REQUIRE(x) ((x) ? (void)0 : abort())

typedef struct side {
    fab_contact *c;
    uint32_t id;
    bool open[TABLE], up[TABLE], down[TABLE], in[TABLE];
} side;

typedef struct record {
    uint32_t from, to, len;
    uint8_t bytes[FAB_CONTACT_MAX];
} record;

static side sides[2];
static record tape[TAPE];
static uint32_t taped, fed;
static uint64_t now;
static bool bound;
static fab_hmac key;

static void on_send(void *ctx, const void *addr, uint32_t addr_len, const void *msg, uint32_t len) {
    record *r = &tape[taped++ % TAPE];
    REQUIRE(addr_len == 4 && len <= FAB_CONTACT_MAX);
    *r = (record){.from = ((side *)ctx)->id, .len = len};
    memcpy(&r->to, addr, 4);
    memcpy(r->bytes, msg, len);
}
static int on_accept(void *ctx, uint32_t in, const void *addr, uint32_t addr_len, const void *body, uint32_t len,
                     void *reply, uint32_t cap) {
    side *s = ctx;
    REQUIRE(in < TABLE && !s->in[in] && addr_len == 4 && addr && len <= FAB_CONTACT_BODY && cap == FAB_CONTACT_BODY);
    if (len && *(const uint8_t *)body == 'n') return -EPERM;
    s->in[in] = true;
    memset(reply, 'r', len);
    return (int)len;
}
static void on_up(void *ctx, uint32_t out, const void *body, uint32_t len) {
    side *s = ctx;
    uint32_t sum = 0;
    REQUIRE(out < TABLE && s->open[out] && !s->up[out] && !s->down[out] && len <= FAB_CONTACT_BODY);
    for (uint32_t i = 0; i < len; i++) sum += ((const uint8_t *)body)[i]; /* the sanitizer looks at each */
    s->up[out] = sum != UINT32_MAX;
    if (len == 13) { /* callbacks may close */
        s->open[out] = s->up[out] = false;
        REQUIRE(fab_contact_close(s->c, out, now) == 0);
    }
}
static void on_down(void *ctx, uint32_t out, int32_t status) {
    side *s = ctx;
    REQUIRE(out < TABLE && s->open[out] && !s->down[out] && status < 0);
    s->down[out] = true;
}
static void on_gone(void *ctx, uint32_t in, int32_t status) {
    side *s = ctx;
    REQUIRE(in < TABLE && s->in[in] && status < 0);
    s->in[in] = false;
}

static void start(uint32_t id, bool secret) {
    side *s = &sides[id];
    *s = (side){.id = id};
    fab_contact_cfg cfg = {
        .incarnation = id + 1,
        .interval_ns = 1000000,
        .connect_ns = 4000000,
        .seed = id + 1,
        .secret = secret ? "secret" : NULL,
        .secret_len = secret ? 6 : 0,
        .self = bound ? &id : NULL,
        .self_len = bound ? 4 : 0,
        .max_out = TABLE,
        .max_in = TABLE,
        .ctx = s,
        .send = on_send,
        .accept = on_accept,
        .up = on_up,
        .down = on_down,
        .gone = on_gone,
    };
    REQUIRE(s->c = fab_contact_new(&cfg));
    fab_hmac_init(&key, secret ? "secret" : "fabric: no secret", secret ? 6 : 17);
    uint8_t k[FAB_SHA256_BYTES];
    fab_hmac_add(&key, "fabric contact", 14);
    fab_hmac_end(&key, k);
    fab_hmac_init(&key, k, sizeof k);
}

static void open_one(side *s, uint64_t inc, uint32_t len) {
    uint32_t to = !s->id;
    uint8_t body[FAB_CONTACT_BODY] = {0};
    int out = fab_contact_open(s->c, &to, 4, inc, body, len % (FAB_CONTACT_BODY + 1), now);
    if (out < 0) return;
    REQUIRE((uint32_t)out < TABLE && !s->open[out]);
    s->open[out] = true;
    s->up[out] = s->down[out] = false;
}

static void deliver(uint32_t to, uint32_t from, const uint8_t *msg, uint32_t len) {
    uint8_t *copy = malloc(len ? len : 1); /* exactly as long as it says */
    uint32_t before = taped;
    memcpy(copy, msg, len);
    fab_contact_datagram(sides[to & 1].c, &from, 4, copy, len, now);
    REQUIRE(taped - before <= 2); /* ACCEPT or a CONFIRM; BYE and PING by callbacks that close */
    free(copy);
    fab_contact_run(sides[to & 1].c, now);
}

static void pump(uint32_t most) { /* what was sent and not delivered yet */
    for (; fed < taped && most; fed++, most--) {
        record r = tape[fed % TAPE];
        if (taped - fed <= TAPE) deliver(r.to, r.from, r.bytes, r.len);
    }
}

static void sign(record *r) {
    if (r->len < FAB_CW_MIN) return;
    uint8_t t = r->bytes[6];
    bool inward =
        t == FAB_CONTACT_T_HELLO || t == FAB_CONTACT_T_CONFIRM || t == FAB_CONTACT_T_PING || t == FAB_CONTACT_T_BYE;
    fab_cw_addr i = {.len = 4}, p = {.len = 4};
    memcpy(i.b, inward ? &r->from : &r->to, 4);
    memcpy(p.b, inward ? &r->to : &r->from, 4);
    r->bytes[8] = (uint8_t)r->len;
    r->bytes[9] = (uint8_t)(r->len >> 8);
    fab_cw_mac(&key, r->bytes, r->len, bound ? &i : NULL, bound ? &p : NULL, r->bytes + r->len - FAB_SHA256_BYTES);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (!size) return 0;
    uint8_t first = *data++;
    size--;
    taped = fed = 0;
    now = 1000000;
    bound = first & 8;
    memset(tape, 0, sizeof tape);
    start(0, first & 16);
    start(1, first & 16);
    uint32_t prey = first & 1;
    bool back = false;
    open_one(&sides[0], first & 32 ? 2 : 0, 20);
    pump((first >> 1 & 3) == 3 ? 8 : first >> 1 & 3);
    while (size >= 3) {
        uint8_t op = data[0], a = data[1], b = data[2];
        data += 3;
        size -= 3;
        side *s = &sides[a & 1];
        record r = tape[(a >> 1) % TAPE];
        switch (op % 10) {
        case 0: { /* raw bytes */
            uint32_t len = a | (b & 3u) << 8;
            if (len > size) len = (uint32_t)size;
            deliver(prey, !prey, data, len);
            data += len;
            size -= len;
            break;
        }
        case 1: /* repeated, perhaps to the wrong side */
            deliver(b & 1 ? r.from : r.to, b & 1 ? r.to : r.from, r.bytes, r.len);
            break;
        case 2: /* changed */
        case 3: /* changed, and signed again */
        case 4: {
            uint32_t n = size ? data[0] % 24 + 1u : 0;
            if (n >= size) break;
            memcpy(r.bytes + b, data + 1, n);
            if (data[0] & 0x80) r.len = (r.len + data[0]) % FAB_CONTACT_MAX;
            data += n + 1;
            size -= n + 1;
            if (op % 10 > 2) sign(&r);
            deliver(r.to, r.from, r.bytes, r.len);
            break;
        }
        case 5: now += (uint64_t)a << (b % 24); break;
        case 6: open_one(s, b % 4, b); break;
        case 7:
            if (fab_contact_close(s->c, b % 4, now) == 0) REQUIRE(s->open[b % 4]), s->open[b % 4] = false;
            break;
        case 8:
            if (fab_contact_drop(s->c, b % 4, now) == 0) REQUIRE(s->in[b % 4]), s->in[b % 4] = false;
            break;
        case 9: pump(1 + b % 4); break;
        }
        back |= b == 255;
        for (int i = 0; i < 2; i++) fab_contact_run(sides[i].c, b == 255 ? now / 2 : now);
    }
    /* Whatever was done: each open ends in time, and nothing is left after the farewell. A clock that ran back (which is
     * not allowed, and must do no harm) may have been taken for standstills, which put a deadline off by as much. */
    uint64_t end = now + 10000000 + (back ? now : 0);
    for (bool busy = true; busy && now < end;) {
        uint64_t next = UINT64_MAX;
        for (int i = 0; i < 2; i++) {
            uint64_t t = fab_contact_run(sides[i].c, now);
            REQUIRE(t > now);
            if (t < next) next = t;
        }
        busy = next != UINT64_MAX;
        if (busy) now = next;
    }
    for (int i = 0; i < 2; i++) {
        for (uint32_t k = 0; k < TABLE; k++) REQUIRE(!sides[i].open[k] || sides[i].down[k]);
        for (uint32_t k = 0; k < TABLE; k++) REQUIRE(!sides[i].in[k]);
        fab_contact_farewell(sides[i].c);
        fab_contact_stats st;
        fab_contact_stats_get(sides[i].c, &st);
        REQUIRE(!st.in_used && !st.out_used && fab_contact_run(sides[i].c, now + 1000000000) == UINT64_MAX);
        fab_contact_free(sides[i].c);
    }
    return 0;
}
