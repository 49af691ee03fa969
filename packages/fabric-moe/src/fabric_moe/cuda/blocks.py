"""How many blocks and threads a kernel gets, and how tokens are shared out among the blocks of dispatch_send."""

from __future__ import annotations

from fabric_moe.cuda.generation import GpuGeneration

__all__ = ["THREADS", "each_of", "each_sent", "recv_grid", "send_grid", "sums_grid"]

THREADS, _ALONE = 512, 256  #: of a block, and of one that sends one token, as in the kernels
_BLOCKS_EACH = 2  # per multiprocessor
_PART = 4 * 32 * 16  # bytes of a row that a warp has under way at a time


def each_of(gen: GpuGeneration, tokens: int) -> int:
    """Return how many tokens a block takes: a power of two, so that all blocks run at once."""
    blocks, each = _BLOCKS_EACH * gen.device.multiprocessors, 1
    while -(-tokens // each) > blocks:
        each *= 2
    return each


def each_sent(gen: GpuGeneration, tokens: int) -> int:
    """Return how many tokens a block of dispatch_send takes: fewer where they do not fit into a block's memory."""
    each, parts = each_of(gen, tokens), gen.layout.row_parts
    while parts and -(-tokens // each) > parts:  # more blocks than marks
        each *= 2
    while each > 1 and gen.layout.send_shared(each) > gen.device.shared_limit:
        each //= 2
    return each


def send_grid(gen: GpuGeneration, tokens: int) -> tuple[str, int, int, int, int]:
    """Return which kernel sends tokens, blocks and their threads, tokens of a block, and n: 2^n blocks share a token.

    Blocks that share tokens each serve some of the ranks. One block, or so many, have no token.
    """
    busy = gen.device.multiprocessors
    if gen.config.topk > 32 or tokens + 1 > _BLOCKS_EACH * busy:  # a warp does not hold the ids of a token; many tokens
        each = each_sent(gen, tokens)
        return "moe_dispatch_send", -(-tokens // each) + 1, THREADS, each, 0
    split = 0
    while 1 << split < min(gen.config.ranks, 32) and tokens + 1 << split + 1 <= busy:
        split += 1
    return "moe_dispatch_send_one", tokens + 1 << split, _ALONE, 1, split


def _grid(gen: GpuGeneration, rows: int) -> int:
    """Return the blocks for at most so many rows."""
    return max(1, min(_BLOCKS_EACH * gen.device.multiprocessors, rows))


def recv_grid(gen: GpuGeneration, rows: int) -> tuple[int, int]:
    """Return the blocks of dispatch_recv, and their threads: few where each has a row at most, as every warp costs."""
    blocks = _grid(gen, rows)
    if blocks < rows:
        return blocks, THREADS
    ranks, warps = gen.config.ranks, 4
    while warps * _PART < gen.config.token_bytes:
        warps *= 2
    marks = -(-ranks // 32) * 32 + -(-ranks * gen.layout.row_parts // 128) * 32  # a thread for each four
    return blocks, min(max(32 * warps, marks), THREADS)


def sums_grid(gen: GpuGeneration, rows: int) -> int:
    """Return the blocks of combine_send: no more than there are marks for, and the one that writes a word."""
    blocks, parts = _grid(gen, rows), gen.layout.sum_parts
    return min(blocks, parts + 1) if parts else blocks
