/* channel.h - the memory that one sending NIC shares with one receiving NIC.
 *
 * Made by the sender, passed as a sealed memfd. Three single-producer single-consumer rings: immediates, messages, and
 * bounce chunks. A message that waits for a posted receive therefore never holds up an immediate.
 * Nothing read from here is trusted: cursors and lengths are checked before use, what the producer needs later it keeps
 * in its own memory.
 *
 * Orderings. A producer writes entries, then stores the tail; the consumer loads the tail with acquire and finds them.
 * The consumer reads entries, then stores the head; the producer loads the head with acquire before it writes over them.
 * Tails and heads are stored seq_cst and not just release because of the sleep protocol: the one that publishes then
 * loads "does the other sleep?", and the one that goes to sleep stores "I sleep", then loads the cursor. With all four
 * seq_cst at least one of them sees the other (no fence needed, so ThreadSanitizer understands it).
 */
#ifndef FAB_LOCAL_CHANNEL_H
#define FAB_LOCAL_CHANNEL_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define FL_MAGIC 0x6c6f6366u
#define FL_VERSION 4u

/* ---- shared memory objects (shm.c) --- */
typedef struct fl_shm_head {
    uint64_t uuid[2];
    uint32_t magic, version;
    uint64_t size;
} fl_shm_head;
typedef struct fl_shm {
    struct fl_shm *next;
    void *at;
    size_t size;
    uint64_t uuid[2];
    uint32_t refs;
    pid_t pid;
    bool own;                /* made by this process */
} fl_shm;
int fl_shm_create(const char *name, size_t size, fl_shm **out, int *fd);
int fl_shm_attach(int fd, size_t size, bool writable, fl_shm **out);
void fl_shm_put(fl_shm *s);
int fl_random(void *buf, size_t n);

/* ---- the channel --- */
#define FL_IMMS 8192u
#define FL_IMM_RUN 65536u                /* the most that one entry stands for */
#define FL_UNIT 64u                      /* records start and end on these */
enum { FL_MSG, FL_BNC, FL_RINGS };
#define FL_MSG_BYTES (256u << 10)
#define FL_BNC_BYTES (1u << 20)          /* the memfd is sparse: without bounce this costs nothing */
#define FL_MAX_SEND (64u << 10)
#define FL_CHUNK (64u << 10)

typedef struct fl_chan {
    fl_shm_head head;
    _Alignas(64) _Atomic uint64_t imm_tail;        /* sender's line */
    _Atomic uint64_t rec_tail[FL_RINGS];
    _Alignas(64) _Atomic uint64_t imm_head;        /* receiver's line */
    _Atomic uint64_t rec_head[FL_RINGS];
    _Alignas(64) _Atomic uint64_t want; /* sender sleeps and waits for a head to move: number of its sleep, or 0 */
    _Alignas(64) _Atomic uint64_t busy; /* sender: odd while it writes into registered memory */
    _Atomic uint64_t fly_begun,
        fly_ended; /* sender: number of its last copy by a GPU, and up to which all have ended */
    _Alignas(64) uint64_t imm[FL_IMMS]; /* how many in a row << 32 | which */
    _Alignas(4096) uint8_t msg[FL_MSG_BYTES];
    _Alignas(4096) uint8_t bnc[FL_BNC_BYTES];
} fl_chan;

enum {
    FL_REC_READY,
    FL_REC_TAKEN,
    FL_REC_WITHDRAWN
}; /* both sides leave READY by compare-and-swap: exactly one wins */
enum { FL_REC_PAD = 1u, FL_REC_IMM = 2u };
typedef struct fl_rec {
    uint32_t total, len; /* with header and padding; payload */
    uint64_t addr, key; /* bounce: where to */
    uint32_t imm, flags;
    _Atomic uint32_t state;
    int32_t status; /* the receiver's answer, written before it moves the head */
    uint8_t reserved[24];
} fl_rec;
_Static_assert(sizeof(fl_rec) == FL_UNIT, "a record's header is one unit");

struct fl_slot;
typedef struct fl_owner {
    struct fl_slot *slot;
    uint32_t total;
} fl_owner; /* sender's own memory of a record */

typedef struct fl_side { /* one side's private view of one ring */
    _Atomic uint64_t *tail_p, *head_p;
    uint8_t *data;
    uint64_t size; /* bytes, or entries of the immediate ring */
    uint64_t tail, head; /* own cursor, and the last that was seen of the other's */
    uint64_t reap; /* sender: records before this were accounted for */
    fl_owner *owner; /* sender: size / FL_UNIT entries */
} fl_side;

void fl_chan_views(fl_chan *ch, fl_side *imm, fl_side rec[FL_RINGS]);

/* Sender. Room for immediates; a head that makes no sense counts as no room. */
static inline uint64_t fl_imm_room(fl_side *s, uint64_t need) {
    if (s->size - (s->tail - s->head) < need) {
        uint64_t h =
            atomic_load_explicit(s->head_p, memory_order_seq_cst); /* acquire; seq_cst for the sleep protocol */
        if (s->tail - h <= s->size) s->head = h;
    }
    return s->size - (s->tail - s->head);
}
/* `count` times the same, at most FL_IMM_RUN: one entry, for which there must be room. Joined with the one before, if that is not
 * published and `merge`. */
void fl_imm_put(fl_side *s, uint32_t imm, uint32_t count, bool merge);
void fl_imm_publish(fl_side *s);
fl_rec *fl_rec_reserve(fl_side *s, uint32_t len); /* NULL: full */
void fl_rec_publish(fl_side *s, uint32_t len, struct fl_slot *owner); /* the record just reserved, same len */
bool fl_rec_fits(fl_side *s, uint32_t len);
/* Receiver: bytes or entries that wait; UINT64_MAX: the cursor makes no sense. */
static inline uint64_t fl_avail(fl_side *s) {
    s->tail = atomic_load_explicit(
        s->tail_p, memory_order_seq_cst); /* acquire: entries before it are visible; seq_cst: sleep protocol */
    uint64_t n = s->tail - s->head;
    return n <= s->size ? n : UINT64_MAX;
}
/* The first record, with its lengths as they were checked (they are shared: read once). NULL: makes no sense. */
fl_rec *fl_rec_front(fl_side *s, uint64_t avail, uint32_t *total, uint32_t *len);

#endif
