"""What kernels and the proxy say went wrong where tokens on a GPU travel through the engine."""

from __future__ import annotations

import ctypes

from fabric_core import FabricError
from fabric_moe.cuda.report import Report
from fabric_moe.errors import RankLost
from fabric_moe.gpu_nic.layout import MAIL
from fabric_moe.gpu_nic.memory import NicMemory
from fabric_moe.gpu_nic.proxy import NicProxy

__all__ = ["NicReport"]

_NOTED_AT = MAIL - 8  # in `struct Mail` of words.cuh: the last word


class NicReport(Report):
    """Reads the words of one generation, and asks its proxy."""

    proxy: NicProxy | None = None

    def __init__(self, memory: NicMemory, rank: int, experts: int, where: dict[int, str]) -> None:
        super().__init__(memory.words, rank, experts, where)
        self._noted = ctypes.c_uint64.from_address(memory.mail + _NOTED_AT)

    @property
    def over(self) -> bool:
        """Whether the group takes no further step."""
        return super().over or self._of_proxy() is not None

    def error(self) -> FabricError | None:
        """Return what was said since the last time, None if nothing was. What ends a group is said again and again."""
        return self._of_proxy() or super().error()

    def _lost(self) -> RankLost:
        found = super()._lost()
        if self._noted.value >> self._rank & 1:
            return RankLost(
                f"{found}. Another rank gave up because of this one, whose part of a step did not come there in time, "
                "or was none: its own error says which", ranks=found.ranks,
            )  # fmt: skip
        if found.ranks != (self._rank,):
            return found
        return RankLost(
            f"{found}. All the others have done their part: this rank's own engine did not get to it in time. Where an "
            "engine copies by kernels (`local`), a call of CUDA that waits for the whole device, or loads a module "
            "while a step is under way, keeps it from that: set CUDA_MODULE_LOADING=EAGER", ranks=found.ranks,
        )  # fmt: skip

    def _of_proxy(self) -> FabricError | None:
        return None if self.proxy is None else self.proxy.error()
