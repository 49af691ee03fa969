/* The door from Python for the short hot calls.
 *
 * A cffi call drops the GIL and may wait 5 ms to get it back when another Python thread is busy. These functions keep
 * it: they are METH_FASTCALL functions of the stable ABI, compiled into the same module. In return none of them may
 * block: full queues are reported (-EAGAIN), and Python then waits through cffi, without the GIL.
 *
 * fab_door() makes the function objects; native.py turns their addresses into objects once, at import. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "common.h"
#include "door.h"
#include "fabric/engine.h"

/* ---- arguments: unsigned, or None for "not given" ------------------------------------------------- */

/* numpy's integers and the like come by __index__; what is no integer is named. */
static PyObject *as_index(PyObject *o) {
    PyObject *n = PyNumber_Index(o);
    if (!n && PyErr_ExceptionMatches(PyExc_TypeError)) {
        PyErr_Clear();
        PyErr_Format(PyExc_TypeError, "an integer is needed here, not %R", o);
    }
    return n;
}

static uint64_t u64(PyObject *o) {
    if (PyLong_CheckExact(o)) return PyLong_AsUnsignedLongLong(o);
    if (PyErr_Occurred()) return 0; /* an argument before this one was wrong: keep its error */
    PyObject *n = as_index(o);
    if (!n) return 0;
    uint64_t v = PyLong_AsUnsignedLongLong(n);
    Py_DecRef(n);
    return v;
}

/* None: -1. A negative number is no way to say None: INT64_MIN, which every check refuses. */
static int64_t optional(PyObject *o) {
    if (o == Py_None) return -1;
    if (PyErr_Occurred()) return 0;
    PyObject *n = as_index(o);
    if (!n) return 0;
    long long v = PyLong_AsLongLong(n);
    Py_DecRef(n);
    return v < 0 ? INT64_MIN : v;
}

static bool arity(const char *name, Py_ssize_t got, Py_ssize_t want) {
    if (got == want) return true;
    PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, got %zd", name, want, got);
    return false;
}

/* seconds as a Python number -> ns; None: 0 (the engine's default) */
static uint64_t duration(PyObject *o) {
    if (o == Py_None) return 0;
    double s = PyFloat_AsDouble(o);
    if (PyErr_Occurred()) return 0;
    if (!(s >= 0)) {
        PyErr_SetString(PyExc_ValueError, "a timeout is a number of seconds >= 0");
        return 0;
    }
    return s > 1e9 ? UINT64_C(1000000000) * 1000000000u : s == 0 ? 1 : (uint64_t)(s * 1e9) + 1;
}

static PyObject *result(int64_t rc) { return PyErr_Occurred() ? NULL : PyLong_FromLongLong(rc); }

#define LONG_LIST 32768 /* pages; below, the lists are read and copied in some 10 us with the GIL held */

#define BAD_OPTION(imm, nic) ((imm) == INT64_MIN ? -EINVAL : (nic) == INT64_MIN || (nic) > INT32_MAX ? -ENODEV : 0)

/* ---- submits ----------------------------------------------------------------------------------------- */

/* (engine, local, loff, remote, roff, length, imm|None, nic|None, timeout|None, flag) -> handle, or -errno */
static PyObject *submit_write(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    (void)self;
    if (!arity("submit_write", n, 10)) return NULL;
    fab_engine *e = PyLong_AsVoidPtr(a[0]);
    uint64_t local = u64(a[1]), loff = u64(a[2]), remote = u64(a[3]), roff = u64(a[4]), len = u64(a[5]);
    int64_t imm = optional(a[6]), nic = optional(a[7]);
    uint64_t timeout = duration(a[8]), flag = u64(a[9]);
    if (PyErr_Occurred()) return NULL;
    int rc = BAD_OPTION(imm, nic);
    return result(rc ? rc : fab_submit_write(e, local, loff, remote, roff, len, imm, (int32_t)nic, timeout, flag));
}

