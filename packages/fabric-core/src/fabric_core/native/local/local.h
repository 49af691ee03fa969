/* local.h - the `local` NIC backend: processes of one host, host memory.
 *
 * A node is one engine group: a name, a Unix socket, a control thread, a shared header, 1..8 NICs.
 * The address of NIC i is `<name>.<i>#<incarnation>`; `.i` and `#..` may be left out (NIC 0, whoever answers).
 *
 * For the engine: wait_fd becomes readable for what comes from elsewhere (immediates, messages, acknowledgements,
 * peers). What the caller itself does (post, post_recv, cancel, peer_close) never signals it: poll, or call arm(1)
 * again, which says 1 if there is something to do. A message that waits for a receive is found by the poll after
 * post_recv. FAB_WC_FAULT of a message that is too long leaves the receive posted.
 */
#ifndef FAB_LOCAL_H
#define FAB_LOCAL_H

#include <fabric/domain.h>

#ifdef __cplusplus
extern "C" {
#endif

#include "cdef_local.h"

#ifdef __cplusplus
}
#endif
#endif
