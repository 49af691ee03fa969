"""What this machine allows, taken in the same rounds as the figures it is set beside. Runs with fabric's interpreter.

- `limit`. write, paged: one core copies the same pieces over the same span, by streaming stores where they are faster.
  ping: two Python processes that look at a word of shared memory.
- `limit-user`. write, paged: the kernel copies them between address spaces (process_vm_writev). register: mlock of
  memory that has been touched, the least that pinning costs.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import time

from adapter import SMALL, address_of, anonymous
from figures import PAGED, REGISTERED, SIZES, plan
from harness import REGION, emit, fence, parse

from fabric_core.native_lib import lib

_TURNS = 5000


def copies(seconds: float, quick: bool) -> None:
    for name, measure in (("limit", lib.fab_limit_stream), ("limit-user", lib.fab_limit_cma)):
        for size in SIZES:
            count, _, places = plan(size, quick)
            rate = float(measure(size, min(count, places) * size, seconds))
            if rate > 0:
                emit(name, "write", size, [rate / 1e9], "GB/s")
        for pages, size in PAGED:
            rate = float(measure(size, REGION, seconds))
            if rate > 0:
                emit(name, "paged", size, [rate / 1e9], "GB/s", pages=pages)


def ping() -> None:
    words = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("Q")
    child = os.fork()
    if not child:
        signal.alarm(30)
        for turn in range(1, _TURNS + 1):
            while words[0] != turn:
                pass
            words[8] = turn
        os._exit(0)
    took = []
    clock = time.perf_counter
    for turn in range(1, _TURNS + 1):
        begin = clock()
        words[0] = turn
        while words[8] != turn:
            pass
        took.append((clock() - begin) * 1e6 / 2)
    os.waitpid(child, 0)
    emit("limit", "ping", SMALL, took[100:], "us")


def pinning() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    for size in REGISTERED:
        took = []
        for _ in range(5):
            memory = anonymous(size)
            address = ctypes.c_void_p(address_of(memory))
            begin = time.perf_counter()
            if libc.mlock(address, ctypes.c_size_t(size)):
                return  # more than this user may lock
            took.append((time.perf_counter() - begin) * 1e6)
            libc.munlock(address, ctypes.c_size_t(size))
        emit("limit-user", "register", size, took, "us")


if __name__ == "__main__":
    chosen = parse()
    fence()
    signal.alarm(120)
    copies(0.03 if chosen.quick else 0.15, chosen.quick)
    ping()
    pinning()
