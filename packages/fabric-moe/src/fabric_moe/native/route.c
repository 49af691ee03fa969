/* Who goes where: the rows of a step by rank and token, and their packing. routing.py says what the lists mean, and does the same
 * in numpy. */
#include "cdef_moe.h"

#include <string.h>

enum { MOST = 1024 }; /* experts of a token: config.py's limit */

/* The ranks of a token's experts, ascending, each once. The first `more` ranks hold each + 1 experts, the others `each`. */
static size_t ranks_of(const int32_t *ids, size_t k, uint32_t each, uint32_t more, uint32_t *list) {
    size_t n = 0;
    uint32_t wide = more * (each + 1);
    for (size_t j = 0; j < k; j++) {
        if (ids[j] < 0) continue;
        uint32_t e = (uint32_t)ids[j], rank = e < wide ? e / (each + 1) : more + (e - wide) / each;
        size_t at = n;
        while (at && list[at - 1] > rank) at--;
        if (at && list[at - 1] == rank) continue;
        memmove(&list[at + 1], &list[at], (n - at) * sizeof *list);
        list[at] = rank;
        n++;
    }
    return n;
}

int64_t moe_route(int32_t *ids, size_t tokens, size_t k, uint32_t experts, uint32_t ranks, const uint8_t *alive,
                  int64_t *starts, int64_t *token, int64_t *turn) {
    uint32_t list[MOST], each = experts / ranks, more = experts % ranks, wide = more * (each + 1);
    int64_t away = 0;
    if (k > MOST) return -1;
    memset(starts, 0, (ranks + 1) * sizeof *starts);
    for (size_t t = 0; t < tokens; t++) {
        int32_t *mine = ids + t * k;
        for (size_t j = 0; j < k; j++) {
            if (mine[j] < 0) continue;
            uint32_t e = (uint32_t)mine[j];
            if (e >= experts) return -1;
            if (alive[e < wide ? e / (each + 1) : more + (e - wide) / each]) continue;
            mine[j] = -1;
            away++;
        }
        size_t n = ranks_of(mine, k, each, more, list);
        for (size_t i = 0; i < n; i++) starts[list[i] + 1]++;
    }
    for (uint32_t r = 0; r < ranks; r++) starts[r + 1] += starts[r];
    for (size_t t = 0; t < tokens; t++) { /* starts[r] walks to where r + 1 begins */
        size_t n = ranks_of(ids + t * k, k, each, more, list);
        for (size_t i = 0; i < n; i++) {
            int64_t row = starts[list[i]]++;
            token[row] = (int64_t)t;
            turn[row] = (int64_t)i;
        }
    }
    memmove(starts + 1, starts, ranks * sizeof *starts);
    starts[0] = 0;
    return away;
}

void moe_pack(uint8_t *rows, size_t row_bytes, const int64_t *index, size_t n, const moe_field *fields, size_t nfields,
              size_t stamp_at, uint32_t stamp) {
    for (size_t i = 0; i < n; i++, rows += row_bytes) {
        for (size_t f = 0; f < nfields; f++)
            memcpy(rows + fields[f].at, fields[f].src + (size_t)index[i] * fields[f].stride, fields[f].bytes);
        memcpy(rows + stamp_at, &stamp, sizeof stamp);
    }
}
