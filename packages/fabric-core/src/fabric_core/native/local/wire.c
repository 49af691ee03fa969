/* wire.c - one message with descriptors, in and out, never blocking. */
#include "wire.h"

#include <sys/socket.h>
#include <unistd.h>

void fl_close_fds(int *fds, int n) {
    for (int i = 0; i < n; i++)
        if (fds[i] >= 0) {
            close(fds[i]);
            fds[i] = -1;
        }
}

int fl_wire_send(int fd, const fl_wire *m, const int *fds, int nfds) {
    union {
        struct cmsghdr align;
        char buf[CMSG_SPACE(FL_FDS * sizeof(int))];
    } c;
    struct iovec v = {(void *)(uintptr_t)m, sizeof *m};
    struct msghdr h = {.msg_iov = &v, .msg_iovlen = 1};
    memset(&c, 0, sizeof c);
    if (nfds) {
        h.msg_control = c.buf;
        h.msg_controllen = CMSG_SPACE((size_t)nfds * sizeof(int));
        struct cmsghdr *k = CMSG_FIRSTHDR(&h);
        k->cmsg_level = SOL_SOCKET;
        k->cmsg_type = SCM_RIGHTS;
        k->cmsg_len = CMSG_LEN((size_t)nfds * sizeof(int));
        memcpy(CMSG_DATA(k), fds, (size_t)nfds * sizeof(int));
    }
    ssize_t r;
    do r = sendmsg(fd, &h, MSG_NOSIGNAL | MSG_DONTWAIT);
    while (r < 0 && errno == EINTR);
    return r < 0 ? -errno : 0;
}

int fl_wire_recv(int fd, fl_wire *m, int fds[FL_FDS], int *nfds) {
    union {
        struct cmsghdr align;
        char buf[CMSG_SPACE(FL_FDS * sizeof(int))];
    } c;
    struct iovec v = {m, sizeof *m};
    struct msghdr h = {.msg_iov = &v, .msg_iovlen = 1, .msg_control = c.buf, .msg_controllen = sizeof c.buf};
    ssize_t r;
    *nfds = 0;
    do r = recvmsg(fd, &h, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    while (r < 0 && errno == EINTR);
    if (r < 0) return errno == EWOULDBLOCK ? -EAGAIN : -errno;
    for (struct cmsghdr *k = CMSG_FIRSTHDR(&h); k; k = CMSG_NXTHDR(&h, k)) {
        if (k->cmsg_level != SOL_SOCKET || k->cmsg_type != SCM_RIGHTS) continue;
        int got = (int)((k->cmsg_len - CMSG_LEN(0)) / sizeof(int)), *f = (int *)(void *)CMSG_DATA(k);
        for (int i = 0; i < got; i++)
            if (*nfds < FL_FDS) fds[(*nfds)++] = f[i];
            else close(f[i]);
    }
    if (r == 0 && *nfds == 0) return 0;
    int bad = r < 16 || m->magic != FL_MAGIC                                                       ? -EBADMSG
              : m->version != FL_VERSION                                                           ? -EPROTO
              : r != sizeof *m || m->size != sizeof *m || (h.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) ? -EBADMSG
                                                                                                   : 0;
    if (bad) {
        fl_close_fds(fds, *nfds);
        *nfds = 0;
        return bad;
    }
    m->from_name[FL_NAME_MAX] = 0;
    return 1;
}
