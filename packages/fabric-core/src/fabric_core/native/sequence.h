/* What sequence.c and sequence_open.c share. */
#ifndef FAB_SEQUENCE_H
#define FAB_SEQUENCE_H

#include "engine_internal.h"

#define FAB_MAX_LANES 65536u

typedef struct fab_item {
    fab_kept kept;
    uint64_t handle; /* 0: never submitted */
    bool taken; /* whoever has it releases it */
} fab_item;

struct fab_sequence {
    fab_engine *e;
    pthread_mutex_t mutex; /* who submits, cancels or takes */
    fab_watch *watch; /* set before it is looked at */
    uint64_t watch_id;
    _Atomic uint64_t *word;
    uint32_t nsteps, nitems, nlanes;
    uint32_t keep; /* transfers wait to be taken, instead of being released at their ends */
    fab_item *items;
    uint32_t *ends; /* of step k: one behind its last item */
    _Atomic uint64_t *seen_ns, *posted_ns;
    _Atomic int32_t *lanes; /* 0: open; else why it ended */
    _Atomic uint32_t reached; /* steps that were submitted, or passed over */
    uint32_t ended; /* items, from the first, that have ended [mutex] */
    uint64_t first_handle; /* the first that went wrong, 0: was refused [mutex] */
    fab_outcome first;
    bool closed; /* [mutex] */
};

void fab_sequence_fire(void *arg, uint64_t old, uint64_t value); /* a fab_watch_fn */
void fab_sequence_reap(fab_sequence *s); /* [mutex] looks how far the ends have come */

#endif
