/* wire.h - the messages on the control socket (SOCK_SEQPACKET, so one is one), with descriptors beside them.
 *
 * First contact takes four: HELLO (a nonce) -> CHALLENGE (a nonce, the acceptor's proof) -> PROOF (the connector's proof,
 * its descriptors) -> WELCOME (the acceptor's descriptors). So nobody gets a descriptor, and nobody's is looked at, before
 * it proved the secret. Without a secret the proofs are empty; the order is the same.
 */
#ifndef FAB_LOCAL_WIRE_H
#define FAB_LOCAL_WIRE_H

#include "local_int.h"

enum { FL_HELLO = 1, FL_WELCOME, FL_REFUSE, FL_MAP, FL_MAPPED, FL_CHALLENGE, FL_PROOF, FL_WIRE_TYPES };
enum {
    FL_WIRE_AUTH = 1u,                 /* flags: the sender has a secret, and wants proof of it */
    FL_WIRE_CUDA = 2u                  /* MAPPED: this is GPU memory, and comes as `ipc` and not as a descriptor */
};

/* The first 16 bytes never change, so that any two versions can tell each other so. */
typedef struct fl_wire {
    uint32_t magic;
    uint16_t version, type;
    uint32_t size;
    int32_t status;
    uint64_t from_inc, to_inc;         /* HELLO: to_inc 0 = whoever answers */
    uint32_t from_nic, to_nic;
    uint64_t key, off, len;            /* MAP, MAPPED */
    uint64_t scratch;                  /* WELCOME: the address of the header's scratch words in its own process */
    char from_name[FL_NAME_MAX + 8];   /* HELLO, CHALLENGE */
    uint32_t flags;
    int32_t pid;                       /* HELLO, CHALLENGE: see fl_same_process */
    uint64_t pid_ns;
    uint8_t nonce[FL_NONCE];           /* HELLO, CHALLENGE */
    uint8_t mac[FAB_SHA256_BYTES];     /* CHALLENGE, PROOF */
    uint8_t ipc[64];                   /* MAPPED with FL_WIRE_CUDA: the allocation's handle; off lies in it */
} fl_wire;

#define FL_FDS 4
/* PROOF: header, channel, wake-up eventfd of the sending NIC. WELCOME: header, eventfd. MAPPED: the memory. */

static inline fl_wire fl_wire_make(uint16_t type) {
    return (fl_wire){.magic = FL_MAGIC, .version = FL_VERSION, .type = type, .size = sizeof(fl_wire)};
}
int fl_wire_send(int fd, const fl_wire *m, const int *fds, int nfds);
/* Whether `len` received bytes are a message: 0, -EBADMSG (makes no sense), -EPROTO (another version). */
int fl_wire_check(const fl_wire *m, size_t len, bool cut);
/* 1: a message, 0: end, -EAGAIN, what fl_wire_check says, or what recvmsg said. take_fds false: descriptors are thrown
 * away by the kernel, and a message that had some makes no sense. */
int fl_wire_recv(int fd, fl_wire *m, bool take_fds, int fds[FL_FDS], int *nfds);
void fl_close_fds(int *fds, int n);

/* ---- auth.c ---- */
void fl_script_begin(fl_script *s, const fl_wire *hello, const char *to_name);
void fl_script_answer(fl_script *s, const fl_wire *challenge);
/* The proof of the acceptor, or of the connector, over all that both said; zeros without a secret. */
void fl_prove(const struct fab_local_node *n, const fl_script *s, bool acceptor, uint8_t mac[FAB_SHA256_BYTES]);
/* Compares in constant time; also whether both or neither have a secret. 0 or -EACCES. */
int fl_verify(const struct fab_local_node *n, const fl_script *s, bool acceptor, const fl_wire *m);
void fl_sign_process(fl_wire *m);
/* Whether the process at the other end of the socket is the one that signed: else somebody passes messages on. */
bool fl_same_process(const fl_wire *m, pid_t seen);

#endif
