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
    if (r >= 0) return 0;
    return errno == EPIPE || errno == ENOTCONN ? -ECONNRESET : -errno; /* it died in the middle of the handshake */
}

static bool printable(const char *name, size_t size) {
    size_t n = strnlen(name, size);
    return n && n <= FL_NAME_MAX &&
           strspn(name, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-") == n;
}

int fl_wire_check(const fl_wire *m, size_t len, bool cut) {
    if (len < 16 || m->magic != FL_MAGIC) return -EBADMSG;
    if (m->version != FL_VERSION) return -EPROTO;
    if (len != sizeof *m || m->size != sizeof *m || cut || !m->type || m->type >= FL_WIRE_TYPES) return -EBADMSG;
    bool named = m->type == FL_HELLO || m->type == FL_CHALLENGE;
    if (named && (!printable(m->from_name, sizeof m->from_name) || m->from_nic >= FAB_MAX_NICS || !m->from_inc))
        return -EBADMSG;
    return 0;
}

int fl_wire_recv(int fd, fl_wire *m, bool take_fds, int fds[FL_FDS], int *nfds) {
    union {
        struct cmsghdr align;
        char buf[CMSG_SPACE(FL_FDS * sizeof(int))];
    } c;
    struct iovec v = {m, sizeof *m};
    struct msghdr h = {.msg_iov = &v, .msg_iovlen = 1};
    if (take_fds) {
        h.msg_control = c.buf;
        h.msg_controllen = sizeof c.buf;
    }
    ssize_t r;
    *nfds = 0;
    do r = recvmsg(fd, &h, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    while (r < 0 && errno == EINTR);
    if (r < 0) return errno == EWOULDBLOCK ? -EAGAIN : -errno;
    for (struct cmsghdr *k = take_fds ? CMSG_FIRSTHDR(&h) : NULL; k; k = CMSG_NXTHDR(&h, k)) {
        if (k->cmsg_level != SOL_SOCKET || k->cmsg_type != SCM_RIGHTS) continue;
        int got = (int)((k->cmsg_len - CMSG_LEN(0)) / sizeof(int)), *f = (int *)(void *)CMSG_DATA(k);
        for (int i = 0; i < got; i++)
            if (*nfds < FL_FDS) fds[(*nfds)++] = f[i];
            else close(f[i]);
    }
    bool cut = h.msg_flags & (MSG_TRUNC | MSG_CTRUNC);
    if (r == 0 && *nfds == 0 && !cut) return 0;
    int bad = fl_wire_check(m, (size_t)r, cut);
    if (!bad) return 1;
    fl_close_fds(fds, *nfds);
    *nfds = 0;
    return bad;
}
