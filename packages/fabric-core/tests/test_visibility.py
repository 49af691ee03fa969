"""C10 without the mercy of a callback's delay: a receiver that polls looks at the last bytes in the next moment."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from fabric_core import MrDesc, TransferEngine

ROUNDS = 60

SENDER = """
import sys
from fabric_core import MrDesc, TransferEngine
path, length, nics = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
engine = TransferEngine.open(nics=nics, local_path=path)
memory = engine.empty(length)
handle, _ = engine.reg_mr(memory)
_, mine = engine.reg_mr(bytearray(8))
turn = engine.alloc_imm()
print(mine.to_bytes().hex(), turn, flush=True)
blob, imm = sys.stdin.readline().split()
desc = MrDesc.from_bytes(bytes.fromhex(blob))
for number in range(1, int(sys.argv[4]) + 1):
    memory[:] = bytes([number]) * length
    engine.expect_imm_count(turn, 1, timeout=30).wait(30)
    engine.submit_single_write(length, int(imm), (handle, 0), (desc, 0)).wait(30)
"""


@pytest.mark.parametrize("nics", [1, 2])
@pytest.mark.parametrize(("path", "length"), [("map", 4 << 20), ("cma", 4 << 20), ("bounce", 4 << 20), ("map", 48_000)])
def test_c10_when_the_count_is_seen_the_last_byte_is_there(path: str, length: int, nics: int) -> None:
    command = [sys.executable, "-c", SENDER, path, str(length), str(nics), str(ROUNDS)]
    with (
        TransferEngine.open(nics=nics, local_path=path) as engine,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as sender,
    ):
        assert sender.stdin is not None
        assert sender.stdout is not None
        memory = engine.empty(length)
        handle, desc = engine.reg_mr(memory)
        imm = engine.alloc_imm()
        blob, turn = sender.stdout.readline().split()
        theirs = MrDesc.from_bytes(bytes.fromhex(blob))
        sender.stdin.write(f"{desc.to_bytes().hex()} {imm}\n")
        sender.stdin.flush()
        ends = [length - 1, length // 2, length // nics - 1, 0]  # the end of each NIC's shard among them
        try:
            for number in range(1, ROUNDS + 1):
                engine.submit_single_write(0, int(turn), (handle, 0), (theirs, 0))
                limit = time.monotonic() + 30
                while engine.imm_count(imm) < number:
                    assert time.monotonic() < limit, f"round {number} never came"
                seen = [memory[at] for at in ends]
                assert seen == [number] * len(ends), f"round {number}: counted before it was there"
        finally:
            sender.kill()
