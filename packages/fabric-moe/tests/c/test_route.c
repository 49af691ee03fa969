/* The plan of a step and its packing, in memory that is exactly as large as the header says, against what is easy to see.
 * usage: test_route [seed] */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cdef_moe.h"
#include "moe_check.h"

static uint32_t state;

static uint32_t below(uint32_t n) {
    state ^= state << 13, state ^= state >> 17, state ^= state << 5;
    return state % n;
}

/* The first experts % ranks ranks hold one more. */
static uint32_t owner(uint32_t expert, uint32_t experts, uint32_t ranks) {
    for (uint32_t r = 0, end = 0;; r++) {
        end += experts / ranks + (r < experts % ranks);
        if (expert < end) return r;
    }
}

static void plan(void) {
    uint32_t ranks = 1 + below(9), experts = 1 + below(30), k = 1 + below(6), tokens = below(12);
    uint32_t most = tokens * (k < ranks ? k : ranks);
    int32_t *ids = malloc(tokens * k * sizeof *ids);
    int64_t *starts = malloc((ranks + 1) * sizeof *starts), *token = malloc(most * sizeof *token),
            *turn = malloc(most * sizeof *turn), row = 0, away = 0;
    uint8_t *alive = malloc(ranks), *src = malloc(tokens * 7), *rows = malloc(most * 16);
    for (uint32_t r = 0; r < ranks; r++) alive[r] = below(4) > 0;
    for (uint32_t i = 0; i < tokens * k; i++) {
        ids[i] = (int32_t)below(experts + 1) - 1;
        away += ids[i] >= 0 && !alive[owner((uint32_t)ids[i], experts, ranks)];
    }
    for (uint32_t i = 0; i < tokens * 7; i++) src[i] = (uint8_t)below(256);
    CHECK(moe_route(ids, tokens, k, experts, ranks, alive, starts, token, turn) == away);
    for (uint32_t r = 0; r < ranks; r++) {
        CHECK(starts[r] == row);
        for (uint32_t t = 0; t < tokens; t++) {
            bool here = false;
            uint64_t before = 0; /* one bit for each rank below that the token goes to */
            for (uint32_t j = 0; j < k; j++) {
                if (ids[t * k + j] < 0) continue;
                uint32_t to = owner((uint32_t)ids[t * k + j], experts, ranks);
                CHECK(alive[to]);
                here = here || to == r;
                if (to < r) before |= UINT64_C(1) << to;
            }
            if (!here) continue;
            CHECK(token[row] == t && turn[row] == __builtin_popcountll(before));
            row++;
        }
    }
    CHECK(starts[ranks] == row);
    const moe_field fields[] = {{src, 7, 4, 0}, {src + 4, 7, 3, 8}};
    moe_pack(rows, 16, token, (size_t)row, fields, 2, 12, 0xABCD);
    for (int64_t i = 0; i < row; i++) {
        uint32_t stamp;
        memcpy(&stamp, rows + i * 16 + 12, 4);
        CHECK(stamp == 0xABCD && !memcmp(rows + i * 16, src + token[i] * 7, 4));
        CHECK(!memcmp(rows + i * 16 + 8, src + token[i] * 7 + 4, 3));
    }
    void *all[] = {ids, starts, token, turn, alive, src, rows};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

int main(int argc, char **argv) {
    state = argc > 1 ? (uint32_t)strtoul(argv[1], NULL, 10) * 7919u + 1u : 1u;
    for (int i = 0; i < 3000; i++) plan();
    int32_t wrong[] = {0, 5};
    int64_t starts[3], token[2], turn[2];
    CHECK(moe_route(wrong, 1, 2, 5, 2, (const uint8_t[]){1, 1}, starts, token, turn) == -1);
    puts("ok");
    return 0;
}
