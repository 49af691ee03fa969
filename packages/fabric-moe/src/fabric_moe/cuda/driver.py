"""The few calls of the CUDA driver that the kernels need, by ctypes: memory, its handles, modules, launches.

Everything happens in the primary context of a device, which is torch's too.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fabric_core import BackendError, Unsupported

__all__ = ["Device", "Kernel", "device"]

_LIBRARY = "libcuda.so.1"
_PORTABLE_MAPPED = 3  # CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP
_LAZY_PEER = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_ALREADY_ENABLED = 704
_SHARED_LIMIT = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_MULTIPROCESSORS, _MAJOR, _MINOR, _SHARED_OPTIN = 16, 75, 76, 97
_HANDLE = 64


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * _HANDLE),)


@functools.cache
def _cuda() -> Any:
    try:
        lib = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise Unsupported(f"{_LIBRARY} cannot be loaded ({error}): tokens on GPUs need NVIDIA's driver") from None
    _call(lib, "cuInit", 0)
    return lib


def _call(lib: Any, name: str, *arguments: Any, allowed: tuple[int, ...] = ()) -> int:
    rc = int(getattr(lib, name)(*arguments))
    if rc and rc not in allowed:
        words = ctypes.c_char_p()
        lib.cuGetErrorString(rc, ctypes.byref(words))
        raise BackendError(f"{name}: {(words.value or b'unknown error').decode()} ({rc})")
    return rc


class Kernel:
    """A kernel of a module. `launch` costs a few microseconds of the host, and nothing in a graph."""

    def __init__(self, device: Device, function: Any) -> None:
        self._device = device
        self._function = function
        self._shared = 48 << 10

    def launch(self, grid: int, block: int, shared: int, stream: int, arguments: ctypes.Structure) -> None:
        """Queue it. `arguments` is the one structure that the kernel takes by value; shared: bytes of a block."""
        lib = self._device.lib
        with self._device.current():
            if shared > self._shared:
                _call(lib, "cuFuncSetAttribute", self._function, _SHARED_LIMIT, shared)
                self._shared = shared
            pointers = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
            _call(
                lib, "cuLaunchKernel", self._function, grid, 1, 1, block, 1, 1, shared, ctypes.c_void_p(stream),
                pointers, None,
            )  # fmt: skip


class Device:
    """GPU `number` of this process. Raises Unsupported without a driver, BackendError with the driver's words."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.lib = _cuda()
        handle = ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(handle), number)
        self._handle = handle
        context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
        self._context = context
        self.multiprocessors = self._attribute(_MULTIPROCESSORS)
        self.shared_limit = self._attribute(_SHARED_OPTIN) - 1024  # of a block; the kernels have some static words too
        self.arch = f"sm_{self._attribute(_MAJOR)}{self._attribute(_MINOR)}"

    def _attribute(self, which: int) -> int:
        value = ctypes.c_int()
        self.call("cuDeviceGetAttribute", ctypes.byref(value), which, self._handle)
        return value.value

    def call(self, name: str, *arguments: Any, allowed: tuple[int, ...] = ()) -> int:
        """Make a call of the driver; a code that is not allowed raises BackendError."""
        return _call(self.lib, name, *arguments, allowed=allowed)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Be in the device's primary context, and afterwards in the former one."""
        self.call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self.lib.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

    # ---- memory

    def allocate(self, nbytes: int) -> int:
        """Return the address of fresh memory, filled with zeros, that other processes may open."""
        at = ctypes.c_uint64()
        with self.current():
            self.call("cuMemAlloc_v2", ctypes.byref(at), ctypes.c_size_t(nbytes))
            self.call("cuMemsetD8_v2", at, 0, ctypes.c_size_t(nbytes))
            self.call("cuCtxSynchronize")
        return at.value

    def free(self, at: int) -> None:
        """Give memory of `allocate` back."""
        with self.current():
            self.call("cuMemFree_v2", ctypes.c_uint64(at))

    def put(self, at: int, data: bytes) -> None:
        """Copy bytes from the host, and wait for it."""
        with self.current():
            self.call("cuMemcpyHtoD_v2", ctypes.c_uint64(at), data, ctypes.c_size_t(len(data)))

    def get(self, at: int, nbytes: int) -> bytes:
        """Copy bytes to the host."""
        out = ctypes.create_string_buffer(nbytes)
        with self.current():
            self.call("cuMemcpyDtoH_v2", out, ctypes.c_uint64(at), ctypes.c_size_t(nbytes))
        return out.raw

    def host_words(self, nbytes: int) -> int:
        """Return the address of pinned host memory, zeros, which all GPUs reach under the same address."""
        at = ctypes.c_void_p()
        with self.current():
            self.call("cuMemHostAlloc", ctypes.byref(at), ctypes.c_size_t(nbytes), _PORTABLE_MAPPED)
        assert at.value is not None
        ctypes.memset(at.value, 0, nbytes)
        return at.value

    def free_host(self, at: int) -> None:
        """Give memory of `host_words` back."""
        with self.current():
            self.call("cuMemFreeHost", ctypes.c_void_p(at))

    def handle_of(self, at: int) -> bytes:
        """Return the handle by which another process opens memory of `allocate`."""
        handle = _Handle()
        with self.current():
            self.call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(at))
        return bytes(handle.bytes)

    def open_handle(self, handle: bytes) -> int:
        """Return the address, here, of memory that another process gave the handle of."""
        at, given = ctypes.c_uint64(), _Handle.from_buffer_copy(handle)
        with self.current():
            self.call("cuIpcOpenMemHandle_v2", ctypes.byref(at), given, _LAZY_PEER)
        return at.value

    def close_handle(self, at: int) -> None:
        """Undo `open_handle`."""
        with self.current():
            self.call("cuIpcCloseMemHandle", ctypes.c_uint64(at))

    def reach(self, other: Device) -> None:
        """Let kernels here use memory of another GPU of this process."""
        with self.current():
            self.call("cuCtxEnablePeerAccess", other._context, 0, allowed=(_ALREADY_ENABLED,))

    def synchronize(self) -> None:
        """Wait for everything that was queued on the device."""
        with self.current():
            self.call("cuCtxSynchronize")

    # ---- kernels

    def load(self, image: bytes) -> Any:
        """Return a module made of a cubin; it stays loaded."""
        module = ctypes.c_void_p()
        with self.current():
            self.call("cuModuleLoadData", ctypes.byref(module), image)
        return module

    def kernel(self, module: Any, name: str) -> Kernel:
        """Return a kernel of a module by its name."""
        function = ctypes.c_void_p()
        with self.current():
            self.call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
        return Kernel(self, function)


@functools.cache
def device(number: int) -> Device:
    """Return the one Device for a GPU of this process."""
    return Device(number)
