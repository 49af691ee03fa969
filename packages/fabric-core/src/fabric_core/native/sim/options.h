/* Every number that shapes a run, in one table. A seed is expanded into a value for each: a share of the seeds leave an
 * option at its calm value, the others draw it between lo and hi (so a run has some troubles, rarely all of them).
 *
 *   X(name, calm, lo, hi, percent of the seeds that leave it calm, what it is)
 * Times are nanoseconds, `_permille` chances in 1000, `_percent` chances in 100. */
#ifndef FAB_SIM_OPTIONS_H
#define FAB_SIM_OPTIONS_H

#include <stdint.h>

#define SIM_OPTIONS(X)                                                                                             \
    X(transfers, 2000, 2000, 2000, 100, "transfers submitted before the faults stop")                              \
    X(nodes, 2, 2, 5, 20, "engines")                                                                               \
    X(nics, 1, 1, 4, 25, "NICs of the nodes with an even number")                                                  \
    X(nics_odd, 1, 1, 4, 25, "NICs of the nodes with an odd number")                                               \
    X(settle_ns, 60000000000, 60000000000, 60000000000, 100, "virtual time to settle in, once the faults stopped") \
    /* the network */                                                                                              \
    X(latency_ns, 2000, 200, 200000, 10, "from a request's posting to its landing, at least")                      \
    X(jitter_ns, 500, 1, 1000000, 10, "more of it, drawn for each request: reorders them")                         \
    X(slow_permille, 0, 1, 50, 60, "requests that take much longer")                                               \
    X(slow_ns, 1000000, 100000, 300000000, 20, "... up to so much (a retransmission)")                             \
    X(skew_ns, 0, 1, 500000, 50, "how much slower the last NIC of a node is than the first")                       \
    X(early_read_percent, 0, 1, 100, 40, "requests whose source is read long before they land")                    \
    X(piece_percent, 0, 1, 50, 60, "requests that land in two parts at different times")                           \
    X(late_done_ns, 1, 1, 500000, 30, "from landing to the sender's completion, at most")                          \
    X(late_imm_ns, 1, 1, 500000, 30, "from landing to the receiver's immediate, at most")                          \
    X(step_ns, 500, 1, 200000, 20, "from something to do until the worker's next step, at most")                   \
    /* queues */                                                                                                   \
    X(send_queue, 128, 1, 256, 20, "requests a NIC holds")                                                         \
    X(completion_queue, 4096, 4, 1024, 40, "completions a NIC holds; more wait outside")                           \
    X(poll_batch, 256, 1, 64, 30, "completions of one poll, at most")                                              \
    X(receive_queue, 32, 1, 32, 30, "posted receives a NIC holds")                                                 \
    X(partial_post_percent, 0, 1, 80, 40, "posts of which only a part is taken, or nothing")                       \
    X(merge_percent, 50, 0, 100, 20, "completions reported together with others of the same transfer")             \
    X(receive_retry_ns, 20000, 1000, 2000000, 20, "until a message that met no receive is tried again")            \
    /* the engine */                                                                                               \
    X(max_write, 0, 64, 65536, 30, "longest write of a NIC; 0: no limit")                                          \
    X(shard_bytes, 16384, 1, 65536, 20, "a single write from this size on is spread over all NICs")                \
    X(inline_bytes, 65536, 0, 65536, 30, "a submit up to this size is posted by the submitter")                    \
    X(max_inflight, 4096, 2, 256, 60, "transfers of an engine at a time")                                          \
    X(imm_slots, 1024, 9, 64, 40, "immediates of an engine at a time; few are used again soon")                    \
    X(timeout_ns, 20000000000, 1000000000, 20000000000, 50, "deadline of what names none")                         \
    /* the workload */                                                                                             \
    X(flows, 16, 1, 128, 10, "hand-overs under way at a time")                                                     \
    X(payload, 256, 1, 100000, 10, "bytes of a logical write, at most")                                            \
    X(pages, 8, 1, 32, 30, "pages or targets of one transfer, at most")                                            \
    X(paged_percent, 0, 1, 60, 40, "transfers that are paged")                                                     \
    X(scatter_percent, 0, 1, 40, 40, "... scatters")                                                               \
    X(barrier_percent, 0, 1, 30, 40, "... barriers")                                                               \
    X(send_percent, 0, 1, 30, 40, "... messages")                                                                  \
    X(silent_percent, 0, 1, 60, 40, "hand-overs without an immediate")                                             \
    X(pinned_percent, 0, 1, 50, 50, "transfers pinned to one NIC")                                                 \
    X(join_percent, 0, 1, 80, 40, "hand-overs of several transfers on one immediate")                              \
    X(expect_late_percent, 30, 0, 100, 20, "expectations made during or after the arrivals")                       \
    X(notify_percent, 50, 0, 100, 20, "operations that ask for an event")                                          \
    X(flag_percent, 20, 0, 100, 30, "transfers that bump a flag")                                                  \
    X(think_ns, 1000, 1, 1000000, 20, "pauses of the workload, at most")                                           \
    X(surplus_percent, 0, 1, 30, 50, "expectations that claim less than what comes")                               \
    X(cancel_permille, 0, 1, 100, 50, "transfers that are cancelled at some time")                                 \
    X(deadline_permille, 0, 1, 100, 50, "transfers with a short deadline")                                         \
    X(expect_cancel_permille, 0, 1, 100, 50, "expectations that are cancelled at some time")                       \
    X(expect_deadline_permille, 0, 1, 100, 50, "expectations with a short deadline")                               \
    X(expect_peers_percent, 0, 1, 100, 50, "expectations that name their peers")                                   \
    X(dereg_permille, 0, 1, 50, 50, "registrations revoked and made again, per transfer")                          \
    /* faults: mean virtual time from one to the next; 0: none */                                                  \
    X(stall_every_ns, 0, 200000, 50000000, 50, "a NIC stands still")                                               \
    X(stall_ns, 500000, 10000, 50000000, 20, "... for up to")                                                      \
    X(link_every_ns, 0, 10000000, 500000000, 60, "the link between two NICs is cut; it can be opened again")       \
    X(nic_every_ns, 0, 20000000, 1000000000, 65, "a NIC is lost")                                                  \
    X(nic_back_percent, 0, 50, 100, 50, "lost NICs that come back")                                                \
    X(crash_every_ns, 0, 50000000, 2000000000, 60, "a node dies, and starts again as a new incarnation")           \
    X(close_percent, 0, 1, 60, 50, "... or closes under traffic instead of dying")                                 \
    X(down_ns, 5000000, 100000, 100000000, 20, "how long a NIC, a link or a node is away, at most")                \
    X(pause_every_ns, 0, 2000000, 100000000, 60, "a node is not stepped for a while; its NICs work")               \
    X(pause_ns, 5000000, 100000, 1000000000, 20, "... for up to")                                                  \
    X(clock_every_ns, 0, 10000000, 500000000, 70, "the clock jumps forward")                                       \
    X(clock_ns, 10000000, 1000000, 2000000000, 20, "... by up to")                                                 \
    X(refuse_percent, 50, 0, 100, 30, "posts to a dead link refused at once, instead of failed later")             \
    /* first contact and heartbeat: the protocol of fabric/contact.h over datagrams */                             \
    X(heartbeat_ns, 100000000, 10000000, 300000000, 30, "interval of the heartbeat")                               \
    X(connect_ns, 500000000, 100000000, 1000000000, 50, "how long first contact is tried")                         \
    X(datagram_loss_permille, 0, 1, 400, 40, "datagrams that are lost")                                            \
    X(datagram_twice_permille, 0, 1, 300, 50, "... that come twice")                                               \
    X(datagram_flip_permille, 0, 1, 100, 60, "... of which a bit is flipped")                                      \
    X(datagram_replay_permille, 0, 1, 100, 60, "... that come once more, much later")                              \
    X(datagram_ns, 10000, 1000, 3000000, 20, "how long one takes, at most")                                        \
    /* what time costs: see cost.c */                                                                              \
    X(nic_model, 0, 0, 0, 100,                                                                                     \
      "cost model of the NICs: 0 none, 1 efa-p5, 2 efa-p5en, 3 cx7; latency_ns is its own then")

typedef struct sim_options {
#define X(name, calm, lo, hi, off, help) uint64_t name;
    SIM_OPTIONS(X)
#undef X
} sim_options;

#endif
