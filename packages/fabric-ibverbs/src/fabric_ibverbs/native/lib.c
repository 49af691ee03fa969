/* libibverbs, loaded at run time: a wheel imports everywhere, and says what is missing where it is missing. */
#include "verbs_int.h"

#include <dlfcn.h>
#include <stdio.h>

fv_lib fv_ibv;
static pthread_mutex_t mu = PTHREAD_MUTEX_INITIALIZER;

static int load(fv_lib *l, char *err, uint32_t cap) {
#define X(name, result, args)                                                                            \
    *(void **)(&l->name) = dlsym(l->handle, "ibv_" #name);                                               \
    if (!l->name) {                                                                                      \
        snprintf(err, cap, "the library has no ibv_%s: it is not libibverbs, or a very old one", #name); \
        return -ELIBBAD;                                                                                 \
    }
    FV_LIB(X)
#undef X
    *(void **)(&l->reg_mr_iova2) = dlsym(l->handle, "ibv_reg_mr_iova2");
    *(void **)(&l->reg_dmabuf_mr) = dlsym(l->handle, "ibv_reg_dmabuf_mr");
    *(void **)(&l->query_gid_table) = dlsym(l->handle, "_ibv_query_gid_table");
    return 0;
}

int fab_verbs_load(const char *path, char *err, uint32_t cap) {
    pthread_mutex_lock(&mu);
    int rc = 0;
    if (!fv_ibv.handle) {
        fv_lib l = {0};
        l.handle = dlopen(path && *path ? path : "libibverbs.so.1", RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
        if (!l.handle) {
            snprintf(err, cap, "%s", dlerror());
            rc = -ENOENT;
        } else rc = load(&l, err, cap);
        if (!rc) fv_ibv = l;
    }
    pthread_mutex_unlock(&mu);
    return rc;
}

int fab_verbs_has(const char *symbol) { return fv_ibv.handle && dlsym(fv_ibv.handle, symbol) != NULL; }

/* The header's inline form falls back to a symbol with a smaller struct; any library since 2018 has this one. */
int fv_query_port(struct ibv_context *c, uint8_t port, struct ibv_port_attr *out) {
    struct verbs_context *v = verbs_get_ctx_op(c, query_port);
    memset(out, 0, sizeof *out);
    return v ? v->query_port(c, port, out, sizeof *out) : EOPNOTSUPP;
}

struct ibv_context *fv_open_device(const char *name, char *err, uint32_t cap) {
    int n = 0;
    struct ibv_device **list = fv_ibv.get_device_list(&n);
    struct ibv_context *c = NULL;
    int found = 0;
    for (int i = 0; list && i < n; i++)
        if (strcmp(fv_ibv.get_device_name(list[i]), name) == 0) {
            found = 1;
            c = fv_ibv.open_device(list[i]);
            if (!c) snprintf(err, cap, "%s: cannot be opened: %s", name, strerror(errno ? errno : EIO));
        }
    if (!found && (!list || errno == EMFILE))
        snprintf(err, cap, "%s: the devices cannot be listed: %s", name, strerror(errno));
    else if (!found) snprintf(err, cap, "%s: libibverbs does not list it (is its provider installed?)", name);
    if (list) fv_ibv.free_device_list(list);
    return c;
}

int fab_verbs_query(const char *device, fab_verbs_device *out, char *err, uint32_t cap) {
    if (!fv_ibv.handle) return -EINVAL;
    errno = 0;
    struct ibv_context *c = fv_open_device(device, err, cap);
    if (!c) return errno == EACCES || errno == EPERM ? -EACCES : -ENODEV;
    struct ibv_device_attr a;
    struct ibv_port_attr p;
    int rc = fv_ibv.query_device(c, &a);
    if (!rc) rc = fv_query_port(c, 1, &p);
    if (rc) snprintf(err, cap, "%s: cannot be asked: %s", device, strerror(rc));
    else {
        *out = (fab_verbs_device){.max_mr_size = a.max_mr_size,
                                  .max_qp = (uint32_t)a.max_qp,
                                  .max_qp_wr = (uint32_t)a.max_qp_wr,
                                  .max_cqe = (uint32_t)a.max_cqe,
                                  .max_srq_wr = (uint32_t)a.max_srq_wr,
                                  .max_msg = p.max_msg_sz,
                                  .ports = a.phys_port_cnt,
                                  .state = p.state,
                                  .mtu = 128u << p.active_mtu,
                                  .link_layer = p.link_layer,
                                  .gids = (uint32_t)p.gid_tbl_len};
        snprintf(out->firmware, sizeof out->firmware, "%.63s", a.fw_ver);
    }
    fv_ibv.close_device(c);
    return rc ? -rc : 0;
}
