/* What this machine can do at most, measured in the same run as a benchmark: the figure to stand beside ours.
 *
 * Both walk as much memory as the benchmark does. The first is the best copy a core can make here, with the stores
 * that suit it; the second is the kernel's copy between processes (here: to ourselves, which costs the same walk). */
#include "engine_internal.h"
#include "local/local_int.h"

#include <sys/mman.h>
#include <sys/uio.h>

enum { PLAIN, STREAM, KERNEL };

static double walk(uint64_t piece, uint64_t span, double seconds, int how) {
    if (!piece || piece > span) return -1;
    char *map = mmap(NULL, 2 * span, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (map == MAP_FAILED) return -1;
    memset(map, 1, span);
    char *from = map, *to = map + span;
    uint64_t at = 0, bytes = 0, start = fab_now(), now = start, until = start + (uint64_t)(seconds * 1e9);
    bool failed = false;
    while (now < until && !failed) {
        for (uint64_t done = 0; done < (4u << 20) && !failed; done += piece) {
            if (at + piece > span) at = 0;
            if (how == KERNEL) {
                struct iovec l = {from + at, piece}, r = {to + at, piece};
                failed = process_vm_writev(getpid(), &l, 1, &r, 1, 0) != (ssize_t)piece;
            } else {
                fl_copy(to + at, from + at, piece, how == STREAM);
                if (how == STREAM) fl_copy_fence();
            }
            at += piece;
            bytes += piece;
        }
        now = fab_now();
    }
    munmap(map, 2 * span);
    return failed ? -1 : (double)bytes * 1e9 / (double)(now - start);
}

double fab_limit_stream(uint64_t bytes, uint64_t span, double seconds) {
    double plain = walk(bytes, span, seconds / 2, PLAIN), stream = walk(bytes, span, seconds / 2, STREAM);
    return plain > stream ? plain : stream;
}

double fab_limit_cma(uint64_t bytes, uint64_t span, double seconds) { return walk(bytes, span, seconds, KERNEL); }

const char *fab_build_info(void) {
    return "gcc " __VERSION__
#ifdef __OPTIMIZE__
           ", optimised"
#else
           ", not optimised"
#endif
#ifdef __SANITIZE_ADDRESS__
           ", AddressSanitizer"
#endif
#ifdef __SANITIZE_THREAD__
           ", ThreadSanitizer"
#endif
        ;
}
