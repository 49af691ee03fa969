/* sock.c - the directory of sockets and the claim of a name in it. */
#include "local_int.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

/* Whoever can put sockets here can pose as a peer: the directory must be ours and closed to all others. */
int fl_check_dir(const char *dir, char *err, size_t cap) {
    struct stat st;
    if (mkdir(dir, 0700) && errno != EEXIST) {
        int e = errno;
        snprintf(err, cap, "cannot make the socket directory %s: %s", dir, strerror(e));
        return -e;
    }
    if (lstat(dir, &st)) {
        int e = errno;
        snprintf(err, cap, "cannot look at the socket directory %s: %s", dir, strerror(e));
        return -e;
    }
    const char *why = !S_ISDIR(st.st_mode)     ? "is not a directory (or is a symbolic link)"
                      : st.st_uid != geteuid() ? "belongs to another user"
                      : st.st_mode & 077       ? "is open to others; name a directory of your own (mode 0700)"
                                               : NULL;
    if (why) snprintf(err, cap, "the socket directory %s %s", dir, why);
    return !why ? 0 : S_ISDIR(st.st_mode) ? -EACCES : -ENOTDIR;
}

static int lock_dir(const char *dir) {   /* two that start at once must not both find the name free */
    char p[128];
    snprintf(p, sizeof p, "%s/.lock", dir);
    int fd = open(p, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0) return -errno;
    for (int i = 0; flock(fd, LOCK_EX | LOCK_NB); i++) {
        if ((errno != EWOULDBLOCK && errno != EINTR) || i == 400) {
            close(fd);
            return i == 400 ? -ETIMEDOUT : -errno;
        }
        nanosleep(&(struct timespec){0, 5000000}, NULL);
    }
    return fd;
}

/* 1: somebody listens at a, 0: nobody does. */
static int somebody(const struct sockaddr_un *a) {
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) return -errno;
    int r = connect(fd, (const struct sockaddr *)a, sizeof *a) == 0 ? 1
            : errno == ECONNREFUSED || errno == ENOENT              ? 0
                                                                    : 1;
    close(fd);
    return r;
}

int fl_claim(struct fab_local_node *n, char *err, size_t cap) {
    struct sockaddr_un a = {.sun_family = AF_UNIX}, tmp = {.sun_family = AF_UNIX};
    struct stat st = {0};
    /* The temporary name is as long as the final one can be short: check both against the 108 bytes of a socket path. */
    int len = snprintf(a.sun_path, sizeof a.sun_path, "%s/%s.sock", n->dir, n->name);
    int tlen = snprintf(tmp.sun_path, sizeof tmp.sun_path, "%s/.%016llx", n->dir, (unsigned long long)n->inc);
    if (len >= (int)sizeof a.sun_path || tlen >= (int)sizeof tmp.sun_path) {
        snprintf(err, cap, "the socket path %s/%s.sock is longer than %zu bytes; choose a shorter local_dir or name",
                 n->dir, n->name, sizeof a.sun_path - 1);
        return -ENAMETOOLONG;
    }
    int lock = lock_dir(n->dir), e = 0;
    if (lock < 0) {
        snprintf(err, cap, "cannot lock %s/.lock: %s", n->dir, strerror(-lock));
        return lock;
    }
    n->lfd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    int used = n->lfd < 0 ? -errno : somebody(&a);
    if (used < 0) e = used;
    else if (used) e = -EADDRINUSE;
    else if (bind(n->lfd, (struct sockaddr *)&tmp, sizeof tmp)) e = -errno;
    else if (chmod(tmp.sun_path, 0600) || listen(n->lfd, 512) || stat(tmp.sun_path, &st) ||
             rename(tmp.sun_path, a.sun_path)) {
        e = -errno;             /* listening before it gets its name: nobody finds a socket that refuses */
        unlink(tmp.sun_path);
    }
    close(lock);
    if (e) {
        if (e == -EADDRINUSE)
            snprintf(err, cap, "the name %s is already in use in %s by a living process", n->name, n->dir);
        else snprintf(err, cap, "cannot listen at %s: %s", a.sun_path, strerror(-e));
        return e;
    }
    n->path_dev = st.st_dev;
    n->path_ino = st.st_ino;
    snprintf(n->path, sizeof n->path, "%s", a.sun_path);
    return 0;
}
