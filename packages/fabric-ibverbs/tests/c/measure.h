/* What the programs that measure share. */
#ifndef VERBS_MEASURE_H
#define VERBS_MEASURE_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

static inline void die(const char *what, long rc) {
    fprintf(stderr, "%s: %ld\n", what, rc);
    exit(1);
}

static inline int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static inline double median(double *v, uint32_t n) {
    qsort(v, n, sizeof *v, by_value);
    return v[n / 2];
}

#endif
