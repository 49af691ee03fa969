"""How the launcher and its processes talk: JSON lines, words on stdin, answers on stdout."""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import json
import logging
import os
import signal
import sys
from typing import Any

from fabric_rlweights.job.model import Model

__all__ = ["arguments", "die_with_parent", "model_of", "next_word", "say"]


def say(**what: Any) -> None:
    """Tell the launcher."""
    print(json.dumps(what), flush=True)


def next_word() -> dict[str, Any] | None:
    """Return the launcher's next word; None when it has gone."""
    line = sys.stdin.readline()
    return dict(json.loads(line)) if line else None


def arguments(role: str) -> argparse.Namespace:
    """Return the arguments of this process, which ends with its launcher and logs errors alone."""
    args = _parser(role).parse_args()
    die_with_parent(args.parent)
    logging.basicConfig(level=logging.ERROR)
    return args


def _parser(role: str) -> argparse.ArgumentParser:
    """The arguments that both roles take."""
    made = argparse.ArgumentParser(prog=role)
    for name in ("--rank", "--trainers", "--receivers", "--tp", "--replicate", "--parent"):
        made.add_argument(name, type=int, required=True)
    made.add_argument("--controller", required=True)
    made.add_argument("--model", required=True)
    made.add_argument("--store", default="")
    made.add_argument("--watermark", type=int, default=256 << 20)
    made.add_argument("--double-buffer", action="store_true")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--dtype", default="bfloat16")
    made.add_argument("--device", default="cpu", help="of the weights: cpu, cuda:0")
    made.add_argument("--offloaded", action="store_true", help="a trainer's parameters lie in host memory")
    made.add_argument("--fp8", action="store_true", help="an inference rank's matrices are fp8, with scales of blocks")
    return made


def model_of(text: str) -> Model:
    """Read a model's sizes."""
    return Model(**json.loads(text))


def text_of(model: Model) -> str:
    """Write them."""
    return json.dumps(dataclasses.asdict(model))


def die_with_parent(parent: int) -> None:
    """Have the kernel end this process when the launcher does: nothing is left behind, whatever happens to it."""
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
