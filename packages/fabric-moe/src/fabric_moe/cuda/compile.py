"""Kernels for one shape: compiled by NVRTC when a group is opened, and kept on disk for the next time.

Whatever a shape needs is a constant of the code, so there is no list of shapes that work well.

Environment: FABRIC_CACHE is the folder of what was compiled (default: $XDG_CACHE_HOME/fabric, ~/.cache/fabric).
FABRIC_NVRTC names the library if it is not found.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fabric_core import BackendError, Unsupported

__all__ = ["SOURCES", "cubin", "source"]

log = logging.getLogger("fabric.moe")

SOURCES = (
    "common.cuh", "waiting.cuh", "tokens.cuh", "dispatch_one.cu", "dispatch_send.cu", "places.cuh",
    "dispatch_recv.cu", "combine.cu",
)  # fmt: skip
_OPTIONS = ("--std=c++17", "-lineinfo")


def source() -> str:
    """Return the text of all kernels."""
    here = Path(__file__).parent
    return "\n".join((here / name).read_text() for name in SOURCES)


def _candidates() -> list[str]:
    if named := os.environ.get("FABRIC_NVRTC"):
        return [named]
    found = []
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        found += [str(path) for path in sorted(Path(folder).glob("*/lib/libnvrtc.so.*"), reverse=True)]
    return [*found, "libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"]


@functools.cache
def _nvrtc() -> Any:
    tried = []
    for name in _candidates():
        try:
            for builtins in sorted(Path(name).parent.glob("libnvrtc-builtins.so.*")) if "/" in name else ():
                ctypes.CDLL(str(builtins))  # which NVRTC opens by its bare name
            return ctypes.CDLL(name)
        except OSError as error:
            tried.append(f"{name} ({error})")
    raise Unsupported(
        "NVRTC, which compiles the kernels, was not found: install nvidia-cuda-nvrtc (torch for CUDA brings it), or "
        f"name it by FABRIC_NVRTC. Tried: {'; '.join(tried)}"
    )


def _check(rc: int, what: str) -> None:
    if rc:
        lib = _nvrtc()
        lib.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise BackendError(f"{what}: {lib.nvrtcGetErrorString(rc).decode()}")


def _version() -> str:
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(_nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "nvrtcVersion")
    return f"{major.value}.{minor.value}"


def _compile(text: str, options: list[str]) -> bytes:
    lib = _nvrtc()
    program = ctypes.c_void_p()
    _check(
        lib.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"fabric_moe.cu", 0, None, None),
        "nvrtcCreateProgram",
    )
    try:
        words = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
        rc = lib.nvrtcCompileProgram(program, len(options), words)
        if rc:
            size = ctypes.c_size_t()
            lib.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            said = ctypes.create_string_buffer(size.value)
            lib.nvrtcGetProgramLog(program, said)
            raise BackendError(f"the kernels do not compile: {said.value.decode(errors='replace')[:2000]}")
        size = ctypes.c_size_t()
        _check(lib.nvrtcGetCUBINSize(program, ctypes.byref(size)), "nvrtcGetCUBINSize")
        image = ctypes.create_string_buffer(size.value)
        _check(lib.nvrtcGetCUBIN(program, image), "nvrtcGetCUBIN")
        return image.raw
    finally:
        lib.nvrtcDestroyProgram(ctypes.byref(program))


def _folder() -> Path:
    base = os.environ.get("FABRIC_CACHE")
    if base:
        return Path(base)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fabric"


def cubin(macros: Mapping[str, int], arch: str, text: str | None = None) -> bytes:
    """Return the kernels as machine code for `arch` ("sm_90") with these constants. text: of others than `source()`.

    What was compiled is read from disk if nothing changed: source, constants, compiler, options. A cache that cannot be
    used costs time and no more. Raises Unsupported without NVRTC, BackendError with what it said.
    """
    text = source() if text is None else text
    options = [
        *_OPTIONS,
        f"--gpu-architecture={arch}",
        *(f"-D{name}={value}" for name, value in sorted(macros.items())),
    ]
    key = hashlib.sha256("\0".join([text, *options, _version()]).encode()).hexdigest()
    path = _folder() / f"moe-{arch}-{key[:32]}.cubin"
    try:
        kept = path.read_bytes()
        if kept[:32] == hashlib.sha256(kept[32:]).digest():
            return kept[32:]
        log.warning("%s is damaged, and is made anew", path)
    except OSError:
        pass
    image = _compile(text, options)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            try:
                file.write(hashlib.sha256(image).digest() + image)
                file.flush()
                os.replace(file.name, path)
            except OSError:  # a full disk, say
                os.unlink(file.name)
                raise
    except OSError as error:
        log.info("the kernels are compiled anew each time, since %s cannot be written: %s", path.parent, error)
    return image
