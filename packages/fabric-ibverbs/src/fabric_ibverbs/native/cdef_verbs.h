/* What Python calls of this module. Read by cffi: no preprocessor lines, except outside the marks. */
#ifndef FAB_CDEF_VERBS_H
#define FAB_CDEF_VERBS_H
#include <stdint.h>
/* cdef-begin */
typedef struct fab_verbs_cfg {
    const char *device;      /* as in /sys/class/infiniband */
    uint32_t port, gid_index, pkey_index;
    uint32_t sl, traffic_class, hop_limit;
    uint32_t timeout, retry; /* of a queue pair: 4.096 us << timeout; 1 to 6 retries */
    uint32_t depth;          /* writes in flight per peer, a power of two */
    uint32_t chain;          /* requests per doorbell */
    uint32_t inline_bytes;   /* writes up to this size are copied into the request */
    uint32_t mtu;            /* bytes at most, 0: the port's */
    uint32_t force_grh;
    uint32_t relaxed;        /* 1: relaxed ordering where the library has it */
    uint32_t max_links;      /* each way; 0: as many as the device's queues hold, 1024 at most */
    uint32_t numa;           /* UINT32_MAX: unknown */
    uint64_t bandwidth;      /* bytes per second, 0: unknown */
    uint64_t incarnation, heartbeat_ns, connect_ns;
    const uint8_t *key;      /* 32 bytes that authenticate handshakes, or NULL */
    const void *contact;     /* what fab_native_table.contact_api returned */
} fab_verbs_cfg;

typedef struct fab_verbs_device {
    uint64_t max_mr_size;
    uint32_t max_qp, max_qp_wr, max_cqe, max_srq_wr, max_msg, ports;
    uint32_t state, mtu, link_layer, gids; /* of port 1; state 4: active; mtu in bytes */
    char firmware[64];
} fab_verbs_device;

/* Loads libibverbs (path NULL: libibverbs.so.1). 0, or a negative errno with a text. */
int fab_verbs_load(const char *path, char *err, uint32_t cap);
int fab_verbs_has(const char *symbol); /* of the loaded library: relaxed ordering, dmabuf */
int fab_verbs_query(const char *device, fab_verbs_device *out, char *err, uint32_t cap);
/* The contact functions in a fab_native_table, or NULL if it ends before them. */
const void *fab_verbs_contact_of(uintptr_t native_table);
int fab_verbs_open(const fab_verbs_cfg *cfg, void **domain, char *err, uint32_t cap);
uintptr_t fab_verbs_ops(void);
void fab_verbs_close(void *domain); /* one that was not handed to an engine */
/* An open domain, for people and tests: "name value" lines. */
int fab_verbs_describe(void *domain, char *buf, uint32_t cap);
/* For tests: sends bytes to an address of this backend as a datagram, whatever they are. */
int fab_verbs_inject(void *domain, const char *addr, const uint8_t *bytes, uint32_t len);
/* cdef-end */
#endif
