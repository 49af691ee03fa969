/* The rest of a libibverbs, which fake_verbs.c does not need: no test gets that far. Without the header, which has other
 * ideas of these functions. */
#include <errno.h>
#include <stddef.h>

#define NONE(name)          \
    void *ibv_##name(void); \
    void *ibv_##name(void) { return (errno = ENOSYS, NULL); }
NONE(query_pkey)
NONE(alloc_pd)
NONE(dealloc_pd)
NONE(reg_mr)
NONE(dereg_mr)
NONE(create_comp_channel)
NONE(destroy_comp_channel)
NONE(create_cq)
NONE(destroy_cq)
NONE(get_cq_event)
NONE(ack_cq_events)
NONE(create_srq)
NONE(destroy_srq)
NONE(modify_srq)
NONE(create_qp)
NONE(modify_qp)
NONE(query_qp)
NONE(destroy_qp)
NONE(create_ah)
NONE(destroy_ah)
NONE(get_async_event)
NONE(ack_async_event)
