"""What GPU tests and benchmarks share: memory by the driver, and a process at the other end.

Run as a program it is that process. The driver is the one of FABRIC_CUDA_LIBRARY, or the real one.
"""

from __future__ import annotations

import base64
import ctypes
import hashlib
import json
import os
import subprocess
import sys
from typing import Any

__all__ = ["Driver", "Memory", "Side"]


class Driver:
    """cuMemAlloc and cuMemcpy, by ctypes."""

    def __init__(self) -> None:
        self.lib = ctypes.CDLL(os.environ.get("FABRIC_CUDA_LIBRARY") or "libcuda.so.1")
        self._context = ctypes.c_void_p()
        assert self.lib.cuInit(0) == 0
        assert self.lib.cuDevicePrimaryCtxRetain(ctypes.byref(self._context), 0) == 0
        self.enter()

    def enter(self) -> None:
        """Make the primary context current in this thread."""
        assert self.lib.cuCtxSetCurrent(self._context) == 0

    def alloc(self, nbytes: int) -> int:
        """Return the address of new GPU memory."""
        out = ctypes.c_uint64()
        assert self.lib.cuMemAlloc_v2(ctypes.byref(out), ctypes.c_size_t(nbytes)) == 0
        return out.value

    def free(self, ptr: int) -> None:
        """Give it back."""
        assert self.lib.cuMemFree_v2(ctypes.c_uint64(ptr)) == 0

    def put(self, ptr: int, data: bytes) -> None:
        """Copy to the GPU."""
        held = ctypes.create_string_buffer(data, len(data))
        rc = self.lib.cuMemcpy(
            ctypes.c_uint64(ptr), ctypes.c_uint64(ctypes.addressof(held)), ctypes.c_size_t(len(data))
        )
        assert rc == 0, rc

    def get(self, ptr: int, nbytes: int) -> bytes:
        """Copy from the GPU."""
        held = ctypes.create_string_buffer(nbytes)
        rc = self.lib.cuMemcpy(ctypes.c_uint64(ctypes.addressof(held)), ctypes.c_uint64(ptr), ctypes.c_size_t(nbytes))
        assert rc == 0, rc
        return held.raw

    def synchronize(self) -> None:
        """Wait for all of the context."""
        assert self.lib.cuCtxSynchronize() == 0


class Memory:
    """`nbytes` of one kind, all alike to the tests: "gpu", "empty" (shared host memory), "heap"."""

    def __init__(self, engine: Any, kind: str, nbytes: int, driver: Driver | None) -> None:
        self.kind, self.nbytes, self.driver = kind, nbytes, driver
        self.what: Any
        if kind == "gpu":
            assert driver is not None
            self.ptr = driver.alloc(nbytes)
            self.what = (self.ptr, nbytes, "cuda:0")
            driver.put(self.ptr, bytes(nbytes))
        else:
            self.what = engine.empty(nbytes) if kind == "empty" else bytearray(nbytes)

    def put(self, data: bytes) -> None:
        """Overwrite all of it."""
        if self.kind == "gpu":
            assert self.driver is not None
            self.driver.put(self.ptr, data)
        else:
            memoryview(self.what)[:] = data

    def get(self) -> bytes:
        """Return all of it."""
        if self.kind == "gpu":
            assert self.driver is not None
            return self.driver.get(self.ptr, self.nbytes)
        return bytes(memoryview(self.what))


class Side:
    """The process at the other end."""

    def __init__(self, device: str, **env: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "fabric_core.conformance.gpu_side", device],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **env},
        )  # fmt: skip
        self.address = str(self.read()["address"])

    def read(self) -> dict[str, Any]:
        """Return its next line."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the other process ended with {self.process.wait(10)}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def send(self, do: str, **fields: Any) -> None:
        """Tell it to do something."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **fields}) + "\n")
        self.process.stdin.flush()

    def ask(self, do: str, **fields: Any) -> dict[str, Any]:
        """Tell it, and return its answer."""
        self.send(do, **fields)
        return self.read()

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait(10)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def main(device: str) -> None:
    """Be the other end: orders on stdin, answers on stdout."""
    from fabric_core import TransferEngine

    driver = Driver() if device.startswith("cuda") else None
    made: dict[int, Any] = {}
    with TransferEngine.open(device, "local", heartbeat=0.5) as engine:

        def say(**fields: Any) -> None:
            print(json.dumps(fields), flush=True)

        say(address=str(engine.address))
        for line in sys.stdin:
            order = json.loads(line)
            do = order["do"]
            if do == "make":
                memory = Memory(engine, order["kind"], order["nbytes"], driver)
                handle, desc = engine.reg_mr(memory.what)
                imm = engine.alloc_imm()
                made[imm] = memory, handle
                say(desc=base64.b64encode(desc.to_bytes()).decode(), imm=imm)
            elif do == "expect":
                try:
                    engine.expect_imm_count(order["imm"], order["count"]).wait(order["within"])
                except Exception as error:
                    say(error=repr(error))
                    continue
                say(digest=hashlib.sha256(made[order["imm"]][0].get()).hexdigest())
            elif do == "digest":
                say(digest=hashlib.sha256(made[order["imm"]][0].get()).hexdigest())
            elif do == "dereg":
                engine.dereg_mr(made[order["imm"]][1])
                say(digest=hashlib.sha256(made[order["imm"]][0].get()).hexdigest())


if __name__ == "__main__":
    main(sys.argv[1])
