"""A role of the KV demo for an emulated machine: `verbs_demo_role.py -m MODULE ...` is `python -m MODULE ...`, but a
model's first pass, which only warms a process up, takes 4 tokens instead of 128: that alone would be minutes in there.

VERBS_DEMO_LOG: a file that is told how far it came.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from collections.abc import Sequence
from typing import Any

from fabric_kvcache.demo import model

BEGAN = time.monotonic()
WARM = 4


def told(what: str) -> None:
    path = os.environ.get("VERBS_DEMO_LOG")
    if path:
        with open(path, "a") as log:
            log.write(f"{time.monotonic() - BEGAN:8.1f} s {sys.argv[0]} {what}\n")


class Model(model.LanguageModel):
    """The demo's own, which says how far it is."""

    def __init__(self, *args: Any, **how: Any) -> None:
        told("loads the model")
        super().__init__(*args, **how)
        told(f"has loaded the model, in {self.load_seconds:.1f} s")

    def prefill(self, ids: Sequence[int], **how: Any) -> Any:
        warming = isinstance(ids, range)
        done = super().prefill(ids[:WARM] if warming else ids, **how)
        told(f"computed {WARM if warming else len(ids)} tokens")
        return done

    def generate(self, *args: Any, **how: Any) -> list[int]:
        ids = super().generate(*args, **how)
        told(f"generated {len(ids)} tokens")
        return ids


if __name__ == "__main__":
    sys.argv = sys.argv[2:]
    told("begins")
    __import__("torch")
    told("has torch")
    __import__("transformers")
    told("has transformers")
    model.LanguageModel = Model  # type: ignore[misc]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
