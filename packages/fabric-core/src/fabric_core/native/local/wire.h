/* wire.h - the messages on the control socket (SOCK_SEQPACKET, so one is one), with descriptors beside them. */
#ifndef FAB_LOCAL_WIRE_H
#define FAB_LOCAL_WIRE_H

#include "local_int.h"

enum { FL_HELLO = 1, FL_WELCOME, FL_REFUSE, FL_MAP, FL_MAPPED };

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
    char from_name[FL_NAME_MAX + 8];
} fl_wire;

#define FL_FDS 4
/* HELLO: header, channel, wake-up eventfd of the sending NIC. WELCOME: header, eventfd. MAPPED: the memory. */

static inline fl_wire fl_wire_make(uint16_t type) {
    return (fl_wire){.magic = FL_MAGIC, .version = FL_VERSION, .type = type, .size = sizeof(fl_wire)};
}
int fl_wire_send(int fd, const fl_wire *m, const int *fds, int nfds);
/* 1: a message, 0: end, -EAGAIN, -EBADMSG (makes no sense), -EPROTO (another version), or what recvmsg said. */
int fl_wire_recv(int fd, fl_wire *m, int fds[FL_FDS], int *nfds);
void fl_close_fds(int *fds, int n);

#endif
