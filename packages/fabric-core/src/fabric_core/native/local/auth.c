/* auth.c - what a handshake proves: that both sides hold the job's secret, and mean the same conversation.
 *
 * A proof is an HMAC over everything both sides said (fl_script) under a label for its direction: a recorded one is void
 * because of the nonces, one's own sent back because of the label, one of another conversation because of names,
 * incarnations, NICs and processes.
 */
#include "wire.h"

#include <sys/stat.h>
#include <unistd.h>

_Static_assert(sizeof(fl_script) == 72 + 2 * (FL_NAME_MAX + 8) + 2 * FL_NONCE, "what is signed has no padding");
static const char *const labels[2] = {"fabric local 2: connector", "fabric local 2: acceptor"};

static void say(fl_script *s, int side, const fl_wire *m) {
    s->inc[side] = m->from_inc;
    s->flags[side] = m->flags;
    s->pid[side] = m->pid;
    s->pid_ns[side] = m->pid_ns;
    memcpy(s->nonce[side], m->nonce, FL_NONCE);
}

static void name(fl_script *s, int side, const char *text) {
    memset(s->name[side], 0, sizeof s->name[side]);
    memcpy(s->name[side], text, strnlen(text, FL_NAME_MAX));
}

void fl_script_begin(fl_script *s, const fl_wire *hello, const char *to_name) {
    memset(s, 0, sizeof *s);
    s->version = hello->version;
    s->want_inc = hello->to_inc;
    s->nic[0] = hello->from_nic;
    s->nic[1] = hello->to_nic;
    say(s, 0, hello);
    name(s, 0, hello->from_name);
    name(s, 1, to_name);
}

void fl_script_answer(fl_script *s, const fl_wire *challenge) { say(s, 1, challenge); }

void fl_prove(const struct fab_local_node *n, const fl_script *s, bool acceptor, uint8_t mac[FAB_SHA256_BYTES]) {
    memset(mac, 0, FAB_SHA256_BYTES);
    if (!n->has_key) return;
    fab_hmac h;
    fab_hmac_init(&h, n->key, sizeof n->key);
    fab_hmac_add(&h, labels[acceptor], strlen(labels[acceptor]) + 1);
    fab_hmac_add(&h, s, sizeof *s);
    fab_hmac_end(&h, mac);
}

int fl_verify(const struct fab_local_node *n, const fl_script *s, bool acceptor, const fl_wire *m) {
    if (s->flags[0] != s->flags[1]) return -EACCES;
    if (!n->has_key) return 0;
    uint8_t want[FAB_SHA256_BYTES];
    fl_prove(n, s, acceptor, want);
    return fab_mac_equal(want, m->mac) ? 0 : -EACCES;
}

/* A pid means something only within its namespace, so that is signed beside it. 0: unknown, nothing is compared. */
static uint64_t pid_namespace(void) {
    struct stat st;
    return stat("/proc/self/ns/pid", &st) ? 0 : (uint64_t)st.st_ino;
}

void fl_sign_process(fl_wire *m) {
    m->pid = getpid();
    m->pid_ns = pid_namespace();
}

bool fl_same_process(const fl_wire *m, pid_t seen) {
    uint64_t ns = pid_namespace();
    return !ns || m->pid_ns != ns || m->pid == seen;
}
