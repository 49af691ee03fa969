"""What the kernels of `gpu_nic` are given: structures passed by value, as the kernels have them."""

from __future__ import annotations

import ctypes

from fabric_moe.gpu_nic.generation import Nic

__all__ = ["Back", "Recv", "Send", "Sum"]


def _words(*names: str) -> list[tuple[str, type[ctypes.c_uint64]]]:
    return [(name, ctypes.c_uint64) for name in names]


class Send(ctypes.Structure):
    """`SendArgs` of pack.cu."""

    _fields_ = (
        ("c", Nic),
        *_words("x", "scales", "ids", "weights", "live"),
        ("tokens", ctypes.c_int32),
        ("given", ctypes.c_int32),
        ("wide", ctypes.c_int32),
    )


class Recv(ctypes.Structure):
    """`RecvArgs` of arrive.cu."""

    _fields_ = (
        ("c", Nic),
        *_words("tokens", "scales", "counts", "offsets", "starts", "plan", "local_ids", "weights", "expert_rows"),
        ("capacity", ctypes.c_int64),
        ("alignment", ctypes.c_int32),
        ("kind", ctypes.c_int32),
        ("held", ctypes.c_int32),
    )


class Back(ctypes.Structure):
    """`BackArgs` of sums.cu."""

    _fields_ = (("c", Nic), *_words("y", "plan"), ("weighted", ctypes.c_int32), ("flags", ctypes.c_int32))


class Sum(ctypes.Structure):
    """`SumArgs` of sums.cu."""

    _fields_ = (("c", Nic), *_words("out"), ("tokens", ctypes.c_int32), ("accumulate", ctypes.c_int32))
