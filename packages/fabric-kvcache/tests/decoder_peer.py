"""A decoder as a process of its own, for the tests: `python decoder_peer.py NAME PREFILLER`. Asks for one prompt."""

from __future__ import annotations

import sys

from fabric_core import NetAddr, TransferEngine
from fabric_kvcache import Decoder, KvLayout


def main() -> None:
    name, prefiller = sys.argv[1:]
    layout = KvLayout(layers=2, kv_heads=1, head_dim=4, page_tokens=4)
    with TransferEngine.open(name=name) as engine, Decoder(engine, layout, pages=8, tail_bytes=4) as decoder:
        print(engine.address, flush=True)
        with decoder.submit(NetAddr.parse(prefiller), range(8), timeout=60).wait() as kv:
            print(f"received {kv.tokens} tokens", flush=True)
        sys.stdin.readline()


if __name__ == "__main__":
    main()
