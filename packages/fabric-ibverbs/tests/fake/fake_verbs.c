/* A libibverbs with one device, `fake0`, that can be whatever a test wants, up to the point where queues are made: for what a
 * machine without NICs can see of opening a device. FAKE_VERBS="max_srq=0 max_cqe=100" changes what it says of itself. */
#include <errno.h>
#include <infiniband/verbs.h>
#include <stdlib.h>
#include <string.h>

static struct ibv_device device = {.name = "fake0"};
static struct verbs_context whole;
static union ibv_gid gid;

static int setting(const char *name, int usual) {
    const char *text = getenv("FAKE_VERBS"), *at = text ? strstr(text, name) : NULL;
    return at && at[strlen(name)] == '=' ? atoi(at + strlen(name) + 1) : usual;
}

static int port(struct ibv_context *c, uint8_t number, struct ibv_port_attr *out, size_t size) {
    (void)c;
    memset(out, 0, size);
    out->state = setting("down", 0) ? IBV_PORT_DOWN : IBV_PORT_ACTIVE;
    out->active_mtu = IBV_MTU_4096;
    out->max_msg_sz = 1u << 30;
    out->link_layer = IBV_LINK_LAYER_ETHERNET;
    return number == 1 ? 0 : EINVAL;
}

struct ibv_device **ibv_get_device_list(int *n) {
    struct ibv_device **list = calloc(2, sizeof *list);
    if (list) list[0] = &device;
    *n = 1;
    return list;
}
void ibv_free_device_list(struct ibv_device **list) { free(list); }
const char *ibv_get_device_name(struct ibv_device *d) { return d->name; }

struct ibv_context *ibv_open_device(struct ibv_device *d) {
    whole.sz = sizeof whole;
    whole.query_port = port;
    whole.context.device = d;
    whole.context.abi_compat = __VERBS_ABI_IS_EXTENDED;
    return &whole.context;
}
int ibv_close_device(struct ibv_context *c) {
    (void)c;
    return 0;
}

int ibv_query_device(struct ibv_context *c, struct ibv_device_attr *a) {
    (void)c;
    *a = (struct ibv_device_attr){.max_qp = setting("max_qp", 1000),
                                  .max_qp_wr = setting("max_qp_wr", 4096),
                                  .max_cq = setting("max_cq", 1000),
                                  .max_cqe = setting("max_cqe", 65536),
                                  .max_srq = setting("max_srq", 1000),
                                  .max_srq_wr = setting("max_srq_wr", 32768),
                                  .phys_port_cnt = 1};
    return setting("mute", 0) ? -1 : 0;
}

int ibv_query_gid(struct ibv_context *c, uint8_t number, int index, union ibv_gid *out) {
    (void)c;
    (void)number;
    gid.raw[15] = index == 0; /* all others are empty */
    *out = gid;
    return 0;
}
