/* What providers said of errors, in their own words: they are all that tells one EIO from another. Kept for the whole
 * process, since who asks (an exception that is being made) holds no lock of ours; the oldest give way. */
#include "efa_int.h"

#include <stdio.h>

#define KEPT 64u

typedef struct words {
    char nic[FE_ADDRESS], peer[FE_ADDRESS];
    int32_t status;
    char text[FE_WORDS];
} words;

static words kept[KEPT];
static uint64_t said; /* so many so far: the newest is the one before */
static pthread_mutex_t mu = PTHREAD_MUTEX_INITIALIZER;

void fe_words_keep(const char *nic, const char *peer, int32_t status, const char *text) {
    pthread_mutex_lock(&mu);
    words *w = &kept[said++ % KEPT];
    snprintf(w->nic, sizeof w->nic, "%s", nic);
    snprintf(w->peer, sizeof w->peer, "%s", peer);
    snprintf(w->text, sizeof w->text, "%s", text);
    w->status = status;
    pthread_mutex_unlock(&mu);
}

int fab_efa_words(const char *nic, const char *peer, int status, char *buf, uint32_t cap) {
    int n = 0;
    if (cap) buf[0] = 0;
    pthread_mutex_lock(&mu);
    for (uint64_t k = said; k && said - k < KEPT && !n; k--) {
        const words *w = &kept[(k - 1) % KEPT];
        if ((!status || w->status == status) && (!*nic || !strcmp(w->nic, nic)) && (!*peer || strstr(peer, w->peer)))
            n = snprintf(buf, cap, "%s", w->text);
    }
    pthread_mutex_unlock(&mu);
    return n;
}
