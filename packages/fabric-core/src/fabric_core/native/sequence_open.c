/* Sequences, their beginning and end. The rest is in sequence.c. */
#include "sequence.h"

void fab_sequence_free(fab_sequence *s) {
    if (!s) return;
    for (uint32_t i = 0; s->items && i < s->nitems; i++) fab_kept_let_go(&s->items[i].kept);
    pthread_mutex_destroy(&s->mutex);
    free(s->items);
    free(s->ends);
    free((void *)s->seen_ns);
    free((void *)s->posted_ns);
    free((void *)s->lanes);
    free(s);
}

static fab_sequence *sized(const fab_draft *drafts, uint32_t n, uint32_t nsteps) {
    fab_sequence *s = calloc(1, sizeof *s);
    if (!s) return NULL;
    pthread_mutex_init(&s->mutex, NULL);
    s->nsteps = nsteps;
    s->nlanes = 1;
    for (uint32_t i = 0; i < n; i++)
        if (drafts[i].lane < FAB_MAX_LANES && drafts[i].lane >= s->nlanes) s->nlanes = drafts[i].lane + 1;
    s->items = calloc(n ? n : 1, sizeof *s->items);
    s->ends = calloc(nsteps, sizeof *s->ends);
    s->seen_ns = calloc(nsteps, sizeof *s->seen_ns);
    s->posted_ns = calloc(nsteps, sizeof *s->posted_ns);
    s->lanes = calloc(s->nlanes, sizeof *s->lanes);
    if (s->items && s->ends && s->seen_ns && s->posted_ns && s->lanes) return s;
    fab_sequence_free(s);
    return NULL;
}

/* The layers of a chunk have the same page lists: an item shares those of its counterpart in the step before. */
static int fill(fab_sequence *s, const fab_draft *drafts, uint32_t n) {
    uint32_t before = 0, first = 0, step = 0; /* where the step before, and this one, begin */
    for (uint32_t i = 0; i < n; i++) {
        const fab_draft *d = &drafts[i];
        if (d->step >= s->nsteps || d->step < step || d->lane >= s->nlanes) return -EINVAL;
        for (; step < d->step; first = i) {
            before = first;
            s->ends[step++] = i;
        }
        uint32_t like = before + (i - first);
        int rc = fab_draft_keep(s->e, d, like < first ? s->items[like].kept.lists : NULL, &s->items[i].kept);
        if (rc) return rc;
        s->nitems = i + 1; /* of those that are to be let go */
    }
    while (step < s->nsteps) s->ends[step++] = n;
    return 0;
}

fab_sequence *fab_sequence_new(fab_engine *e, const fab_draft *drafts, uint32_t n, uint32_t nsteps, uint64_t word,
                               uint32_t keep, fab_sequence_opened *out) {
    fab_sequence *s = nsteps ? sized(drafts, n, nsteps) : NULL;
    out->rc = s ? 0 : nsteps ? -ENOMEM : -EINVAL;
    if (!s) return NULL;
    s->e = e;
    s->keep = keep;
    if (!out->rc) out->rc = fill(s, drafts, n);
    out->item = s->nitems; /* the one that is wrong, if one is */
    int64_t watch = out->rc ? 0 : fab_watch_open(e, word, fab_sequence_fire, s, &s->watch, &out->word);
    if (watch < 0) out->rc = (int32_t)watch;
    if (out->rc) {
        fab_sequence_free(s);
        return NULL;
    }
    s->watch_id = out->watch = (uint64_t)watch;
    s->word = (_Atomic uint64_t *)(uintptr_t)out->word;
    return s;
}

/* After it nothing is submitted any more, and the word is nobody's. What was submitted goes on. Idempotent. */
int fab_sequence_close(fab_sequence *s) {
    fab_sequence_cancel(s, -1, 0);
    pthread_mutex_lock(&s->mutex);
    bool before = s->closed;
    if (!before) fab_sequence_reap(s);
    for (uint32_t i = 0; !before && i < s->nitems; i++) {
        fab_item *it = &s->items[i];
        if (it->handle && !it->taken) fab_transfer_release(s->e, it->handle);
        it->taken = true;
    }
    s->closed = true;
    pthread_mutex_unlock(&s->mutex);
    if (before) return 0;
    fab_watch_close(s->e, s->watch_id);
    fab_watch_settle(s->e); /* the watcher's thread may have found it open just now */
    return 1;
}
