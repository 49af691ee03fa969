"""verl's checkpoint engine `fabric`: every actor rank sends its share of the buckets, point to point.

    actor_rollout_ref.rollout.checkpoint_engine.backend=fabric
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=fabric_rlweights.verl

Importing this module imports verl, and registers the engine there. See docs/engines.md.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Any

import msgspec
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry  # type: ignore[import-not-found]

from fabric_rlweights.stream import Member, receive, send
from fabric_rlweights.stream.member import new_session
from fabric_rlweights.stream.words import Card

__all__ = ["FabricCheckpointEngine"]


@CheckpointEngineRegistry.register("fabric")
class FabricCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """One rank, of the actor or of a rollout.

    verl gives `bucket_size` (bytes, from update_weights_bucket_megabytes) and `is_master`; the others are
    `engine_kwargs.fabric`.

    Args:
        slots, device, backend, timeout: of fabric_rlweights.stream.Member.
    """

    def __init__(
        self, bucket_size: int, is_master: bool = False, *, slots: int = 2, device: str = "auto",
        backend: str | None = None, timeout: float = 300.0,
    ) -> None:  # fmt: skip
        self.is_master = is_master
        self.member = Member(bucket_size, slots=slots, device=device, backend=backend, timeout=timeout)

    def prepare(self) -> dict[str, Any]:
        found: dict[str, Any] = msgspec.to_builtins(self.member.prepare(), builtin_types=(bytes,))
        return found

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        actors, rollouts = metadata[:actor_wg_world_size], metadata[actor_wg_world_size:]
        session = new_session()

        def told(role: str, ranks: int) -> dict[str, list[Any]]:
            return {
                "session": [session] * ranks, "role": [role] * ranks, "rank": list(range(ranks)),
                "senders": [actors] * ranks, "receivers": [rollouts] * ranks,
            }  # fmt: skip

        return told("sender", actor_wg_world_size), told("receiver", rollout_world_size)

    def init_process_group(
        self, session: int, role: Any, rank: int, senders: list[dict[str, Any]], receivers: list[dict[str, Any]]
    ) -> None:
        self.member.join(
            session, role, rank, msgspec.convert(senders, list[Card]), msgspec.convert(receivers, list[Card])
        )

    def finalize(self) -> None:
        self.member.leave()

    async def send_weights(
        self, weights: Iterable[tuple[str, Any]], global_steps: int | None = None
    ) -> dict[str, float]:
        """Send; metrics of rank 0 are those of the whole update. Raises StreamFailed."""
        stats = await send(self.member, weights)
        if self.member.rank:
            return {}
        return {f"fabric/update_{name}": value for name, value in stats.items()}

    def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, Any]]:
        """Give (name, tensor), on the rank's device. A tensor may be a view of a bucket. Raises StreamFailed."""
        return receive(self.member)
