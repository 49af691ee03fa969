/* Endpoints: one CQ and one address vector per domain, bound to all of them. */
#include "efa_int.h"

/* Newer than the oldest headers that we compile with; an enum of libfabric only grows at its end. */
#define OPT_CUDA_API_PERMITTED 10
#define OPT_SHARED_MEMORY_PERMITTED 11

/* Ours is the choice where data goes: not the provider's own shared memory (which follows other rules), and no calls of
 * CUDA under the engine's lock. A provider that knows no such option has no such habit. */
static void options(struct fid_ep *ep) {
    bool off = false;
    if (fe_fi.api >= FI_VERSION(1, 18))
        (void)fi_setopt(&ep->fid, FI_OPT_ENDPOINT, OPT_CUDA_API_PERMITTED, &off, sizeof off);
    if (fe_fi.api >= FI_VERSION(1, 20))
        (void)fi_setopt(&ep->fid, FI_OPT_ENDPOINT, OPT_SHARED_MEMORY_PERMITTED, &off, sizeof off);
}

static int open_one(fe_dom *d, struct fid_ep **out) {
    struct fid_ep *ep = NULL;
    int rc = fi_endpoint(d->domain, d->info, &ep, NULL);
    if (rc) return rc;
    options(ep);
    rc = fi_ep_bind(ep, &d->av->fid, 0);
    if (!rc) rc = fi_ep_bind(ep, &d->cq->fid, FI_TRANSMIT | FI_RECV);
    if (!rc) rc = fi_enable(ep);
    if (rc) {
        fi_close(&ep->fid);
        return rc;
    }
    *out = ep;
    return 0;
}

#define OTHERS 64 /* tries */

/* shm names its file by our process and a number, and what a killed process of that number left may be in the way; at each
 * try the provider counts on. */
int fe_ep_open(fe_dom *d, struct fid_ep **out) {
    int rc = open_one(d, out);
    for (int i = 0; i < OTHERS && rc == -FI_EBUSY; i++) rc = open_one(d, out);
    return rc;
}
