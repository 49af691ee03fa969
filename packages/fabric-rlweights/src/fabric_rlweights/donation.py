"""A receiver's weights on their way to a peer that is late: beside everything else, and broken off when they change."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from fabric_core import MrDesc, MrHandle, Transfer, TransferEngine, WaitTimeout
from fabric_rlweights.memory import Span
from fabric_rlweights.protocol import Seed, Sent

__all__ = ["Donation"]


class Donation:
    """Writes on a thread of its own; says `Sent` when it has ended, however it did."""

    def __init__(
        self,
        engine: TransferEngine,
        rank: int,
        spans: list[Span],
        seed: Seed,
        digests: Callable[[], dict[int, int]],
        tell: Callable[[Any], None],
    ) -> None:
        """`spans`: this rank's tensors by number, only read. `digests`: of what lies in them."""
        self._engine, self._rank, self._spans, self._seed = engine, rank, spans, seed
        self._digests, self._tell = digests, tell
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"fabric-rl-donation{rank}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Break it off if it is under way; afterwards nothing reads the weights for it."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        seed, problem, culprit = self._seed, "", ""
        sums: dict[int, dict[int, int]] = {}
        handles: list[MrHandle] = []
        transfers: list[Transfer] = []
        try:
            for number, span in enumerate(self._spans):
                handle, _desc = self._engine.reg_mr(span.registered, write=False)
                handles.append(handle)
                desc = MrDesc.from_bytes(seed.descs[number])
                transfers.append(
                    self._engine.submit_single_write(
                        span.nbytes, seed.imm, (handle, 0), (desc, 0), timeout=seed.seconds
                    )
                )
            for transfer in transfers:
                self._wait(transfer)
            if seed.digests:
                sums = {seed.rank: self._digests()}
        except Exception as error:  # whatever it is, both sides wait to hear of it
            problem, culprit = f"{type(error).__name__}: {error}", str(getattr(error, "peer", None) or "")
            self._cancel(transfers)
        finally:
            for handle in handles:
                handle.close()
        nbytes = sum(span.nbytes for span in self._spans)
        if not self._engine.closed:
            self._tell(Sent(seed.attempt, self._rank, problem[:4000], culprit[:4000], sums, nbytes))

    def _wait(self, transfer: Transfer) -> None:
        while True:
            if self._over.is_set():
                raise InterruptedError("the weights are about to change, so they are given away no more")
            try:
                transfer.wait(0.1)
                return
            except WaitTimeout:  # each has a timeout of its own
                continue

    @staticmethod
    def _cancel(transfers: list[Transfer]) -> None:
        for transfer in transfers:
            transfer.cancel()
        for transfer in transfers:
            try:
                transfer.wait(5.0)
            except Exception:  # how it ended does not matter any more, that it ended does
                pass
