"""Dispatch and combine on GPUs: times of the kernels against the bytes that they must move. Prints a table.

    python tools/bench/moe_gpu.py                  # all ranks on one GPU, in one process: kernel times without waiting
    python tools/bench/moe_gpu.py --gpus 2         # one process for each GPU: over NVLink, waiting included

Kernel times are those of CUPTI (torch's profiler). The bound of a kernel is what it reads and writes over the rate at
which this GPU copies its own memory; with several GPUs, what a GPU sends over --link GB/s.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

KERNELS = ("moe_dispatch_send", "moe_dispatch_recv", "moe_combine_send", "moe_combine_recv")
HIDDEN, SCALES, EXPERTS, TOPK = 7168, 224, 256, 8


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8, help="ranks on one GPU")
    parser.add_argument("--gpus", type=int, default=1, help="processes, each with a GPU of its own")
    parser.add_argument("--tokens", default="1,16,128,4096")
    parser.add_argument("--dtype", default="float8_e4m3fn", choices=["float8_e4m3fn", "bfloat16", "int8"])
    parser.add_argument("--view", default="contiguous", choices=["contiguous", "rank-major"])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--link", type=float, default=370.0, help="GB/s that kernels store to another GPU, one way")
    parser.add_argument("--out", type=Path, help="also write the table there")
    return parser.parse_args()


def config_of(args: argparse.Namespace, ranks: int, tokens: int) -> Any:
    from fabric_moe import MoeConfig

    scales = 0 if args.dtype == "bfloat16" else SCALES
    return MoeConfig(
        ranks=ranks, experts=EXPERTS, topk=TOPK, hidden=HIDDEN, max_tokens=tokens, dtype=args.dtype, scale_bytes=scales,
        timeout=5.0,
    )  # fmt: skip


class Rank:
    """Inputs of one rank, and its halves."""

    def __init__(self, args: argparse.Namespace, group: Any, tokens: int) -> None:
        import torch

        self.group, self.args, self.tokens = group, args, tokens
        where = torch.device(group.device)
        dice = torch.Generator(device=where).manual_seed(7 + group.rank)
        config = group.config
        raw = torch.randint(0, 256, (tokens, config.token_bytes), dtype=torch.uint8, device=where, generator=dice)
        self.x = (
            (raw & 0xBF).view(getattr(torch, args.dtype))
            if args.dtype != "bfloat16"
            else (raw & 0xBF).view(torch.bfloat16)
        )
        self.scales = torch.zeros((tokens, SCALES), dtype=torch.uint8, device=where) if config.scale_bytes else None
        self.ids = torch.rand((tokens, EXPERTS), device=where, generator=dice).topk(TOPK, dim=1).indices
        self.weights = torch.rand((tokens, TOPK), device=where, generator=dice)
        self.room = tokens * TOPK * 5 // 4 + 1024
        self.out = torch.zeros((tokens, HIDDEN), dtype=torch.bfloat16, device=where)
        rows = self.room if args.view == "contiguous" else config.ranks * config.max_tokens
        self.y = torch.randn((rows, HIDDEN), device=where, dtype=torch.bfloat16, generator=dice)
        self.view: Any = None

    def halves(self) -> list[Callable[[], None]]:
        return [self.dispatch_send, self.dispatch_recv, self.combine_send, self.combine_recv]

    def dispatch_send(self) -> None:
        self.step = self.group.dispatch_send(self.x, self.ids, self.weights, scales=self.scales)

    def dispatch_recv(self) -> None:
        received = self.group.dispatch_recv(self.step)
        self.view = received.contiguous(capacity=self.room) if self.args.view == "contiguous" else received.rank_major()

    def combine_send(self) -> None:
        self.group.combine_send(self.view, self.y)

    def combine_recv(self) -> None:
        self.group.combine_recv(self.step, out=self.out)

    def traffic(self) -> dict[str, int]:
        """Bytes that each kernel reads and writes at least."""
        config = self.group.config
        rows_in, copies = int(self.view.source_rows[-1]), int(self.view.counts.sum())
        owner = self.ids * config.ranks // EXPERTS
        sent = sum(len(set(row)) for row in owner.tolist())
        row, back, token = config.token_bytes + config.scale_bytes, 2 * HIDDEN, config.token_bytes + config.scale_bytes
        once = self.args.view == "rank-major"
        return {
            "moe_dispatch_send": self.tokens * token + sent * row,
            "moe_dispatch_recv": 0 if once else rows_in * row + copies * row,
            "moe_combine_send": (rows_in if once else copies) * back + rows_in * back,
            "moe_combine_recv": sent * back + self.tokens * back,
            "out": sent * row,  # over the link, own rows included
            "back": sent * back,
        }


def copy_rate() -> float:
    """GB/s, read and written, of a large copy in the GPU's own memory."""
    import torch

    a = torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    times = []
    for _ in range(8):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        b.copy_(a)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return float(2 * a.numel() / statistics.median(times) / 1e6)


def kernel_times(run: Callable[[], None]) -> dict[str, list[float]]:
    """Microseconds of each of our kernels while `run` runs."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = {name: [] for name in KERNELS}
    for event in seen.events():
        for name in KERNELS:
            if event.name.startswith(name):
                found[name].append(float(event.device_time_total))
    return found


def floor() -> float:
    """Microseconds of a kernel that adds to one number: what a kernel costs that does next to nothing."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    x = torch.zeros(1, device="cuda")
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(50):
            x.add_(1)
        torch.cuda.synchronize()
    times = [float(event.device_time_total) for event in seen.events() if "elementwise" in event.name]
    return statistics.median(times) if times else float("nan")


