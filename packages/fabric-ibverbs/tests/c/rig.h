/* What the programs beside this share: a domain of the backend without an engine, driven through its table of functions. */
#ifndef VERBS_RIG_H
#define VERBS_RIG_H

#include "cdef_verbs.h"
#include "fabric/domain.h"
#include "fabric/engine.h"
#include "measure.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static const fab_domain_ops *ops;
static uint64_t heartbeat_ns = 30000000000ull;
static uint64_t connect_ns = 120000000000ull; /* the emulated machine is slow, and slower beside others */

static inline uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* The GID argument of a program: an index, or "auto": each device's RoCE v2 GID with an IPv4 address. An interface that lost its
 * address and got it back may have it at another index. */
#define GID_AUTO UINT32_MAX
static inline uint32_t gid_argument(const char *text) {
    return strcmp(text, "auto") == 0 ? GID_AUTO : (uint32_t)strtoul(text, NULL, 10);
}

static inline int gid_line(const char *device, const char *what, uint32_t index, char *line, int cap) {
    char path[256];
    snprintf(path, sizeof path, "/sys/class/infiniband/%s/ports/1/%s/%u", device, what, index);
    FILE *f = fopen(path, "r");
    if (!f) return 0;
    int read = fgets(line, cap, f) != NULL;
    fclose(f);
    return read;
}

static inline uint32_t gid_find(const char *device) {
    char gid[64], type[64];
    for (uint32_t i = 0; i < 256; i++)
        if (gid_line(device, "gids", i, gid, sizeof gid) && strncmp(gid, "0000:0000:0000:0000:0000:ffff:", 30) == 0 &&
            gid_line(device, "gid_attrs/types", i, type, sizeof type) && strncmp(type, "RoCE v2", 7) == 0)
            return i;
    fprintf(stderr, "%s: ", device);
    die("no RoCE v2 GID with an IPv4 address", 0);
    return 0;
}

/* Long deadlines, unless those above are changed first. */
static inline void *open_domain(const char *device, uint32_t gid, uint32_t depth, uint32_t links,
                                uint64_t incarnation) {
    char err[512] = "";
    void *ctx = NULL;
    if (!ops && fab_verbs_load(NULL, err, sizeof err) < 0) die(err, 0);
    ops = (const fab_domain_ops *)fab_verbs_ops();
    fab_verbs_cfg c = {.device = device,
                       .port = 1,
                       .gid_index = gid == GID_AUTO ? gid_find(device) : gid,
                       .hop_limit = 64,
                       .timeout = getenv("FABRIC_VERBS_TIMEOUT") ? (uint32_t)atoi(getenv("FABRIC_VERBS_TIMEOUT")) : 18,
                       .retry = 6,
                       .depth = depth,
                       .chain = 4,
                       .inline_bytes = 64,
                       .max_links = links,
                       .numa = UINT32_MAX,
                       .incarnation = incarnation,
                       .heartbeat_ns = heartbeat_ns,
                       .connect_ns = connect_ns,
                       .contact = fab_native_api()->contact_api()};
    if (fab_verbs_open(&c, &ctx, err, sizeof err) < 0) die(err, (long)incarnation);
    return ctx;
}

static inline void reg(void *domain, void *memory, size_t bytes, fab_mr_keys *keys) {
    fab_mr mr = {.addr = (uint64_t)(uintptr_t)memory, .len = bytes, .access = FAB_ACCESS_REMOTE_WRITE, .fd = -1};
    int rc = ops->mr_reg(domain, &mr, keys);
    if (rc) die("registration", rc);
}

static inline uint64_t counter(void *domain, const char *name) {
    fab_counter c[32];
    int n = ops->counters(domain, c, 32);
    for (int i = 0; i < n; i++)
        if (strcmp(c[i].name, name) == 0) return c[i].value;
    die("no such counter", 0);
    return 0;
}

#endif
