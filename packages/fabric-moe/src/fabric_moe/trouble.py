"""What a rank says when what others sent is wrong, or the engine takes nothing: the same from C and from Python."""

from __future__ import annotations

import errno
import os

from fabric_core import BackendError, EngineClosed, FabricError, ProtocolError, QueueFull
from fabric_moe.config import MoeConfig

__all__ = ["impossible_counts", "other_step", "other_sums", "overwritten", "refused"]


def other_step(rank: int, found: tuple[int, int], here: tuple[int, int]) -> ProtocolError:
    """Return the error of counts whose (generation, step) is not ours."""
    return ProtocolError(
        f"counts of rank {rank} are of generation {found[0]}, step {found[1]}; this rank is at generation {here[0]}, "
        f"step {here[1]}: do all ranks make the same calls in the same order?"
    )


def impossible_counts(rank: int, private: int, most: int, total: int, config: MoeConfig) -> ProtocolError:
    """Return the error of counts that no rank of this shape can have."""
    return ProtocolError(
        f"rank {rank} says that it sends {private} private rows, up to {most} to a rank and {total} in all; at most "
        f"{config.private_max}, {config.max_tokens} and {config.stage_rows} are agreed"
    )


def other_sums(rank: int, found: tuple[int, int], step: int) -> ProtocolError:
    """Return the error of sums whose (generation, step) is not ours."""
    return ProtocolError(f"sums of rank {rank} are of generation {found[0]}, step {found[1]}, not {step}")


def overwritten(rank: int, step: int) -> ProtocolError:
    """Return the error of our own counts, as they came back to us."""
    return ProtocolError(
        f"rank {rank}, step {step}: its own counts are not those that it sent; some other rank has written over them"
    )


def refused(rank: int, step: int, rc: int) -> FabricError:
    """Return why the engine has refused a scatter, by its negative errno."""
    what = f"rank {rank}, step {step}: its rows cannot be sent"
    if rc == -errno.EAGAIN:
        return QueueFull(f"{what}: the engine took no further work; see in engine.stats() which peer does not keep up")
    if rc == -errno.ESHUTDOWN:
        return EngineClosed(f"{what}: the engine, or this generation of the group, is closed")
    return BackendError(f"{what}: {os.strerror(-rc)}")
