/* Addresses as text: GID/LID/QPN/QKEY#INCARNATION, all in hex; and the two sources that are not a NIC's. */
#include "verbs_int.h"

#include <stdio.h>
#include <sys/random.h>
#include <time.h>

uint64_t fv_clock(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

uint64_t fv_random(void) {
    uint64_t v = 0;
    if (getrandom(&v, sizeof v, 0) != (ssize_t)sizeof v) abort(); /* only before the system has any entropy */
    return v;
}

int fv_address_text(const fv_addr *a, uint64_t incarnation, char *buf, size_t cap) {
    char gid[33];
    for (size_t i = 0; i < 16; i++) snprintf(gid + 2 * i, 3, "%02x", a->gid[i]);
    int n = snprintf(buf, cap, "%s/%x/%x/%x#%llx", gid, a->lid, a->qpn, a->qkey, (unsigned long long)incarnation);
    return n < 0 || (size_t)n >= cap ? -ENOSPC : n;
}

static int digit(char c) { return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1; }

/* One number of at most `digits` hex digits, ended by `end` (0: the end of the text). */
static int number(const char **at, const char *stop, uint32_t digits, char end, uint64_t *out) {
    uint32_t n = 0;
    for (*out = 0; *at < stop && digit(**at) >= 0; ++*at, n++) *out = *out << 4 | (uint64_t)digit(**at);
    if (!n || n > digits) return -EINVAL;
    if (!end) return *at == stop ? 0 : -EINVAL;
    return *at < stop && *(*at)++ == end ? 0 : -EINVAL;
}

int fv_address_parse(const char *text, size_t len, fv_addr *out, uint64_t *incarnation) {
    const char *at = text, *stop = text + len;
    memset(out, 0, sizeof *out);
    if (len < 33 || len > 96) return -EINVAL;
    for (int i = 0; i < 16; i++, at += 2) {
        int hi = digit(at[0]), lo = digit(at[1]);
        if (hi < 0 || lo < 0) return -EINVAL;
        out->gid[i] = (uint8_t)(hi << 4 | lo);
    }
    uint64_t lid, qpn, qkey;
    if (*at++ != '/' || number(&at, stop, 4, '/', &lid) || number(&at, stop, 6, '/', &qpn) ||
        number(&at, stop, 8, '#', &qkey) || number(&at, stop, 16, 0, incarnation) || !*incarnation)
        return -EINVAL;
    out->lid = (uint16_t)lid;
    out->qpn = (uint32_t)qpn;
    out->qkey = (uint32_t)qkey;
    return 0;
}
