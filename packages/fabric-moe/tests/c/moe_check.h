/* A check that ends the program, and says where. */
#ifndef MOE_CHECK_H
#define MOE_CHECK_H

#include <stdio.h>
#include <stdlib.h>

#define CHECK(cond)                                                    \
    do {                                                               \
        if (!(cond)) {                                                 \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #cond); \
            abort();                                                   \
        }                                                              \
    } while (0)

#endif
