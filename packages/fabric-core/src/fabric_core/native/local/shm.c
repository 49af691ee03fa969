/* shm.c - shared memory objects: sealed memfds, mapped at most once per process.
 *
 * Once per process, because two engines of one process then meet in the same addresses: it saves memory, and it lets
 * ThreadSanitizer see what they do to each other. Objects are told apart by a random number in their first bytes.
 */
#include "local_int.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#define SEALS \
    (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) /* a peer that shrinks an object would kill its readers with SIGBUS */

static pthread_mutex_t shm_mu = PTHREAD_MUTEX_INITIALIZER;
static fl_shm *shm_list;

int fl_random(void *buf, size_t n) { return getrandom(buf, n, 0) == (ssize_t)n ? 0 : -EIO; }

static void link_in(fl_shm *s) {
    s->refs = 1;
    s->pid = getpid();
    s->next = shm_list;
    shm_list = s;
}

int fl_shm_create(const char *name, size_t size, fl_shm **out, int *fd_out) {
    fl_shm *s = calloc(1, sizeof *s);
    if (!s) return -ENOMEM;
    int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING), err = 0;
    s->at = MAP_FAILED;
    if (fd < 0 || ftruncate(fd, (off_t)size) || fcntl(fd, F_ADD_SEALS, SEALS)) err = -errno;
    else if ((s->at = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0)) == MAP_FAILED) err = -errno;
    else err = fl_random(s->uuid, sizeof s->uuid);
    if (err) {
        if (s->at != MAP_FAILED) munmap(s->at, size);
        if (fd >= 0) close(fd);
        free(s);
        return err;
    }
    *(fl_shm_head *)s->at = (fl_shm_head){{s->uuid[0], s->uuid[1]}, FL_MAGIC, FL_VERSION, size};
    s->size = size;
    s->own = true;
    pthread_mutex_lock(&shm_mu);
    link_in(s);
    pthread_mutex_unlock(&shm_mu);
    *out = s;
    *fd_out = fd;
    return 0;
}

int fl_shm_attach(int fd, size_t size, bool writable, fl_shm **out) {
    struct stat st;
    int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || !(seals & F_SEAL_SHRINK) || fstat(fd, &st) || (uint64_t)st.st_size != size) return -EPROTO;
    void *at = mmap(NULL, size, PROT_READ | (writable ? PROT_WRITE : 0), MAP_SHARED, fd, 0);
    if (at == MAP_FAILED) return -errno;
    fl_shm_head h = *(fl_shm_head *)at;
    if (h.magic != FL_MAGIC || h.version != FL_VERSION || h.size != size) {
        munmap(at, size);
        return -EPROTO;
    }
    pthread_mutex_lock(&shm_mu);
    /* The pid: after a fork the list still holds the parent's objects, which are not this process's business. */
    for (fl_shm *s = shm_list; s; s = s->next)
        if (s->uuid[0] == h.uuid[0] && s->uuid[1] == h.uuid[1] && s->size == size && s->pid == getpid()) {
            s->refs++;
            pthread_mutex_unlock(&shm_mu);
            munmap(at, size);
            *out = s;
            return 0;
        }
    fl_shm *s = calloc(1, sizeof *s);
    if (s) {
        *s = (fl_shm){.at = at, .size = size, .uuid = {h.uuid[0], h.uuid[1]}};
        link_in(s);
    }
    pthread_mutex_unlock(&shm_mu);
    if (!s) {
        munmap(at, size);
        return -ENOMEM;
    }
    *out = s;
    return 0;
}

void fl_shm_put(fl_shm *s) {
    if (!s) return;
    pthread_mutex_lock(&shm_mu);
    bool last = --s->refs == 0;
    if (last)
        for (fl_shm **p = &shm_list; *p; p = &(*p)->next)
            if (*p == s) {
                *p = s->next;
                break;
            }
    pthread_mutex_unlock(&shm_mu);
    if (last) {
        munmap(s->at, s->size);
        free(s);
    }
}
