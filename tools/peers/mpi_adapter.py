"""MPI's one-sided operations (Open MPI): windows locked for all, Rput.

MPI tells nobody of a finished Rput, so the usual substitute is measured: flush, put a counter, flush; the target looks
at that word of its window. Started without mpiexec, this starts mpiexec.
"""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from adapter import Adapter, anonymous
from harness import main, orderly, parse, scratch

_RANK = "OMPI_COMM_WORLD_RANK"


class Mpi(Adapter):
    name = "mpi"
    distribution = "openmpi"

    def open(self, role: str, nbytes: int) -> None:
        np: Any = importlib.import_module("numpy")
        self.mpi: Any = importlib.import_module("mpi4py.MPI")
        world = self.world = self.mpi.COMM_WORLD
        self.other = 1 - world.rank
        self.memory = anonymous(nbytes)
        self.bytes = np.frombuffer(self.memory, dtype=np.uint8)
        self.window = self.mpi.Win.Create(self.memory, 1, comm=world)
        self.counter = np.zeros(1, dtype=np.uint64)  # the other side writes it
        self.raised = np.zeros(1, dtype=np.uint64)
        self.counters = self.mpi.Win.Create(self.counter, 8, comm=world)
        self.window.Lock_all()
        self.counters.Lock_all()
        self.seen = 0
        self.types: tuple[Any, ...] = ()

    def connect(self, other: None) -> None:
        self.world.Barrier()

    def close(self) -> None:
        self.world.Barrier()
        self.window.Unlock_all()
        self.counters.Unlock_all()

    def write(self, offset: int, nbytes: int) -> Any:
        return self.window.Rput(self.bytes[offset : offset + nbytes], self.other, offset)

    def done(self, operation: Any) -> bool:
        return bool(operation.Test())

    def notify(self) -> None:
        self.window.Flush(self.other)
        self.raised[0] += 1
        self.counters.Put(self.raised, self.other, 0)
        self.counters.Flush(self.other)

    def progress(self) -> None:
        self.world.Iprobe(self.other, 1)

    def poll(self) -> int:
        self.counters.Sync()
        self.progress()
        before, self.seen = self.seen, int(self.counter[0])
        return self.seen - before

    def write_notify(self, offset: int, nbytes: int) -> None:
        self.window.Put(self.bytes[offset : offset + nbytes], self.other, offset)
        self.notify()

    def paged(self, page: int, here: Sequence[int], there: Sequence[int]) -> tuple[Callable[[], Any], int]:
        """Return one Rput between two datatypes, each naming its side's pages."""
        for old in self.types:
            old.Free()
        source, target = self.types = tuple(
            self.mpi.BYTE.Create_hindexed_block(page, [k * page for k in pages]).Commit() for pages in (here, there)
        )
        return lambda: self.window.Rput([self.bytes, 1, source], self.other, [0, 1, target]), 0

    def register(self, memory: Any) -> Any:
        return self.mpi.Win.Create(memory, 1, comm=self.mpi.COMM_SELF)

    def deregister(self, registration: Any) -> None:
        registration.Free()


def _mpiexec(directory: Path) -> int:
    """Run two of us. Open MPI's own one-sided component is the one that works here: the UCX one wants a NIC."""
    beside = Path(sys.executable).with_name("mpiexec")
    orderly()
    program = str(beside) if beside.exists() else "mpiexec"
    options = ["-n", "2", "--bind-to", "none", "--mca", "osc", "^ucx"]
    environment = os.environ | {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command = [program, *options, sys.executable, *sys.argv, "--directory", str(directory)]
    try:
        return subprocess.run(command, env=environment, check=False).returncode
    finally:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    chosen = parse()
    if _RANK not in os.environ:
        sys.exit(_mpiexec(scratch()))
    chosen.target = os.environ[_RANK] == "1"
    main(chosen, Mpi, started=True)
