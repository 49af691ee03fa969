"""Does an engine grow while peers come and go (R9, R11)? One engine that stays, and one after the other that does not.

    python tools/bench/churn.py --peers 1800

Each short-lived engine registers memory, is written to and waited for, gets a message, and closes. Printed: this
process's anonymous memory after every 200 of them, and how many peers the engine remembers.
"""

from __future__ import annotations

import argparse
import gc
from pathlib import Path

from fabric_core import TransferEngine


def anonymous_kib() -> int:
    """Anonymous memory of this process in KiB, as the kernel counts it."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous"))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peers", type=int, default=1800)
    args = parser.parse_args()
    with TransferEngine.open("cpu", "local") as stays:
        mine, _ = stays.reg_mr(stays.empty(4096))
        for number in range(args.peers + 1):
            with TransferEngine.open("cpu", "local") as guest:
                got: list[bytes] = []
                guest.submit_recvs(256, 8, got.append)
                _handle, desc = guest.reg_mr(guest.empty(4096))
                imm = guest.alloc_imm()
                arrived = guest.expect_imm_count(imm, 1, timeout=5, peers=[stays.address])
                stays.submit_single_write(64, imm, (mine, 0), (desc, 0), None).wait(5)
                arrived.wait(5)
                stays.submit_send(guest.address, b"hello").wait(5)
            if number % 200 == 0:
                gc.collect()
                print(f"{number:5} peers: {anonymous_kib()} KiB, {len(stays.stats()['peers'])} remembered", flush=True)


if __name__ == "__main__":
    main()
