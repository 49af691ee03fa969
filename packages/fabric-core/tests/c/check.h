/* A check that says where and what, for small C test programs: exit 0 passed, 1 failed, 77 skipped. */
#ifndef FAB_TEST_CHECK_H
#define FAB_TEST_CHECK_H
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#define CHECK(cond, ...)                                               \
    do {                                                               \
        if (!(cond)) {                                                 \
            fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #cond); \
            fprintf(stderr, " " __VA_ARGS__);                          \
            fputc('\n', stderr);                                       \
            exit(1);                                                   \
        }                                                              \
    } while (0)
static inline uint32_t xorshift(uint32_t *state) {
    uint32_t x = *state;
    x ^= x << 13;
    x ^= x >> 17;
    x ^= x << 5;
    return *state = x;
}
#endif
