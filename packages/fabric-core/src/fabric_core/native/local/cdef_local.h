/* Declarations only, no preprocessor lines: also read by cffi. Needs stdint and fab_domain_ops. */

typedef struct fab_local_cfg {
    const char *dir;              /* where the sockets live: made 0700, must be ours alone */
    const char *name;             /* [A-Za-z0-9_-]{1,64} */
    uint32_t nics;                /* 1..8 */
    uint32_t path;                /* 0 auto, 1 map, 2 cma, 3 bounce */
    int64_t shuffle_seed;         /* < 0: off */
    uint64_t connect_timeout_ns;  /* 0: 2 s */
    uint64_t heartbeat_ns;        /* 0: 1 s; a peer that stands still for twice this is lost */
    const uint8_t *key;           /* 32 bytes derived from the job's secret; peers must have the same. NULL: none */
    uint32_t max_links;           /* links in each direction, one per pair of NICs; 0: 4096 */
    uint32_t gpu;                 /* 0: host memory only; else 1 + the CUDA device whose memory is moved */
    uint64_t gpu_linger_ns;       /* 0: a kernel is launched per batch; else one stays so long without work */
} fab_local_cfg;

typedef struct fab_local_node fab_local_node;

/* 0, or -errno with one sentence in err. The node lives until the last of its domains is closed. */
int fab_local_open(const fab_local_cfg *cfg, fab_local_node **out, char *err, size_t errcap);
const fab_domain_ops *fab_local_ops(void);
void *fab_local_domain(fab_local_node *node, uint32_t nic);

/* How memory that cannot be mapped reaches this peer: 0 unknown, 2 cma, 3 bounce, 4 same process; 1: mapping is forced. */
int fab_local_peer_path(void *ctx, uint32_t id);
/* Messages of the control sockets that were dropped because they made no sense (one of the counters of the table). */
uint64_t fab_local_malformed(fab_local_node *node);
/* The copy routine in use: "avx512", "avx2", "sse2" or "memcpy". */
const char *fab_local_copy_kind(void);
