"""Ten million writes over four NICs that reorder on purpose: are callbacks lost, doubled, or early?

    python tools/bench/soak.py --writes 10000000

Two processes. The sender submits single writes of one word each, with an immediate and a callback each; a ledger
counts the callbacks of every write. The receiver waits for each batch by one expectation, whose callback looks at every
word at once: a word that is not there yet would be an early callback. The sender begins the next batch in the same
place only when the receiver has answered. Exit code 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from functools import partial
from typing import Any

import numpy as np

from fabric_core import Expectation, MrDesc, NetAddr, Transfer, TransferEngine

BATCH = 4096
WORD = 8
LANES = 4  # batches under way at once


def open_engine(args: argparse.Namespace, seed: int) -> TransferEngine:
    return TransferEngine.open(nics=args.nics, local_shuffle=seed, timeout=60.0, max_inflight=1 << 18)


def say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def receive(args: argparse.Namespace) -> int:
    """The other process: expects batches, checks them in the callback, answers each with a message."""
    engine = open_engine(args, args.seed + 1)
    memory = engine.empty(LANES * BATCH * WORD)
    words = np.frombuffer(memory, dtype=np.uint64).reshape(LANES, BATCH)
    _handle, desc = engine.reg_mr(memory)
    imms = [engine.alloc_imm() for _ in range(LANES)]
    say(desc=desc.to_bytes().hex(), imms=imms)
    sender = NetAddr.parse(json.loads(sys.stdin.readline())["addr"])
    wrong = {"early": 0, "failed": 0, "fired": 0}

    def arrived(batch: int, expectation: Expectation) -> None:
        wrong["fired"] += 1
        if expectation.exception() is not None:
            wrong["failed"] += 1
            return
        lane = batch % LANES
        wrong["early"] += int(np.count_nonzero(words[lane] != batch + 1))
        if batch + LANES < args.batches:
            expect(batch + LANES)
        engine.submit_send(sender, batch.to_bytes(8, "little"))

    def expect(batch: int) -> None:
        engine.expect_imm_count(imms[batch % LANES], BATCH, partial(arrived, batch), peers=[sender])

    for batch in range(min(LANES, args.batches)):
        expect(batch)
    json.loads(sys.stdin.readline())  # the sender is through
    surplus = [engine.free_imm(imm) for imm in imms]
    stray = engine.stats()["imm_stray"]
    say(**wrong, surplus=sum(surplus), stray=stray)
    engine.close()
    return 0


def send(args: argparse.Namespace) -> dict[str, Any]:
    """Submit everything, keep the ledger."""
    engine = open_engine(args, args.seed)
    command = [sys.executable, __file__, "--role", "receiver", "--writes", str(args.writes), "--nics", str(args.nics)]
    peer = subprocess.Popen(
        [*command, "--seed", str(args.seed)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert peer.stdin is not None
    assert peer.stdout is not None
    hello = json.loads(peer.stdout.readline())
    desc, imms = MrDesc.from_bytes(bytes.fromhex(hello["desc"])), hello["imms"]
    memory = engine.empty(LANES * BATCH * WORD)
    words = np.frombuffer(memory, dtype=np.uint64).reshape(LANES, BATCH)
    handle, _ = engine.reg_mr(memory)
    ledger = bytearray(args.batches * BATCH)
    failed: list[str] = []
    answered = bytearray(args.batches)

    def ended(number: int, transfer: Transfer) -> None:
        ledger[number] += 1
        error = transfer.exception()
        if error is not None and len(failed) < 10:
            failed.append(str(error))

    def answer(message: bytes) -> None:
        answered[int.from_bytes(message, "little")] += 1

    pool = engine.submit_recvs(WORD, 4 * LANES, answer)
    peer.stdin.write(json.dumps({"addr": str(engine.address)}) + "\n")
    peer.stdin.flush()
    begin = time.monotonic()
    for batch in range(args.batches):
        lane = batch % LANES
        before = batch - LANES
        limit = time.monotonic() + 60
        while before >= 0 and not (answered[before] and all(ledger[before * BATCH : (before + 1) * BATCH])):
            if time.monotonic() > limit:
                raise SystemExit(f"batch {before} hangs: answered {answered[before]}, {failed}, {engine.stats()}")
            time.sleep(0.0002)
        words[lane] = batch + 1
        first = lane * BATCH
        for i in range(BATCH):
            at = (first + i) * WORD
            engine.submit_single_write(WORD, imms[lane], (handle, at), (desc, at), partial(ended, batch * BATCH + i))
        if sys.stderr.isatty() and batch % 32 == 0:
            print(f"\r{(batch + 1) * BATCH / 1e6:.1f} million", end="", file=sys.stderr)
    limit = time.monotonic() + 60
    while not (all(answered) and all(ledger)) and time.monotonic() < limit:
        time.sleep(0.01)
    seconds = time.monotonic() - begin
    peer.stdin.write(json.dumps({"done": True}) + "\n")
    peer.stdin.flush()
    theirs = json.loads(peer.stdout.readline())
    peer.wait(30)
    pool.close()
    stats = engine.stats()
    engine.close()
    return {
        "writes": args.batches * BATCH,
        "nics": args.nics,
        "seed": args.seed,
        "seconds": round(seconds, 1),
        "lost": ledger.count(0),
        "doubled": sum(1 for n in set(ledger) if n > 1 for _ in range(ledger.count(n))),
        "failed": failed,
        "batches_answered_once": answered.count(1),
        "batches": args.batches,
        "early_words": theirs["early"],
        "expectations_failed": theirs["failed"],
        "expectations_fired": theirs["fired"],
        "surplus": theirs["surplus"],
        "stray": theirs["stray"],
        "work_requests": stats["wrs"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--writes", type=int, default=10_000_000)
    parser.add_argument("--nics", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--role", choices=["sender", "receiver"], default="sender", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.batches = max(1, -(-args.writes // BATCH))
    if args.role == "receiver":
        return receive(args)
    result = send(args)
    print(json.dumps(result, indent=2))
    good = (
        not result["lost"] and not result["doubled"] and not result["failed"] and not result["early_words"]
        and not result["surplus"] and not result["stray"] and not result["expectations_failed"]
        and result["expectations_fired"] == result["batches_answered_once"] == result["batches"]
    )  # fmt: skip
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
