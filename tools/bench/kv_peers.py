"""KV transfers of fabric and of NIXL: the same pages, in turn in the same run, between two processes of this host.

    BENCH_PY_NIXL=~/peers/nixl/bin/python python tools/bench/kv_peers.py --rounds 3 --out kv.json

For every preset of fabric-kvcache the plan of `fabric kv bench` is made once; fabric and NIXL move its pieces, random
pages on both sides, layer by layer, first as fast as it goes and then while layers "compute". fabric appears with
memory of its own, which peers map, and with anonymous memory, which is what NIXL gets. It sleeps where it waits; NIXL
polls on both sides, which takes a core each, so fabric appears a third time, with user memory and polling too. In a
burst fabric makes the arguments of each layer inside the clock, NIXL has them before. Every byte is compared in every
run.
The interpreter in BENCH_PY_NIXL has nixl-cu12 and numpy (see tools/peers/README.md).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from fabric_core import NetAddr, TransferEngine
from fabric_core.cli import limits
from fabric_core.cli.session import Session
from fabric_kvcache.bench.content import POISON, fill
from fabric_kvcache.bench.sender import Ready, Run, Sender
from fabric_kvcache.bench.start import receiver_process
from fabric_kvcache.bench.work import Work, cut_layers
from fabric_kvcache.presets import PRESETS, Preset

Figures = dict[str, list[float]]
HOOK: Ready = "hook"
POLL: Ready = "poll"
WHO = ("engine", "user", "polling", "nixl")


def work_of(preset: Preset, layers: int, tokens: int, seed: int) -> Work:
    layout = cut_layers(preset.layout, layers)
    return Work(src=layout, dst=layout, tokens=tokens, tail_bytes=64, seed=seed)


def note(found: Figures, seconds: float, nbytes: int, paced: tuple[float, list[float]], wrong: int) -> None:
    found["gbyte_s"].append(nbytes / seconds / 1e9)
    found["exposed_us"].append(paced[0])
    found["posted_us"].append(statistics.median(paced[1]))
    found["wrong"].append(wrong)


def fabric(session: Session, peer: NetAddr, preset: Preset, work: Work, who: str, found: Figures) -> None:
    memory, ready = ("user", POLL) if who == "polling" else (who, HOOK)
    chunks = preset.chunks(work.tokens)
    sender = Sender(session, peer, work, chunks, memory, memory)
    sender.run(None, verify=False)
    burst = sender.run(None, ready=ready)
    paced = sender.run(preset.compute_us(work.tokens), ready=ready)
    sender.close()
    posted = [(b - a) / 1000 for a, b in zip(paced.ready_ns, paced.posted_ns, strict=True)]
    exposed = (paced.arrived_ns - paced.ready_ns[-1]) / 1000
    note(found, (burst.arrived_ns - burst.began_ns) / 1e9, burst.nbytes, (exposed, posted), wrong(burst) + wrong(paced))


def wrong(run: Run) -> int:
    return (run.wrong or 0) + run.surplus


def nixl(python: str, preset: Preset, work: Work, found: Figures) -> None:
    """Write the question where NIXL's processes read it, and run them."""
    memory = "/dev/shm"
    directory = Path(tempfile.mkdtemp(prefix="kv-peers-", dir=memory if os.path.isdir(memory) else None))
    try:
        chunks = preset.chunks(work.tokens)
        (shard,) = work.sources()
        tables = work.tables(work.src, 0), work.tables(work.dst, 1)
        source, target = np.zeros(shard.nbytes, np.uint8), np.full(work.target_bytes, POISON, np.uint8)
        whole = range(work.tokens)
        fill(source, shard, tables[0], whole, work.seed, work.scales)
        fill(target, work.target, tables[1], whole, work.seed, work.scales)
        source.tofile(directory / "source.bin")
        target.tofile(directory / "wanted.bin")
        plan, rows, step = work.plan(shard), [], 0
        for chunk in chunks:
            moves = plan.moves(chunk, *tables)
            for layer in moves.layers:
                for length, a, b in moves.at(layer):
                    starts = [p.offset + p.indices.astype(np.int64) * p.stride for p in (a, b)]
                    rows.append(np.stack([np.full(len(a), step), *starts, np.full(len(a), length)], axis=1))
                step += 1
        pieces = np.concatenate(rows).astype(np.uint64)
        np.save(directory / "pieces.npy", pieces)
        each = [us for us in preset.compute_us(work.tokens) for _ in range(step // len(chunks))]
        (directory / "question.json").write_text(json.dumps({"notifications": step, "step_us": each}))
        script = Path(__file__).parent / "kv_nixl.py"
        done = subprocess.run(
            [python, str(script), str(directory)], check=False, capture_output=True, text=True, timeout=300
        )
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        if len(lines) != 2:
            raise SystemExit(f"NIXL ended with code {done.returncode}:\n{done.stderr[-2000:]}")
        burst, paced = lines
        bad = burst["wrong"] + paced["wrong"]
        note(found, burst["seconds"], int(pieces[:, 3].sum()), (paced["exposed_us"], paced["posted_us"]), bad)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="KV transfers: fabric beside NIXL.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--presets", default=",".join(PRESETS), help="separated by commas")
    parser.add_argument("--out", type=Path)
    words = parser.parse_args()
    python = os.environ.get("BENCH_PY_NIXL", "")
    if not python:
        raise SystemExit("BENCH_PY_NIXL is not set: the interpreter of an environment with nixl-cu12 and numpy")
    presets = {name: PRESETS[name] for name in words.presets.split(",")}
    figures: dict[str, dict[str, Figures]] = {name: defaultdict(lambda: defaultdict(list)) for name in presets}
    roofs: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in presets}
    with ExitStack() as stack:
        peer = NetAddr.parse(stack.enter_context(receiver_process("", None, "cpu")))
        engine = stack.enter_context(TransferEngine.open())
        session = stack.enter_context(Session(engine))
        for turn in range(words.rounds):
            for name, preset in presets.items():
                work = work_of(preset, words.layers, words.tokens, 1 + turn)
                for who in WHO if turn % 2 == 0 else reversed(WHO):
                    print(f"round {turn + 1}: {name}, {who}", file=sys.stderr, flush=True)
                    if who == "nixl":
                        nixl(python, preset, work, figures[name][who])
                    else:
                        fabric(session, peer, preset, work, who, figures[name][who])
                size = {"qwen3-235b": 32768, "deepseek-v3": 73728, "llama3-70b": 8192}[name]
                for roof in (limits.stream(size, 1 << 27), limits.cma(size, 1 << 27)):
                    if roof.bytes_per_s:
                        roofs[name][roof.name].append(roof.bytes_per_s / 1e9)
    if words.out:
        words.out.write_text(json.dumps({"figures": figures, "roofs": roofs}, indent=1))
    show(figures, roofs)
    bad = sum(sum(one["wrong"]) for row in figures.values() for one in row.values())
    print(f"\nwrong bytes: {bad:.0f}")
    return 1 if bad else 0


def show(figures: dict[str, dict[str, Figures]], roofs: dict[str, dict[str, list[float]]]) -> None:
    print("| preset | figure | fabric | user memory | user, polling | NIXL | each : NIXL | limit, user limit |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, row in figures.items():
        for what, title, better in (
            ("gbyte_s", "burst, GB/s", 1),
            ("exposed_us", "exposed, us", -1),
            ("posted_us", "ready to posted, us", -1),
        ):
            *ours, other = (statistics.median(row[who][what]) for who in WHO)
            ratio = [value / other if better > 0 else other / value for value in ours]
            roof = ", ".join(
                f"{statistics.median(roofs[name][kind]):.2f}" for kind in ("stream", "cma") if roofs[name][kind]
            )
            cells: list[Any] = [name, title]
            cells += [_cell(row[who][what]) for who in WHO]
            cells += [", ".join(f"{one:.2f}" for one in ratio), roof if better > 0 else "-"]
            print("| " + " | ".join(cells) + " |")


def _cell(values: list[float]) -> str:
    return f"{statistics.median(values):.3g} [{min(values):.3g}..{max(values):.3g}]"


if __name__ == "__main__":
    sys.exit(main())
