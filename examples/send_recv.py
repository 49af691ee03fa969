"""Messages between two processes: a server that answers whoever writes to it.

    python examples/send_recv.py

The client finds the server by name, and sends its own address along so that the server can answer.
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys

from fabric_core import NetAddr, TransferEngine


def serve(name: str) -> None:
    requests: queue.Queue[bytes] = queue.Queue()
    with TransferEngine.open(name=name) as engine:
        engine.submit_recvs(4096, 8, requests.put)  # eight buffers that are used again and again
        print("ready", flush=True)
        while True:
            length, _, rest = requests.get().partition(b" ")
            sender, text = NetAddr.from_bytes(rest[: int(length)]), rest[int(length) :]
            engine.submit_send(sender, text.upper()).wait()
            if text == b"goodbye":
                return


def main() -> None:
    name = f"server-{os.getpid()}"
    answers: queue.Queue[bytes] = queue.Queue()
    with (
        subprocess.Popen([sys.executable, __file__, name], stdout=subprocess.PIPE) as server,
        TransferEngine.open() as engine,
    ):
        assert server.stdout is not None
        server.stdout.readline()  # "ready"
        engine.submit_recvs(4096, 8, answers.put)
        there = NetAddr.parse(f"{engine.backend}:{name}")
        me = engine.address.to_bytes()
        for text in (b"hello", b"what is a fabric?", b"goodbye"):
            engine.submit_send(there, b"%d " % len(me) + me + text).wait()
            print(answers.get(timeout=10).decode())


if __name__ == "__main__":
    if len(sys.argv) > 1:
        serve(sys.argv[1])
    else:
        main()