/* A C-contiguous buffer of 32-bit integers; the caller releases it. */
static bool indices(PyObject *o, Py_buffer *view) {
    if (PyObject_GetBuffer(o, view, PyBUF_CONTIG_RO | PyBUF_FORMAT)) return false;
    const char *f = view->format ? view->format : "B";
    if (*f == '<' || *f == '=' || *f == '@') f++;
    if (view->itemsize == 4 && (!strcmp(f, "I") || !strcmp(f, "L") || !strcmp(f, "i") || !strcmp(f, "l"))) return true;
    PyErr_Format(PyExc_TypeError, "page indices must be 32-bit integers (u32), not items of format '%s' and %zd bytes",
                 view->format ? view->format : "B", view->itemsize);
    PyBuffer_Release(view);
    return false;
}

/* (engine, local, sidx, sstride, soff, remote, didx, dstride, doff, page_len, imm|None, nic|None, timeout|None, flag) */
static PyObject *submit_paged(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    (void)self;
    if (!arity("submit_paged", n, 14)) return NULL;
    fab_engine *e = PyLong_AsVoidPtr(a[0]);
    uint64_t local = u64(a[1]), sstride = u64(a[3]), soff = u64(a[4]), remote = u64(a[5]), dstride = u64(a[7]);
    uint64_t doff = u64(a[8]), page = u64(a[9]);
    int64_t imm = optional(a[10]), nic = optional(a[11]);
    uint64_t timeout = duration(a[12]), flag = u64(a[13]);
    if (PyErr_Occurred()) return NULL;
    int64_t rc = BAD_OPTION(imm, nic);
    if (rc) return result(rc);
    Py_buffer s, d;
    if (!indices(a[2], &s)) return NULL;
    if (!indices(a[6], &d)) {
        PyBuffer_Release(&s);
        return NULL;
    }
    if (s.len != d.len || s.len / 4 > UINT32_MAX) rc = -EINVAL;
    else if (s.len / 4 > LONG_LIST) { /* reading it takes a while: let other threads run */
        PyThreadState *gil = PyEval_SaveThread();
        rc = fab_submit_paged(e, local, s.buf, sstride, soff, remote, d.buf, dstride, doff, (uint32_t)(s.len / 4), page,
                              imm, (int32_t)nic, timeout, flag);
        PyEval_RestoreThread(gil);
    } else
        rc = fab_submit_paged(e, local, s.buf, sstride, soff, remote, d.buf, dstride, doff, (uint32_t)(s.len / 4), page,
                              imm, (int32_t)nic, timeout, flag);
    PyBuffer_Release(&s);
    PyBuffer_Release(&d);
    return result(rc);
}

/* (engine, op, local, targets: buffer of 4 u64 each, imm|None, nic|None, timeout|None, flag) */
static PyObject *submit_many(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    (void)self;
    if (!arity("submit_many", n, 8)) return NULL;
    fab_engine *e = PyLong_AsVoidPtr(a[0]);
    uint64_t op = u64(a[1]), local = u64(a[2]);
    int64_t imm = optional(a[4]), nic = optional(a[5]);
    uint64_t timeout = duration(a[6]), flag = u64(a[7]);
    if (PyErr_Occurred()) return NULL;
    int64_t rc = BAD_OPTION(imm, nic);
    if (rc) return result(rc);
    Py_buffer t;
    if (PyObject_GetBuffer(a[3], &t, PyBUF_CONTIG_RO)) return NULL;
    uint64_t count = (uint64_t)t.len / sizeof(fab_target);
    rc = count > UINT32_MAX
             ? -EINVAL
             : fab_submit_many(e, (uint32_t)op, local, t.buf, (uint32_t)count, imm, (int32_t)nic, timeout, flag);
    PyBuffer_Release(&t);
    return result(rc);
}

