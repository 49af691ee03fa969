"""A prefiller for test_many.py: `many_peer.py COUNT`. At each line: until so many requests wait, then serve so many."""

from __future__ import annotations

import sys

import numpy as np

from fabric_core import TransferEngine
from fabric_kvcache import KvLayout, Prefiller

LAYOUT = KvLayout(layers=1, kv_heads=1, head_dim=4, page_tokens=2)


def main() -> None:
    count = int(sys.argv[1])
    with (
        TransferEngine.open(imm_slots=1 << 17) as engine,
        Prefiller(engine, LAYOUT, pages=64, tail_bytes=8, max_waiting=count, max_jobs=32) as prefiller,
    ):
        print(engine.address, flush=True)
        for line in sys.stdin:
            waiting, serve = map(int, line.split())
            with prefiller._changed:
                while len(prefiller._whole) != waiting:
                    assert prefiller._changed.wait(60)
            print(f"waiting {len(prefiller._whole)}", flush=True)
            for _ in range(serve):
                with prefiller.next(30) as job:
                    kv = np.full((1, 1, 4), job.tokens[0], np.float32)
                    job.push_layer(0, 0, kv, kv)
                    job.push_tail(np.array([job.tokens[0]], np.uint64).data)
            print(f"left {len(prefiller._targets)} {len(prefiller._waiting)} {prefiller.pool.free}", flush=True)


if __name__ == "__main__":
    main()
