/* What Python calls: loops over rows of bytes and of numbers. Nothing here allocates, blocks or keeps a pointer. */
#ifndef FABRIC_MOE_CDEF_H
#define FABRIC_MOE_CDEF_H

#include <stddef.h>
#include <stdint.h>

/* cdef-begin */
enum { MOE_BF16 = 0, MOE_F32 = 1 };

/* dst row i = src row index[i], `bytes` long; zeros where the index is negative. */
void moe_rows(uint8_t *dst, size_t dst_stride, const uint8_t *src, size_t src_stride, const int64_t *index, size_t rows,
              size_t bytes);

/* out row i = the sum over j of weights[i][j] * y[at[i][j]], rounded to `to`; at < 0 is left out. In the order of j, from
 * zero, product and sum rounded apart. weights NULL: without them. acc: room for `hidden` floats. */
void moe_weigh(const uint8_t *y, int from, size_t hidden, const int64_t *at, const float *weights, size_t rows,
               size_t k, float *acc, uint8_t *out, size_t out_stride, int to);

/* out row i = the sum over j of the row of type `from` that begins at byte at[i][j] of `base`; a negative one ends the
 * list. accumulate: then what is in out is added. */
void moe_reduce(const uint8_t *base, const int64_t *at, size_t rows, size_t fan, size_t hidden, int from, float *acc,
                uint8_t *out, int to, int accumulate);
/* cdef-end */

#endif
