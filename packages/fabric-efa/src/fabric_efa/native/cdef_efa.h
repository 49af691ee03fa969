/* What Python calls of this module. Read by cffi: no preprocessor lines, except outside the marks. */
#ifndef FAB_CDEF_EFA_H
#define FAB_CDEF_EFA_H
#include <stdint.h>
/* cdef-begin */
typedef struct fab_efa_nic {    /* one endpoint that a provider offers */
    char provider[64], domain[64], source[128], pci[32];
    uint64_t max_msg, speed;    /* bytes; bits per second, 0: unknown */
    uint32_t cq_data, inject, mr_mode, version;
    uint32_t mtu, up;           /* 0: unknown */
} fab_efa_nic;

typedef struct fab_efa_cfg {
    const char *provider, *domain, *source; /* of libfabric; NULL: whatever comes first */
    const uint8_t *key;         /* 32 bytes that authenticate handshakes, or NULL */
    const void *contact;        /* what fab_native_table.contact_api returned */
    uint64_t incarnation, heartbeat_ns, connect_ns;
    int64_t strict_seed;        /* -1: off */
    uint32_t nic;               /* number in its group */
    uint32_t max_peers;
    uint32_t unguarded;         /* 1: let engines of one process talk over shm */
} fab_efa_cfg;

/* Loads libfabric (path NULL: libfabric.so.1). 0, or a negative errno with a text. Once per process: a second path is refused. */
int fab_efa_load(const char *path, char *err, uint32_t cap);
/* fi_version() of the loaded library, and the API version asked of it: major << 16 | minor. */
uint32_t fab_efa_version(void);
uint32_t fab_efa_api(void);
/* What fi_getinfo offers. Returns how many (at most cap were written), or a negative errno. */
int fab_efa_probe(const char *provider, const char *source, fab_efa_nic *out, uint32_t cap);
/* The contact functions in a fab_native_table, or NULL if it ends before them. */
const void *fab_efa_contact_of(uintptr_t native_table);
int fab_efa_open(const fab_efa_cfg *cfg, void **domain, char *err, uint32_t cap);
uintptr_t fab_efa_ops(void);
void fab_efa_close(void *domain); /* one that was not handed to an engine */
/* Attributes of an open domain, for people: "name value" lines. */
int fab_efa_describe(void *domain, char *buf, uint32_t cap);
/* What the provider of the NIC `nic` (its address) last said of an error `status` with a peer: `peer` is the text of all of the
 * peer's NICs. "" and 0: whichever. Returns the length, 0 if there is nothing. */
int fab_efa_words(const char *nic, const char *peer, int status, char *buf, uint32_t cap);
/* cdef-end */
#endif
