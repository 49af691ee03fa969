"""fabric itself, over memory of the engine's own (`engine`) or of the user's (`user`)."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

from adapter import Adapter, anonymous
from harness import main, parse

from fabric_core import MrDesc, MrHandle, Pages, Transfer, TransferEngine


class Fabric(Adapter):
    """Default settings. The target polls its immediate's count; a page list is one call and counts by page."""

    distribution = "fabric-core"

    def __init__(self, variant: str) -> None:
        self.name = "fabric" if variant == "engine" else "fabric-user"
        self.own = variant == "engine"

    def open(self, role: str, nbytes: int) -> tuple[bytes, int]:
        self.engine = TransferEngine.open()
        self.memory = self.allocate(nbytes)
        self.handle, desc = self.engine.reg_mr(self.memory)
        self.imm = self.engine.alloc_imm()
        self.counted = 0
        self.progress = self.engine.progress  # type: ignore[assignment, method-assign]
        return desc.to_bytes(), self.imm

    def connect(self, other: tuple[bytes, int]) -> None:
        desc, self.remote_imm = other
        self.remote = MrDesc.from_bytes(desc)

    def write(self, offset: int, nbytes: int) -> Transfer:
        return self.engine.submit_single_write(nbytes, None, (self.handle, offset), (self.remote, offset))

    def done(self, operation: Transfer) -> bool:
        if not operation.done:
            return False
        if operation.state != "done":
            operation.wait()
        return True

    def notify(self) -> None:
        self.engine.submit_barrier(None, None, self.remote_imm, [self.remote])

    def poll(self) -> int:
        before, self.counted = self.counted, self.engine.imm_count(self.imm)
        return self.counted - before

    def write_notify(self, offset: int, nbytes: int) -> None:
        self.engine.submit_single_write(nbytes, self.remote_imm, (self.handle, offset), (self.remote, offset))

    def paged(self, page: int, here: Sequence[int], there: Sequence[int]) -> tuple[Callable[[], Transfer], int]:
        source = (self.handle, Pages(array("I", here), page))
        target = (self.remote, Pages(array("I", there), page))

        def post() -> Transfer:
            return self.engine.submit_paged_writes(page, self.remote_imm, source, target)

        return post, len(here)

    def allocate(self, nbytes: int) -> Any:
        if not self.own:
            return anonymous(nbytes)
        memory = self.engine.empty(nbytes)
        for offset in range(0, nbytes, 4096):
            memory[offset] = 0
        return memory

    def register(self, memory: Any) -> MrHandle:
        return self.engine.reg_mr(memory)[0]

    def deregister(self, registration: MrHandle) -> None:
        registration.close()


if __name__ == "__main__":
    chosen = parse(("engine", "user"))
    main(chosen, lambda: Fabric(chosen.variant))
