/* Our GID in the port's table. Its index is not for good: an interface that loses its address and gets it back (a cable that
 * was pulled, a DHCP lease) may find it at another one. */
#include "verbs_int.h"

#define MOST 1024u
#define UNKNOWN UINT32_MAX

/* The place of this GID of this kind in the table, or -1. A library without the call knows the one index only. */
static int64_t find(const fv_dom *d, uint32_t kind) {
    if (!fv_ibv.query_gid_table) return -1;
    struct ibv_gid_entry *all = calloc(MOST, sizeof *all);
    if (!all) return -1;
    int64_t found = -1;
    ssize_t n = fv_ibv.query_gid_table(d->ctx, all, MOST, 0, sizeof *all);
    for (ssize_t i = 0; i < n && found < 0; i++)
        if (all[i].port_num == d->cfg.port && all[i].gid_type == kind &&
            memcmp(&all[i].gid, &d->gid, sizeof d->gid) == 0)
            found = all[i].gid_index;
    free(all);
    return found;
}

static bool at_index(const fv_dom *d, union ibv_gid *gid) {
    return !fv_ibv.query_gid(d->ctx, (uint8_t)d->cfg.port, (int)d->cfg.gid_index, gid);
}

int fv_gid_open(fv_dom *d) {
    errno = 0;
    static const union ibv_gid none; /* an empty place of the table reads as this */
    if (!at_index(d, &d->gid)) return errno ? -errno : -EINVAL;
    if (memcmp(&d->gid, &none, sizeof none) == 0) return -ENOENT;
    d->gid_kind = UNKNOWN;
    for (uint32_t kind = 0; kind <= IBV_GID_TYPE_ROCE_V2 && d->gid_kind == UNKNOWN; kind++)
        if (find(d, kind) == (int64_t)d->cfg.gid_index) d->gid_kind = kind;
    return 0;
}

bool fv_gid_there(fv_dom *d) {
    union ibv_gid gid;
    if (at_index(d, &gid) && memcmp(&gid, &d->gid, sizeof gid) == 0) return true;
    int64_t index = d->gid_kind == UNKNOWN ? -1 : find(d, d->gid_kind);
    if (index < 0 || index > FV_MOST_GID) return false;
    d->cfg.gid_index = (uint32_t)index;
    return true;
}
