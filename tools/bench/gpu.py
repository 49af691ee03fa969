"""GPU memory through the API of fabric, on one machine with a CUDA GPU: pages, watchers, transfers by a kernel.

    python tools/bench/gpu.py [--out FILE] [--only pages|watch|proxy|idle]

Pages move between two processes on one GPU (local backend). Beside each figure stands the same kernel on the same page
lists without engine, process or Python ("plain"), and for host memory the single large copy, which is the link's limit.
Page lists are new for each transfer (16 in turn), but for "same list". Needs nvcc for what is measured on the GPU's
clock (gpu_clock.cu). At the end: what was asked for and what was found.
"""

from __future__ import annotations

import argparse
import base64
import ctypes
import itertools
import json
import statistics
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from fabric_core import MrDesc, Pages, TransferEngine, get_include, native_api
from fabric_core.conformance.gpu_side import Driver, Memory, Side

HERE = Path(__file__).resolve().parent
SHAPES = [(1024, 32768), (1024, 7168), (4096, 1024), (32, 32768), (1, 64 << 20), (1, 1 << 20)]
CASES = [("gpu", "gpu"), ("gpu", "empty"), ("empty", "gpu")]
BYTES = 128 << 20
PROXIED = [(1, 7168), (32, 32768), (256, 7168), (1024, 32768)]
LISTS = 16  # more than a kernel that stays keeps


FOUND: dict[str, float] = {}  #: figures that the last table is made of


def spread(values: list[float]) -> str:
    ordered = sorted(values)
    return (
        f"{statistics.median(ordered):.1f} ({ordered[len(ordered) // 10]:.1f} .. {ordered[len(ordered) * 9 // 10]:.1f})"
    )


def percentiles(us: np.ndarray, name: str = "") -> str:
    p = np.percentile(us, [50, 99, 99.9, 100])
    if name:
        FOUND.update(zip((f"{name} p50", f"{name} p99", f"{name} p99.9"), (float(x) for x in p), strict=False))
    return f"p50 {p[0]:.2f}  p99 {p[1]:.2f}  p99.9 {p[2]:.2f}  max {p[3]:.1f}"


