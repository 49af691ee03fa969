/* libfabric, loaded at run time: a wheel imports everywhere, and says what is missing where it is missing. */
#include "efa_int.h"

#include <dlfcn.h>
#include <stdio.h>

fe_lib fe_fi;
static pthread_mutex_t mu = PTHREAD_MUTEX_INITIALIZER;
static char loaded[4096];

#define NEWEST \
    FI_VERSION(2, 5) /* behaviour may change with the version asked for: this is the newest we were tried with */
#define OLDEST FI_VERSION(1, 15)

static int find(void *h, const char *name, void **out, char *err, uint32_t cap) {
    *out = dlsym(h, name);
    if (*out) return 0;
    snprintf(err, cap, "the library has no %s: it is not libfabric", name);
    return -ELIBBAD;
}

/* ofi_rxm gives each endpoint 70 MB of buffers, ours are many and their datagrams few and short. It reads its sizes from
 * the environment only. What the user set stays. */
static void modest(void) {
    setenv("FI_OFI_RXM_BUFFER_SIZE", "8448", 0);
    setenv("FI_OFI_RXM_MSG_RX_SIZE", "64", 0);
}

int fab_efa_load(const char *path, char *err, uint32_t cap) {
    if (!path || !*path) path = "libfabric.so.1";
    pthread_mutex_lock(&mu);
    if (fe_fi.version) {
        int rc = strcmp(path, loaded) ? -EBUSY : 0;
        if (rc) snprintf(err, cap, "%s is loaded already, %s cannot be loaded beside it", loaded, path);
        pthread_mutex_unlock(&mu);
        return rc;
    }
    /* RTLD_NODELETE: a provider's threads may outlive everything we know of */
    modest();
    fe_signals signals;
    fe_signals_keep(&signals);
    void *h = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    int rc = 0;
    fe_lib l = {0};
    if (!h) {
        snprintf(err, cap, "%s", dlerror());
        rc = -ENOENT;
    }
    if (!rc) rc = find(h, "fi_getinfo", (void **)&l.getinfo, err, cap);
    if (!rc) rc = find(h, "fi_freeinfo", (void **)&l.freeinfo, err, cap);
    if (!rc) rc = find(h, "fi_dupinfo", (void **)&l.dupinfo, err, cap);
    if (!rc) rc = find(h, "fi_fabric", (void **)&l.fabric, err, cap);
    if (!rc) rc = find(h, "fi_version", (void **)&l.version, err, cap);
    if (!rc) rc = find(h, "fi_strerror", (void **)&l.strerror, err, cap);
    if (!rc) rc = find(h, "fi_tostr", (void **)&l.tostr, err, cap);
    if (!rc && l.version() < OLDEST) {
        snprintf(err, cap, "libfabric %u.%u is too old, %u.%u is the oldest that is known to work",
                 FI_MAJOR(l.version()), FI_MINOR(l.version()), FI_MAJOR(OLDEST), FI_MINOR(OLDEST));
        rc = -ELIBBAD;
    }
    if (!rc) {
        l.api = l.version() < NEWEST ? l.version() : NEWEST;
        snprintf(loaded, sizeof loaded, "%s", path);
        fe_fi = l;
        struct fi_info *list = NULL; /* the first call sets the providers up */
        if (!l.getinfo(l.api, NULL, NULL, FI_PROV_ATTR_ONLY, NULL, &list)) l.freeinfo(list);
    }
    fe_signals_restore(&signals);
    pthread_mutex_unlock(&mu);
    return rc;
}

uint32_t fab_efa_version(void) { return fe_fi.version ? fe_fi.version() : 0; }
uint32_t fab_efa_api(void) { return fe_fi.api; }

void fe_fail(char *err, uint32_t cap, const char *what, int rc) {
    snprintf(err, cap, "%s: %s (%d)", what, fe_fi.strerror(rc < 0 ? -rc : rc), rc);
}

/* libfabric's own numbers begin at 256; below they are errno. The engine's table is at the end of fabric/domain.h. */
int32_t fe_errno(int e) {
    if (e < 0) e = -e;
    switch (e) {
    case ECONNABORTED:
    case ENOTCONN:
    case EPIPE:
    case ESHUTDOWN:
    case ENODEV: /* net 1.17: its connection is closed */
    case FI_ENOAV: return -ECONNRESET;
    case EKEYREJECTED:
    case FI_ENOKEY: return -EKEYREVOKED;
    case FI_ETRUNC: return -EMSGSIZE;
    case FI_ENORX: return -ETIMEDOUT;
    case 0: return -EIO;
    default: return e < 256 ? -e : -EIO;
    }
}

/* Of a connection that broke: the way there may be at fault, or else the peer is. */
int32_t fe_lost(int32_t status) {
    return status == -ETIMEDOUT || status == -EHOSTUNREACH || status == -ENETUNREACH ? status : -ECONNRESET;
}
