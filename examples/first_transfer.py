"""The first transfer: one engine writes 1 MiB into the memory of another and raises an immediate there.

    python examples/first_transfer.py

Both engines live in this process to keep it short; between two processes, `desc.to_bytes()` and `imm` are what travels.
"""

from fabric_core import TransferEngine

SIZE = 1 << 20

with TransferEngine.open() as sender, TransferEngine.open() as receiver:
    source, target = sender.empty(SIZE), receiver.empty(SIZE)
    source[:] = bytes(range(256)) * (SIZE // 256)

    handle, _ = sender.reg_mr(source)
    _target, desc = receiver.reg_mr(target)  # the descriptor is what a peer needs to write here
    imm = receiver.alloc_imm()
    arrived = receiver.expect_imm_count(imm, 1)

    sent = sender.submit_single_write(SIZE, imm, (handle, 0), (desc, 0))
    arrived.wait()  # the receiver learns of it: all bytes are there
    sent.wait()  # the sender learns that it may reuse its memory

    assert target[:] == source[:]
    print(f"{SIZE} bytes went from {sender.address} to {receiver.address}")
