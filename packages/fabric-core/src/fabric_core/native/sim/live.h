/* The simulated network that people open (backend "sim"): engines of one process, real threads, real time. Its own
 * small network: there is no checker to please here, and threads to be kept apart. */
#ifndef FAB_SIM_LIVE_H
#define FAB_SIM_LIVE_H

#include "../common.h"
#include "cdef_sim.h"
#include "fabric/domain.h"
#include "rand.h"

#define LIVE_NAME 65u
#define LIVE_SEND_QUEUE 128u /* of each link, so that a peer that takes nothing does not fill the NIC for the others */
#define LIVE_RECEIVE_QUEUE 1024u
#define LIVE_RETRY_NS 50000ull /* until a message that met no receive is tried again */

typedef struct live_nic live_nic;

typedef struct live_link {
    live_nic *to; /* NULL: lost or closed */
    int32_t status;
    uint32_t sending;
    uint8_t closed;
} live_link;

typedef struct live_wr {
    fab_wr wr;
    uint32_t link;
    uint64_t due;
} live_wr;

typedef struct live_mr {
    uint64_t addr, len, gen;
    uint32_t access, live;
} live_mr;

typedef struct live_recv {
    uint64_t id, addr, len;
} live_recv;

struct live_nic {
    char name[LIVE_NAME];
    uint32_t index;
    uint64_t inc, free_at; /* free_at: when its wire has sent what was posted */
    const fab_sim_nic_model *model;
    sim_rand rand;
    live_nic *next; /* of all that are open */
    live_wr *sending;
    uint32_t nsending, sending_cap;
    fab_wc *cq;
    uint32_t ncq, cq_cap;
    live_link *links;
    uint32_t nlinks, links_cap;
    live_mr *mrs;
    uint32_t nmrs, mrs_cap;
    live_recv recvs[LIVE_RECEIVE_QUEUE];
    uint32_t nrecvs;
    int fd;
    uint8_t armed;
};

extern pthread_mutex_t live_world; /* of everything above, of every NIC */
extern live_nic *live_all;
extern const fab_domain_ops live_ops;

/* live_net.c: with the world's lock */
void live_tell(live_nic *nic, const fab_wc *wc);
void live_link_lost(live_nic *nic, uint32_t link, int32_t status);
void live_link_fail(live_nic *nic, uint32_t link, int32_t status);
void live_end(live_nic *nic, uint32_t i, int32_t status);
bool live_send(live_nic *nic, uint32_t link, const fab_wr *wr);
void live_advance(live_nic *nic, uint64_t now);
int live_take(live_nic *nic, fab_wc *wc, uint32_t cap);

#endif