/* (engine, group, peer, message, timeout|None, flag) */
static PyObject *submit_send(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    (void)self;
    if (!arity("submit_send", n, 6)) return NULL;
    fab_engine *e = PyLong_AsVoidPtr(a[0]);
    uint64_t group = u64(a[1]), peer = u64(a[2]), timeout = duration(a[4]), flag = u64(a[5]);
    if (PyErr_Occurred()) return NULL;
    Py_buffer m;
    if (PyObject_GetBuffer(a[3], &m, PyBUF_CONTIG_RO)) return NULL;
    int64_t rc = fab_submit_send(e, (uint32_t)group, (uint32_t)peer, m.buf, (uint64_t)m.len, timeout, flag);
    PyBuffer_Release(&m);
    return result(rc);
}

/* ---- looks ------------------------------------------------------------------------------------------- */

#define HANDLE_CALL(name, call)                                               \
    static PyObject *name(PyObject *self, PyObject *const *a, Py_ssize_t n) { \
        (void)self;                                                           \
        if (!arity(#name, n, 2)) return NULL;                                 \
        fab_engine *e = PyLong_AsVoidPtr(a[0]);                               \
        uint64_t handle = u64(a[1]);                                          \
        if (PyErr_Occurred()) return NULL;                                    \
        return result(call(e, handle));                                       \
    }

HANDLE_CALL(transfer_poll, fab_transfer_poll)
HANDLE_CALL(transfer_notify, fab_transfer_notify)
HANDLE_CALL(transfer_release, fab_transfer_release)
HANDLE_CALL(expect_poll, fab_expect_poll)
HANDLE_CALL(expect_notify, fab_expect_notify)
HANDLE_CALL(expect_release, fab_expect_release)

/* (engine, imm) -> whole writes arrived and not claimed */
static PyObject *imm_count(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    (void)self;
    if (!arity("imm_count", n, 2)) return NULL;
    fab_engine *e = PyLong_AsVoidPtr(a[0]);
    uint64_t imm = u64(a[1]);
    if (PyErr_Occurred()) return NULL;
    return result(imm > UINT32_MAX ? -EINVAL : fab_imm_count(e, (uint32_t)imm));
}

static PyObject *progress(PyObject *self, PyObject *engine) {
    (void)self;
    fab_engine *e = PyLong_AsVoidPtr(engine);
    return PyErr_Occurred() ? NULL : result(fab_progress(e));
}

/* Words that other threads, native code or a device change: acquire and release (C10). */
static PyObject *load_u64(PyObject *self, PyObject *address) {
    (void)self;
    _Atomic uint64_t *word = PyLong_AsVoidPtr(address);
    if (PyErr_Occurred()) return NULL;
    return PyLong_FromUnsignedLongLong(atomic_load_explicit(word, memory_order_acquire));
}

static PyObject *store_u64(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    (void)self;
    if (!arity("store_u64", n, 2)) return NULL;
    _Atomic uint64_t *word = PyLong_AsVoidPtr(a[0]);
    uint64_t value = u64(a[1]);
    if (PyErr_Occurred()) return NULL;
    atomic_store_explicit(word, value, memory_order_release);
    Py_RETURN_NONE;
}

#define FAST(name) {#name, (PyCFunction)(void (*)(void))(name), METH_FASTCALL, NULL}
static PyMethodDef methods[] = {
    FAST(submit_write),     FAST(submit_paged),
    FAST(submit_many),      FAST(submit_send),
    FAST(transfer_poll),    FAST(transfer_notify),
    FAST(transfer_release), FAST(expect_poll),
    FAST(expect_notify),    FAST(expect_release),
    FAST(imm_count),        {"progress", progress, METH_O, NULL},
    FAST(store_u64),        {"load_u64", load_u64, METH_O, NULL},
};

uint32_t fab_door_size(void) { return sizeof methods / sizeof *methods; }
const char *fab_door_name(uint32_t i) { return methods[i].ml_name; }

void *fab_door(uint32_t i) {
    /* the cffi call that brought us here dropped the GIL. The one reference is never given back. */
    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *function = i < fab_door_size() ? PyCFunction_NewEx(&methods[i], NULL, NULL) : NULL;
    PyGILState_Release(gil);
    return function;
}