def spread(times: list[float]) -> str:
    ordered = sorted(times)
    tenth = len(ordered) // 10
    return f"{statistics.median(ordered):.1f} ({ordered[tenth]:.1f} to {ordered[-1 - tenth]:.1f})"


def one_gpu(args: argparse.Namespace) -> list[str]:
    import torch

    from fabric_core import TransferEngine
    from fabric_moe import MoeGroup, Table

    rate = copy_rate()
    lines = [
        f"{torch.cuda.get_device_name()}, {args.ranks} ranks on it in one process, {args.dtype}, {args.view}",
        f"copy: {rate:.0f} GB/s read and written; the smallest kernel: {floor():.1f} us",
        "",
        "| tokens | kernel | median (10 % to 90 %), us | bytes | bound, us | asked: 1.5 x bound + 3 | reached |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for tokens in map(int, args.tokens.split(",")):
        with TransferEngine.open() as engine:
            config = config_of(args, args.ranks, tokens)
            groups = MoeGroup.open_many([engine], config, range(args.ranks), Table(), device="cuda:0")
            ranks = [Rank(args, group, tokens) for group in groups]

            def run(rounds: int, ranks: list[Rank] = ranks) -> None:
                for _ in range(rounds):
                    for halves in zip(*(rank.halves() for rank in ranks), strict=True):
                        for half in halves:
                            half()

            run(5)
            torch.cuda.synchronize()
            rounds = max(5, args.rounds // (4 if tokens > 1024 else 1))
            times = kernel_times(lambda rounds=rounds: run(rounds))  # type: ignore[misc]
            all_bytes = [rank.traffic() for rank in ranks]
            for kernel in KERNELS:
                moved = statistics.mean(t[kernel] for t in all_bytes)
                bound = moved / rate / 1e3
                got = statistics.median(times[kernel])
                limit = 1.5 * bound + 3
                reached = "yes" if got <= limit else "NO"
                cells = [str(tokens), kernel, spread(times[kernel]), f"{moved / 1e6:.2f} M", f"{bound:.2f}"]
                lines.append(f"| {' | '.join(cells)} | {limit:.1f} | {reached} |")
            for group in groups:
                group.check()
                group.close()
            del ranks
            torch.cuda.empty_cache()
    return lines


def worker(args: argparse.Namespace, rank: int, board: str, pipe: Any) -> None:
    """One GPU of several: whole steps in a graph, and the kernels' own times."""
    import torch

    from fabric_core import TransferEngine
    from fabric_core.bootstrap import open_board
    from fabric_moe import MoeGroup

    torch.cuda.set_device(rank)
    lines = []
    for tokens in map(int, args.tokens.split(",")):
        with TransferEngine.open() as engine:
            config = config_of(args, args.gpus, tokens)
            group = MoeGroup.open(
                engine, config, rank, open_board(board), job=f"t{tokens}", device=f"cuda:{rank}", timeout=120
            )
            mine = Rank(args, group, tokens)

            def step(mine: Rank = mine) -> None:
                for half in mine.halves():
                    half()

            for _ in range(6):
                step()
            torch.cuda.synchronize()
            graph, steps = torch.cuda.CUDAGraph(), 10
            with torch.cuda.graph(graph):
                for _ in range(steps):
                    step()
            graph.replay()
            torch.cuda.synchronize()
            whole = []
            for _ in range(args.rounds):
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                graph.replay()
                end.record()
                torch.cuda.synchronize()
                whole.append(begin.elapsed_time(end) * 1e3 / steps)

            def replays(graph: Any = graph) -> None:
                for _ in range(args.rounds):
                    graph.replay()

            times = kernel_times(replays)
            group.check()
            bytes_of = mine.traffic()
            away = (args.gpus - 1) / args.gpus
            bound = [bytes_of[key] * away / args.link / 1e3 for key in ("out", "back")]
            medians = " | ".join(f"{statistics.median(times[name]):.1f}" for name in KERNELS)
            lines.append(f"| {tokens} | {spread(whole)} | {medians} | {bound[0]:.1f} / {bound[1]:.1f} |")
            group.close()
    pipe.send(lines if rank == 0 else [])


def several_gpus(args: argparse.Namespace) -> list[str]:
    import torch

    if torch.cuda.device_count() < args.gpus:
        sys.exit(f"--gpus {args.gpus}: there are {torch.cuda.device_count()}")
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for rank in range(args.gpus):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=worker, args=(args, rank, f"file:{folder}/board", theirs))
            process.start()
            theirs.close()
            started.append((process, ours))
        lines = [line for _, pipe in started for line in pipe.recv()]
        for process, _ in started:
            process.join()
    return [
        f"{args.gpus} x {torch.cuda.get_device_name()}, a process for each, {args.dtype}, {args.view}; rank 0",
        f"link {args.link:.0f} GB/s; a step is one of ten in a graph",
        "",
        "| tokens | step, us (10 % to 90 %) | dispatch send | recv | combine send | recv | bytes out / back, us |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *lines,
    ]


def main() -> None:
    args = parse()
    lines = one_gpu(args) if args.gpus == 1 else several_gpus(args)
    text = "\n".join(lines)
    print(text, flush=True)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