class Plain:
    """Our copy kernel on a ready list, launched and waited for by the driver's own calls."""

    def __init__(self, driver: Driver) -> None:
        self.lib = driver.lib
        header = (Path(get_include()).parent / "cuda" / "kernels_ptx.h").read_text()
        ptx = "".join(json.loads(line) for line in header.splitlines() if line.startswith('"'))
        module, self.function, self.stream = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        assert self.lib.cuModuleLoadData(ctypes.byref(module), ptx.encode() + b"\0") == 0
        assert self.lib.cuModuleGetFunction(ctypes.byref(self.function), module, b"fab_copy") == 0
        assert self.lib.cuStreamCreate(ctypes.byref(self.stream), 1) == 0
        self.left, self.word = ctypes.c_uint64(driver.alloc(64)), ctypes.c_uint64(driver.alloc(64))
        driver.put(self.left.value, bytes(64))
        self.list = ctypes.c_void_p()
        assert self.lib.cuMemHostAlloc(ctypes.byref(self.list), ctypes.c_size_t(24 * 8192), 3) == 0

    def run(self, dst: np.ndarray, src: np.ndarray, page: int, blocks: int) -> float:
        pieces = np.ctypeslib.as_array((ctypes.c_uint64 * (3 * len(dst))).from_address(self.list.value or 0))
        pieces.reshape(-1, 3)[:] = np.stack([dst, src, np.full(len(dst), page, dtype=np.uint64)], axis=1)
        chunk = 2048 if blocks > 32 and page * len(dst) <= 4 << 20 else 8192  # as the engine does
        per = -(-page // chunk)
        blocks = min(blocks, -(-len(dst) * per // 8))
        values = (
            self.list, ctypes.c_uint32(len(dst)), ctypes.c_uint32(per), ctypes.c_uint32(chunk), self.left, self.word,
            ctypes.c_uint64(1),
        )  # fmt: skip
        arguments = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        begin = time.perf_counter()
        rc = self.lib.cuLaunchKernel(self.function, blocks, 1, 1, 256, 1, 1, 0, self.stream, arguments, None)
        assert rc == 0, rc
        assert self.lib.cuStreamSynchronize(self.stream) == 0
        return time.perf_counter() - begin


def pages(out: list[str]) -> None:
    driver = Driver()
    plain = Plain(driver)
    rng = np.random.default_rng(5)
    out.append("| from -> to | shape | fabric, us | GB/s | plain kernel, us | GB/s | fabric / plain |")
    out.append("| --- | --- | --- | --- | --- | --- | --- |")
    for (ours, theirs), linger in itertools.product(CASES, (0, 1000)):  # launched each time; one that stays
        side = Side("cuda:0")
        with TransferEngine.open("cuda:0", "local", polling="busy", gpu_linger_us=linger) as engine:
            memory = Memory(engine, ours, BYTES, driver)
            handle, _ = engine.reg_mr(memory.what)
            made = side.ask("make", kind=theirs, nbytes=BYTES)
            desc = MrDesc.from_bytes(base64.b64decode(made["desc"]))
            mine = Memory(engine, theirs, BYTES, driver)  # for the plain kernel: of the same kind, in this process
            keep = engine.reg_mr(mine.what)  # pins host memory
            base = [m.ptr if m.kind == "gpu" else m.what.ptr for m in (memory, mine)]
            for (count, page), same in itertools.product(SHAPES, (False, True) if linger else (False,)):
                if same and count == 1:
                    continue
                lists = [
                    [rng.permutation(BYTES // page)[:count].astype(np.uint32) for _ in range(2)]
                    for _ in range(1 if same else LISTS)
                ]
                full, alone = [], []
                for i in range(60):
                    si, di = lists[i % len(lists)]
                    src, dst = (handle, Pages(si, page)), (desc, Pages(di, page))
                    begin = time.perf_counter()
                    if count == 1:
                        t = engine.submit_single_write(page, None, (handle, 0), (desc, 0))
                    else:
                        t = engine.submit_paged_writes(page, None, src, dst)
                    while not t.done:
                        pass
                    took = time.perf_counter() - begin
                    t.wait(0)
                    single = float("nan")
                    if count > 1:
                        where = [base[k] + idx.astype(np.uint64) * page for k, idx in ((1, di), (0, si))]
                        single = plain.run(where[0], where[1], page, 528 if ours == theirs else 32)
                    if i >= 10:
                        full.append(took * 1e6)
                        alone.append(single * 1e6)
                total = count * page / 1e3
                a, b = statistics.median(full), statistics.median(alone)
                way = f"{ours} -> {theirs}{', stays' if linger else ''}{', same list' if same else ''}"
                FOUND[f"{way} {count} x {page}"] = total / a
                FOUND[f"{way} {count} x {page} ratio"] = a / b
                out.append(
                    f"| {way} | {count} x {page} | {spread(full)} | {total / a:.1f} | "
                    f"{spread(alone) if count > 1 else '-'} | {f'{total / b:.1f}' if count > 1 else '-'} | "
                    f"{f'{a / b:.2f}' if count > 1 else '-'} |"
                )
                print(out[-1], flush=True)
            del keep
        side.close()


def helper() -> ctypes.CDLL:
    out = Path(tempfile.mkdtemp()) / "libgpu_clock.so"
    subprocess.run(
        ["nvcc", "-O2", "-arch=native", "-shared", "-Xcompiler", "-fPIC", f"-I{get_include()}", "-o", out,
         HERE / "gpu_clock.cu"], check=True,
    )  # fmt: skip
    lib = ctypes.CDLL(str(out))
    lib.native_watch.restype = ctypes.c_int64
    lib.native_seen.restype = ctypes.POINTER(ctypes.c_int64)
    return lib


def offset(lib: ctypes.CDLL) -> tuple[int, int]:
    off, error = ctypes.c_int64(), ctypes.c_int64()
    rc = lib.clock_offset(ctypes.byref(off), ctypes.byref(error))
    assert rc == 0, rc
    return off.value, error.value


def gaps(lib: ctypes.CDLL, name: str, seconds: float = 1.5) -> str:
    """What a thread that only looks at the clock misses here; and so the latency of a poller that needs no time."""
    room = (ctypes.c_int64 * 200_000)()
    count = min(lib.clock_gaps(ctypes.c_double(seconds), room, len(room)), len(room))
    us = np.array(room[:count], dtype=float) / 1e3

    def late(x: float) -> float:  # share of moments at which it is away for longer than x from then on
        return float(np.maximum(us - x, 0).sum()) / (seconds * 1e6)

    grid = np.concatenate([np.arange(0, 200, 0.1), np.geomspace(200, 1e7, 2000)])
    p99, p999 = (float(grid[np.argmax([late(x) <= share for x in grid])]) for share in (0.01, 0.001))
    FOUND[f"perfect {name} p99"], FOUND[f"perfect {name} p99.9"] = p99, p999
    over = ", ".join(f"{int((us > x).sum())} over {x} us" for x in (5, 20, 100))
    return (
        f"gaps of a spinning thread in {seconds} s: {over}, the longest {us.max(initial=0):.0f} us; "
        f"a poller that needs no time would have p99 {p99:.1f}, p99.9 {p999:.1f} us"
    )


def latency(lib: ctypes.CDLL, word: int, seen: Any, total: int, ns: int) -> tuple[np.ndarray, int]:
    before = offset(lib)
    stamps = (ctypes.c_uint64 * total)()
    rc = lib.bump_run(ctypes.c_uint64(word), total, ctypes.c_uint64(ns), stamps)
    assert rc == 0, rc
    time.sleep(0.05)
    after = offset(lib)
    g = np.array(stamps, dtype=np.int64)
    t = np.array(seen(), dtype=np.int64)
    mid = np.linspace(before[0], after[0], total)
    ok = t > 0
    return (t[ok] - g[ok] - mid[ok]) / 1e3, max(before[1], after[1])


def watch(out: list[str]) -> None:
    driver = Driver()
    del driver
    lib = helper()
    total = 40_000
    for polling in ("busy", "adaptive"):
        for ns in (20_000, 100_000):
            out.append(gaps(lib, f"{polling} {ns // 1000}"))
            print(out[-1], flush=True)
            n = total if ns == 20_000 else 8_000
            with TransferEngine.open("cuda:0", "local", polling=polling) as engine:
                w = engine.alloc_uvm_watcher(lambda _o, _n: None)
                w.close()
                word = engine.gpu_flag()
                lib.native_watch(
                    ctypes.c_void_p(native_api()), ctypes.c_void_p(engine.native_handle), ctypes.c_uint64(word.ptr), n
                )
                us, error = latency(lib, word.ptr, lambda n=n: lib.native_seen()[:n], n, ns)
            out.append(
                f"store -> native callback, {polling}, a bump each {ns // 1000} us: "
                f"{percentiles(us, f'native {polling} {ns // 1000}')}"
                f"  (+-{error / 1e3:.1f})"
            )
            print(out[-1], flush=True)
    for busy in (False, True):
        n = 4_000
        seen = [0] * n

        def on_change(old: int, new: int, seen: list[int] = seen) -> None:
            t = time.monotonic_ns()
            for v in range(old, min(new, len(seen))):
                seen[v] = t

        with TransferEngine.open("cuda:0", "local", polling="busy") as engine:
            w = engine.alloc_uvm_watcher(on_change)
            stop = threading.Event()

            def spin(stop: threading.Event = stop) -> None:
                x = 0
                while not stop.is_set():
                    x += 1

            thread = threading.Thread(target=spin)
            if busy:
                thread.start()
            us, error = latency(lib, w.ptr, lambda seen=seen: seen, n, 100_000)
            stop.set()
            if busy:
                thread.join()
        what = "a busy Python thread beside it" if busy else "other threads idle"
        out.append(f"store -> Python callback, {what}: {percentiles(us, f'python {what}')}  (+-{error / 1e3:.1f})")
        print(out[-1], flush=True)


HOW = {"add": 0, "store": 1, "add, behind a write to GPU memory": 2}  # gpu_clock.cu


def started(lib: Any, prepared: Any, b: Any, imm: int, count: int, arrived: Any, how: str, rounds: int) -> list[float]:
    """Bumps, `rounds` of them in one kernel: us until the kernel sees the flag; the first of several is cold."""
    took: list[float] = []
    ns, bumps = (ctypes.c_uint64 * rounds)(), 0
    while len(took) < 300:
        held = [b.expect_imm_count(imm, count, arrived) for _ in range(rounds)]
        rc = lib.proxy_run(
            ctypes.c_uint64(prepared.ptr), ctypes.c_uint64(bumps + 1), HOW[how], ctypes.c_uint64(arrived.ptr),
            ctypes.c_uint64(arrived.done + 1), rounds, ctypes.c_uint64(20_000), ns,
        )  # fmt: skip
        assert rc == 0, rc
        for expectation in held:
            expectation.wait(5)
        bumps += rounds
        took += [x / 1e3 for x in ns[rounds > 1 :]]
    return took[50:]


def proxy(out: list[str]) -> None:
    driver = Driver()
    lib = helper()
    rng = np.random.default_rng(6)
    data = rng.integers(0, 256, BYTES, dtype=np.uint8)
    out.append("From the kernel's store to its sight of the flag; data compared after each row.")
    for polling, linger in (("busy", 1000), ("adaptive", 1000), ("busy", 0), ("adaptive", 0)):
        with (
            TransferEngine.open("cuda:0", "local", polling=polling, gpu_linger_us=linger) as a,
            TransferEngine.open("cuda:0", "local", polling=polling) as b,
        ):
            src, dst = Memory(a, "gpu", BYTES, driver), Memory(b, "gpu", BYTES, driver)
            src.put(data.tobytes())
            handle, _ = a.reg_mr(src.what)
            _, desc = b.reg_mr(dst.what)
            imm = b.alloc_imm()
            arrived = b.gpu_flag()
            for count, page in PROXIED:
                si, di = (rng.permutation(BYTES // page)[:count].astype(np.uint32) for _ in range(2))
                for how, rounds in (("store", 1), ("add", 1), ("store", 16), ("add", 16)) if linger else (("add", 1),):
                    driver.put(dst.ptr, bytes(BYTES))
                    prepared = a.prepare_paged_writes(page, imm, (handle, Pages(si, page)), (desc, Pages(di, page)))
                    took = np.array(started(lib, prepared, b, imm, count, arrived, how, rounds))
                    prepared.close()
                    got = np.frombuffer(dst.get(), dtype=np.uint8)
                    for i, j in zip(si.tolist(), di.tolist(), strict=True):
                        assert (got[j * page : (j + 1) * page] == data[i * page : (i + 1) * page]).all()
                    what = f"{count} x {page} B, {polling}, linger {linger} us, {how}, {rounds} in one kernel"
                    out.append(f"{what}: {percentiles(took, f'proxy {what}')}")
                    print(out[-1], flush=True)
            driver.free(src.ptr)
            driver.free(dst.ptr)


def idle(out: list[str]) -> None:
    with TransferEngine.open("cuda:0", "local", nics=4, polling="adaptive") as engine:
        keep = [engine.alloc_uvm_watcher(lambda _o, _n: None) for _ in range(64)]
        time.sleep(1.5)
        cpu, begin = time.process_time(), time.monotonic()
        time.sleep(5)
        share = (time.process_time() - cpu) / (time.monotonic() - begin)
        FOUND["idle"] = 100 * share
        out.append(f"idle engine, 4 NICs, {len(keep)} watchers, adaptive: {100 * share:.2f} % of a core")
        print(out[-1], flush=True)


def asked(out: list[str]) -> None:
    """The table of what was asked for: each figure's limit beside it."""
    f = FOUND
    link, inside = f["gpu -> empty 1 x 67108864"], f["gpu -> gpu 1 x 67108864"]

    def both(way: str) -> str:
        return ", ".join(f"{f[f'gpu -> gpu{way} {shape} ratio']:.2f}" for shape in ("1024 x 32768", "4096 x 1024"))

    def proxied(how: str) -> str:
        whats = [f"proxy 256 x 7168 B, busy, linger 1000 us, {how}, {n} in one kernel p50" for n in (1, 16)]
        return " and ".join(f"{f[what]:.1f}" for what in whats)

    rows = [
        (
            "GPU -> host, host -> GPU, 1,024 x 32 KiB, GB/s: 45", f"{f['gpu -> empty 1024 x 32768']:.1f}, "
            f"{f['empty -> gpu 1024 x 32768']:.1f}", f"one copy of 64 MiB: {link:.1f}",
        ),
        (
            "same GPU, two processes, 1,024 x 32 KiB, 4,096 x 1 KiB: 2 x a plain kernel", f"{both('')}; "
            f"a kernel that stays {both(', stays')}, same list again {both(', stays, same list')}",
            f"one copy of 64 MiB: {inside:.0f} GB/s",
        ),
        *(
            (
                f"GPU store -> native callback, graph, {polling}, each {each} us: p50 2.5, p99 8, p99.9 19 us",
                ", ".join(f"{f[f'native {polling} {each} {p}']:.1f}" for p in ("p50", "p99", "p99.9")),
                "a poller that needs no time, by the gaps before it: p99.9 "
                f"{f[f'perfect {polling} {each} p99.9']:.1f}",
            )
            for polling in ("busy", "adaptive") for each in (20, 100)
        ),
        (
            "GPU store -> Python callback: p50 4 us idle; busy Python thread reported",
            f"{f['python other threads idle p50']:.1f}; {f['python a busy Python thread beside it p50']:.0f}",
            "the GIL's switch interval, 5000 us",
        ),
        (
            "kernel's store -> 256 x 7168 B written -> kernel sees the flag: p50 12 us",
            f"by a store {proxied('store')} (1, 16 in a kernel); by an addition {proxied('add')}",
            "the GPU's own hop to the host and back: 2.5 to 3.0",
        ),
        ("idle engine with watchers: below 1 % of a core", f"{f['idle']:.2f}", "-"),
    ]  # fmt: skip
    out.append("| asked for | found | limit |\n| --- | --- | --- |")
    out += [f"| {' | '.join(row)} |" for row in rows]
    print("\n".join(out[-len(rows) - 1 :]))


PARTS = {"pages": pages, "watch": watch, "proxy": proxy, "idle": idle}


def main() -> None:
    parser = argparse.ArgumentParser(description="GPU memory through fabric's API.")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", choices=PARTS, action="append")
    options = parser.parse_args()
    out: list[str] = []
    for name in options.only or [*PARTS, "asked"]:
        out.append(f"\n## {name}\n")
        {**PARTS, "asked": asked}[name](out)
        if options.out:
            options.out.write_text("\n".join(out) + "\n")


if __name__ == "__main__":
    main()
