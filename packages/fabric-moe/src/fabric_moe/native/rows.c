/* Loops over rows. Built with -ffp-contract=off: a product that is fused into its sum would have other bits than numpy's and
 * torch's, and the order of roundings is part of the contract (combine.py). */
#include "cdef_moe.h"

#include <string.h>

void moe_rows(uint8_t *dst, size_t dst_stride, const uint8_t *src, size_t src_stride, const int64_t *index, size_t rows,
              size_t bytes) {
    for (size_t i = 0; i < rows; i++, dst += dst_stride) {
        if (index[i] < 0) memset(dst, 0, bytes);
        else memcpy(dst, src + (size_t)index[i] * src_stride, bytes);
    }
}

static inline float from_bf16(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint16_t to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16; /* to nearest, ties to even */
    return (bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : (uint16_t)rounded; /* rounding may carry a NaN into a number */
}

static void add(float *restrict acc, const uint8_t *restrict row, int type, size_t n) {
    if (type == MOE_BF16) {
        const uint16_t *halves = (const uint16_t *)(const void *)row;
        for (size_t h = 0; h < n; h++) acc[h] += from_bf16(halves[h]);
    } else {
        const float *values = (const float *)(const void *)row;
        for (size_t h = 0; h < n; h++) acc[h] += values[h];
    }
}

static void add_times(float *restrict acc, const uint8_t *restrict row, int type, size_t n, float weight) {
    if (type == MOE_BF16) {
        const uint16_t *halves = (const uint16_t *)(const void *)row;
        for (size_t h = 0; h < n; h++) acc[h] += weight * from_bf16(halves[h]);
    } else {
        const float *values = (const float *)(const void *)row;
        for (size_t h = 0; h < n; h++) acc[h] += weight * values[h];
    }
}

static void put(uint8_t *restrict out, const float *restrict acc, int type, size_t n) {
    if (type == MOE_BF16) {
        uint16_t *halves = (uint16_t *)(void *)out;
        for (size_t h = 0; h < n; h++) halves[h] = to_bf16(acc[h]);
    } else {
        memcpy(out, acc, n * sizeof *acc);
    }
}

static size_t size_of(int type) { return type == MOE_BF16 ? 2 : 4; }

void moe_weigh(const uint8_t *y, int from, size_t hidden, const int64_t *at, const float *weights, size_t rows,
               size_t k, float *acc, uint8_t *out, size_t out_stride, int to) {
    size_t width = hidden * size_of(from);
    for (size_t i = 0; i < rows; i++, out += out_stride) {
        memset(acc, 0, hidden * sizeof *acc);
        for (size_t j = 0; j < k; j++) {
            int64_t row = at[i * k + j];
            if (row < 0) continue;
            if (weights) add_times(acc, y + (size_t)row * width, from, hidden, weights[i * k + j]);
            else add(acc, y + (size_t)row * width, from, hidden);
        }
        put(out, acc, to, hidden);
    }
}

void moe_reduce(const uint8_t *base, const int64_t *at, size_t rows, size_t fan, size_t hidden, int from, float *acc,
                uint8_t *out, int to, int accumulate) {
    for (size_t i = 0; i < rows; i++, out += hidden * size_of(to)) {
        memset(acc, 0, hidden * sizeof *acc);
        for (size_t j = 0; j < fan && at[i * fan + j] >= 0; j++) add(acc, base + at[i * fan + j], from, hidden);
        if (accumulate) add(acc, out, to, hidden);
        put(out, acc, to, hidden);
    }
}
