/* gpu_mem.c - making memory reachable for the GPU: pinning host memory, opening a peer's allocations. Set-up, never on the
 * hot path; any thread. */
#include "local_int.h"

#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

/* Pins overlap when one array is registered twice. The driver refuses the second, and the first one's end would take the
 * memory from under the second: so a pin is shared by all registrations that lie in it. */
struct fl_pin {
    struct fl_pin *next;
    uint64_t addr, len;
    uint32_t refs;
};

static pthread_mutex_t pins_mu = PTHREAD_MUTEX_INITIALIZER;
static struct fl_pin *pins;

struct fl_pin *fl_pin(int device, uint64_t addr, uint64_t len) {
    fc_entered e;
    pthread_mutex_lock(&pins_mu);
    struct fl_pin *p = pins;
    while (p && !(p->addr <= addr && addr - p->addr <= p->len && len <= p->len - (addr - p->addr))) p = p->next;
    if (p) {
        p->refs++;
    } else if ((p = malloc(sizeof *p)) != NULL) {
        int r = fc_enter(device, &e);
        if (!r) {
            r = fc_errno(fc_driver()->host_register((void *)(uintptr_t)addr, len, FC_HOST_PORTABLE | FC_HOST_DEVICEMAP),
                         "cuMemHostRegister");
            fc_leave(&e);
        }
        if (r) {
            free(p);
            p = NULL;
        } else {
            *p = (struct fl_pin){pins, addr, len, 1};
            pins = p;
        }
    }
    pthread_mutex_unlock(&pins_mu);
    return p;
}

bool fl_pins_meet(uint64_t addr, uint64_t len) {
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE) - 1, end = (addr + len + page) & ~page;
    bool meet = false;
    pthread_mutex_lock(&pins_mu);
    for (const struct fl_pin *p = pins; p && !meet; p = p->next)
        meet = p->addr < end && (addr & ~page) < ((p->addr + p->len + page) & ~page);
    pthread_mutex_unlock(&pins_mu);
    return meet;
}

void fl_unpin(int device, struct fl_pin *pin) {
    fc_entered e;
    if (!pin) return;
    pthread_mutex_lock(&pins_mu);
    if (--pin->refs == 0) {
        for (struct fl_pin **p = &pins; *p; p = &(*p)->next)
            if (*p == pin) {
                *p = pin->next;
                break;
            }
        if (!fc_enter(device, &e)) {
            fc_driver()->host_unregister((void *)(uintptr_t)pin->addr);
            fc_leave(&e);
        }
        free(pin);
    }
    pthread_mutex_unlock(&pins_mu);
}

/* Not every allocation has a handle: torch's expandable segments and other mapped memory do not. */
bool fl_gpu_export(int device, uint64_t addr, uint64_t len, fc_ipc *out, uint64_t *off) {
    fc_entered e;
    uint64_t base = 0;
    size_t size = 0;
    if (fc_enter(device, &e)) return false;
    bool ok = !fc_driver()->address_range(&base, &size, addr) && addr - base + len <= size &&
              !fc_driver()->ipc_get(out, base);
    fc_leave(&e);
    *off = addr - base;
    return ok;
}

int fl_gpu_map(int device, fl_map *m, const fc_ipc *ipc, uint64_t off, uint64_t len) {
    fc_entered e;
    uint64_t base = 0;
    if (device < 0) return -ENODEV;
    if (!len || off + len < off) return -EFAULT;
    int r = fc_enter(device, &e);
    if (r) return r;
    r = fc_errno(fc_driver()->ipc_open(&base, *ipc, FC_IPC_LAZY_PEERS), "cuIpcOpenMemHandle");
    uint64_t start = 0;
    size_t size = 0;
    /* The peer says where in it: outside, our kernel would end our context. */
    if (!r && !fc_driver()->address_range(&start, &size, base) && off + len > size) {
        fc_driver()->ipc_close(base);
        r = -EFAULT;
    }
    fc_leave(&e);
    if (r) return r;
    m->raw = (void *)(uintptr_t)base;
    m->raw_len = 0;
    m->at = (char *)m->raw + off;
    m->len = len;
    m->cuda = true;
    m->pinned = false;
    int owner = -1;
    m->inside = !fc_driver()->pointer_attribute(&owner, FC_POINTER_ORDINAL, base) && owner == device;
    return 0;
}

/* A peer's host memory that is mapped here: our GPU writes it through a pin of ours. Without one the driver copies through
 * a buffer of its own, which is slower. */
void fl_map_pin(int device, fl_map *m) {
    fc_entered e;
    if (device < 0 || fc_enter(device, &e)) return;
    m->pinned = !fc_errno(fc_driver()->host_register(m->raw, m->raw_len, FC_HOST_PORTABLE | FC_HOST_DEVICEMAP),
                          "cuMemHostRegister");
    fc_leave(&e);
}

void fl_map_undo(int device, fl_map *m) {
    fc_entered e;
    if (!m->raw) return;
    if ((m->cuda || m->pinned) && !fc_enter(device, &e)) {
        if (m->cuda) fc_driver()->ipc_close((uint64_t)(uintptr_t)m->raw);
        else fc_driver()->host_unregister(m->raw);
        fc_leave(&e);
    }
    if (!m->cuda) munmap(m->raw, m->raw_len);
    m->raw = NULL;
    m->cuda = m->pinned = false;
}
