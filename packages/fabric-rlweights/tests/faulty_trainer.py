"""A trainer process to which things happen on purpose, as the word `push` says."""

from __future__ import annotations

import faulthandler
import os
import signal
from typing import Any

from fabric_core import TransferEngine
from fabric_rlweights.job.plain import main
from fabric_rlweights.trainer import Trainer


def around(word: dict[str, Any], engine: TransferEngine, trainer: Trainer) -> Any:
    fault = word.get("fault") if word.get("victim") == trainer.rank else None
    real: Any = TransferEngine.submit_single_write
    count = 0

    def write(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        length, imm, source, target = args
        if count == 2 and fault == "drop":  # never sent; the sender believes that it was
            return real(engine, 0, None, source, target, **kwargs)
        if count == 2 and fault == "swap":  # one is lost, the one before it comes twice: the count is right
            return real(engine, *last[0], **last[1])
        if count == 2 and fault == "double":
            real(engine, *args, **kwargs).wait(5)
        last[:] = [args, kwargs]
        return real(engine, length, imm, source, target, **kwargs)

    last: list[Any] = []
    if fault in ("drop", "swap", "double"):
        engine.submit_single_write = write  # type: ignore[method-assign]
    else:
        engine.__dict__.pop("submit_single_write", None)

    if fault == "reverse" and trainer._sender is not None:
        trainer._sender.tasks.reverse()

    def progress(done: int, total: int) -> None:
        nonlocal fault
        if fault in ("SIGKILL", "SIGSTOP") and 2 * done >= total:  # something happens to another process
            os.kill(word["pid"], getattr(signal, fault))
            fault = None
        if fault == "kill" and 2 * done >= total:
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "stop" and 2 * done >= total:
            fault = None  # once
            os.kill(os.getpid(), signal.SIGSTOP)

    return progress


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    main(around)
