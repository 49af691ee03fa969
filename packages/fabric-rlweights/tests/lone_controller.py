"""A controller in a process of its own, that is killed on purpose at the worst moment of an update."""

from __future__ import annotations

import argparse
import os
import signal
from typing import Any

from fabric_core import TransferEngine
from fabric_rlweights.controller import Controller
from fabric_rlweights.job.wire import die_with_parent, next_word, say
from fabric_rlweights.protocol import Commit, Resume


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--trainers", type=int, required=True)
    parser.add_argument("--receivers", type=int, required=True)
    parser.add_argument("--die-at", type=int, required=True, help="the version")
    parser.add_argument("--at", choices=["Commit", "Resume"], required=True, help="at which word to the receivers")
    parser.add_argument("--told", type=int, required=True, help="after so many receivers were told that")
    args = parser.parse_args()
    die_with_parent(args.parent)
    with (
        TransferEngine.open() as engine,
        Controller(engine, trainers=args.trainers, receivers=args.receivers) as controller,
    ):
        send, told, version = controller._channel.send, 0, -1

        def or_die(addr: Any, message: Any, timeout: float = 10.0) -> None:
            nonlocal told, version
            if isinstance(message, Commit):
                version = message.version
            if isinstance(message, Commit if args.at == "Commit" else Resume) and version == args.die_at:
                if told == args.told:
                    os.kill(os.getpid(), signal.SIGKILL)
                told += 1
                send(addr, message, timeout=timeout)
                # it must be on its way before this process dies: the receiver's answer says so
                while controller._inbox.empty():
                    pass
                return
            send(addr, message, timeout=timeout)

        controller._channel.send = or_die  # type: ignore[method-assign]
        say(event="up", address=str(engine.address))
        while (word := next_word()) is not None and word["do"] != "exit":
            pass


if __name__ == "__main__":
    main()
