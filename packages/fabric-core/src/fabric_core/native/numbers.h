/* numbers.h - lists of page numbers. */
#ifndef FAB_NUMBERS_H
#define FAB_NUMBERS_H

#include <stdint.h>

/* Copies every `step`th of a list, `n` in all. Returns the greatest. */
static inline uint32_t fab_take_numbers(uint32_t *to, const uint32_t *from, uint32_t n, uint32_t step) {
    uint32_t most[4] = {0}, i = 0; /* four at a time, so that one comparison need not wait for the one before */
    for (; step == 1 && n - i >= 4; i += 4)
        for (uint32_t k = 0; k < 4; k++) {
            to[i + k] = from[i + k];
            most[k] = to[i + k] > most[k] ? to[i + k] : most[k];
        }
    for (; i < n; i++) {
        to[i] = from[(uint64_t)i * step];
        most[0] = to[i] > most[0] ? to[i] : most[0];
    }
    for (uint32_t k = 1; k < 4; k++) most[0] = most[k] > most[0] ? most[k] : most[0];
    return most[0];
}

#endif
