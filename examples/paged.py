"""Paged writes: the pages of a KV cache go from where they lie here to where there is room over there.

    python examples/paged.py

One submit moves any number of pages; the receiver counts one immediate per page and need not know their order.
"""

from array import array

from fabric_core import Pages, TransferEngine

PAGE, HERE, THERE = 4096, 64, 128

with TransferEngine.open() as prefill, TransferEngine.open() as decode:
    mine, theirs = prefill.empty(HERE * PAGE), decode.empty(THERE * PAGE)
    for k in range(HERE):
        mine[k * PAGE : (k + 1) * PAGE] = bytes([k]) * PAGE

    handle, _ = prefill.reg_mr(mine)
    _target, desc = decode.reg_mr(theirs)
    imm = decode.alloc_imm()

    used = array("I", [3, 60, 17, 5])  # any buffer of 32-bit integers: array, numpy, torch
    free = array("I", [100, 7, 42, 8])
    arrived = decode.expect_imm_count(imm, len(used), timeout=10, peers=[prefill.address])
    prefill.submit_paged_writes(PAGE, imm, (handle, Pages(used, PAGE)), (desc, Pages(free, PAGE)))
    arrived.wait()

    for src, dst in zip(used, free, strict=True):
        assert theirs[dst * PAGE : (dst + 1) * PAGE] == bytes([src]) * PAGE
    print(f"{len(used)} pages of {PAGE} bytes arrived; surplus immediates: {decode.free_imm(imm)}")
