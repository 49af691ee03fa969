"""The answering side of `fabric ping` and `fabric bench`.

    python -m fabric_core.cli.bench_peer --name NAME     started by `fabric bench`; ends when its stdin does
    fabric bench --serve NAME, fabric ping               the same in a terminal of its own; ends with Ctrl-C

It prints its address, then obeys messages (`_COMMANDS`) one at a time, from any number of clients in turn. It touches
only memory that it allocated for a client itself, and never more than MAX_BYTES.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fabric_core.cli.guard import fail
from fabric_core.cli.pattern import count_wrong, expected_pages, fill, permutation
from fabric_core.cli.session import Buffer, Message, Session, open_engine, parent_gone
from fabric_core.errors import DeadlineExceeded, FabricError, PeerLost, TransferError

if TYPE_CHECKING:
    from fabric_core import MrDesc, NetAddr, TransferEngine

__all__ = ["Server", "main"]

#: A client cannot make us allocate more than this.
MAX_BYTES = 8 << 30

#: Clients whose buffers are kept; the oldest goes first. One that died cannot say goodbye.
MAX_CLIENTS = 4


#: An echo without anything to echo ends after this.
IDLE_SECONDS = 10.0


class _Client:
    """What one client has here."""

    def __init__(self, address: NetAddr, buffer: Buffer, imm: int, back: MrDesc | None, back_imm: int | None) -> None:
        self.address = address
        self.buffer = buffer
        self.imm = imm  #: raised here by the client
        self.back = back  #: the client's own buffer
        self.back_imm = back_imm
        self.messages = 0
        self.wrong = 0


class Server:
    """Obeys clients until told to stop."""

    def __init__(self, engine: TransferEngine) -> None:
        self.engine = engine
        self.session = Session(engine)
        self._clients: dict[str, _Client] = {}

    def run(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Serve. `stop` is asked a few times a second."""
        with self.session:
            while not stop():
                try:
                    message = self.session.hear(timeout=0.25)
                except DeadlineExceeded:
                    continue
                except FabricError as error:
                    print(f"ignored: {error}", file=sys.stderr, flush=True)
                    continue
                self._obey(message)
            for name in list(self._clients):
                self._forget(name)

    def _obey(self, message: Message) -> None:
        from fabric_core import NetAddr

        try:
            sender = NetAddr.parse(str(message.get("from", "")))
        except FabricError as error:
            print(f"ignored a message without a sender: {error}", file=sys.stderr, flush=True)
            return
        try:
            command = _COMMANDS.get(str(message.get("kind")))
            if command is None:
                raise ValueError(f"unknown request {message.get('kind')!r}")
            self.session.tell(sender, **command(self, sender, message))
        except Exception as error:  # whatever a client may ask for, it does not end the one who answers
            text = f"{type(error).__name__}: {error}"
            print(f"{sender}: {text}", file=sys.stderr, flush=True)
            if isinstance(error, PeerLost) or (isinstance(error, TransferError) and error.op == "send"):
                self._forget(str(sender))  # another answer would only wait for it once more
                return
            try:
                self.session.tell(sender, "error", text=text[:500])
            except FabricError:
                self._forget(str(sender))

    @staticmethod
    def _size(message: Message, name: str, most: int) -> int:
        """Return a number of a message that says how much memory is touched. Raises ValueError."""
        value = message[name]
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= most:
            raise ValueError(f"{name}={value!r}: must be an integer from 1 to {most}")
        return value

    # ---- requests: each returns the answer ----

    def _open(self, sender: NetAddr, message: Message) -> Message:
        """Allocate and register a buffer for the client."""
        from fabric_core import MrDesc

        nbytes = self._size(message, "bytes", MAX_BYTES)
        self._forget(str(sender))
        while len(self._clients) >= MAX_CLIENTS:
            self._forget(next(iter(self._clients)))
        back = MrDesc.from_bytes(bytes.fromhex(message["desc"])) if message.get("desc") else None
        buffer = Buffer(self.engine, nbytes, str(message.get("memory", "engine")))
        client = _Client(sender, buffer, self.engine.alloc_imm(), back, message.get("imm"))
        self._clients[str(sender)] = client
        return {
            "kind": "opened",
            "desc": buffer.desc.to_bytes().hex(),
            "imm": client.imm,
            "nics": self.engine.nics,
            "longest": self.session.longest,
            "pid": os.getpid(),
        }

    def _clear(self, sender: NetAddr, message: Message) -> Message:
        """Overwrite the buffer, so that what is right later was written meanwhile."""
        client = self._clients[str(sender)]
        length = self._size(message, "bytes", len(client.buffer.view))
        client.buffer.view[:length] = b"\xa5" * length
        client.buffer.push(length)
        client.messages = client.wrong = 0
        return {"kind": "cleared"}

    def _check(self, sender: NetAddr, message: Message) -> Message:
        """Compare the buffer with what should be there."""
        client = self._clients[str(sender)]
        room = len(client.buffer.view)
        length, seed = self._size(message, "bytes", room), int(message["seed"])
        if message.get("page"):
            page = self._size(message, "page", room)
            order = permutation(self._size(message, "pages", room // page), seed)
            wanted = expected_pages(length, seed, page, order, self._size(message, "span", room))
        else:
            wanted = bytearray(length)
            fill(memoryview(wanted), seed)
        client.buffer.pull(length)
        return {"kind": "checked", "wrong": count_wrong(client.buffer.view[:length], memoryview(wanted))}

    def _echo(self, sender: NetAddr, message: Message) -> Message:
        """Write back what arrives, until the client says "stop" or nothing came for IDLE_SECONDS.

        spin: poll in a Python loop (the latency benchmark); else wait as an application would (ping).
        """
        client = self._clients[str(sender)]
        if client.back is None or client.back_imm is None:
            raise ValueError("echo needs a descriptor and an immediate to answer to")
        length, spin = self._size(message, "bytes", len(client.buffer.view)), bool(message.get("spin"))
        engine, imm, stops, name = self.engine, client.imm, self.session.stops, str(sender)
        source, target, answer = (client.buffer.handle, 0), (client.back, 0), client.back_imm
        stops.discard(name)
        done = 0
        start = engine.imm_count(imm)  # before the client may begin
        self.session.tell(sender, "echoing")
        last = time.monotonic()
        while name not in stops and time.monotonic() - last < IDLE_SECONDS:
            if spin:
                turns = 0
                while engine.imm_count(imm) <= start + done and turns < 4096:
                    turns += 1
                if turns == 4096:
                    continue
            else:
                try:
                    engine.expect_imm_count(imm, 1, timeout=0.2, peers=[sender]).wait()
                except DeadlineExceeded:
                    continue
            engine.submit_single_write(length, answer, source, target)
            done += 1
            last = time.monotonic()
        stops.discard(name)
        return {"kind": "echoed", "n": done}

    def _messages(self, sender: NetAddr, message: Message) -> Message:
        """From now on compare messages with the pattern, and send them back if asked to."""
        client = self._clients[str(sender)]
        size, seed = self._size(message, "bytes", self.session.longest), int(message["seed"])
        echo = bool(message.get("echo"))
        expected = bytearray(size)
        fill(memoryview(expected), seed)
        expected[0] = 0
        wanted = bytes(expected)
        client.messages = client.wrong = 0

        def arrived(data: bytes) -> None:
            if data != wanted:
                client.wrong += count_wrong(memoryview(data), memoryview(wanted))
            client.messages += 1
            if echo:
                self.engine.submit_send(client.address, data)

        self.session.on_data = arrived
        return {"kind": "listening"}

    def _counted(self, sender: NetAddr, message: Message) -> Message:
        """Wait until that many messages were here, and tell how many bytes of them were wrong."""
        client = self._clients[str(sender)]
        wanted = self._size(message, "n", 1 << 62)
        pause = threading.Event()
        for _ in range(500):
            if client.messages >= wanted:
                break
            pause.wait(0.01)
        return {"kind": "counted", "n": client.messages, "wrong": client.wrong}

    def _close(self, sender: NetAddr, message: Message) -> Message:
        self._forget(str(sender))
        return {"kind": "closed"}

    def _forget(self, name: str) -> None:
        client = self._clients.pop(name, None)
        if client is None:
            return
        self.session.on_data = None
        try:
            client.buffer.close()
            self.engine.free_imm(client.imm)
        except (FabricError, BufferError) as error:
            print(f"while forgetting {name}: {error}", file=sys.stderr, flush=True)


_COMMANDS: dict[str, Callable[[Server, Any, Message], Message]] = {
    "open": Server._open,
    "clear": Server._clear,
    "check": Server._check,
    "echo": Server._echo,
    "messages": Server._messages,
    "count": Server._counted,
    "close": Server._close,
}


def main() -> None:
    """Serve until stdin ends."""
    parser = argparse.ArgumentParser(prog="fabric_core.cli.bench_peer")
    parser.add_argument("--name", required=True)
    parser.add_argument("--backend", default="")
    parser.add_argument("--nics", type=int)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    ended = parent_gone()
    try:
        with open_engine(
            backend=options.backend, name=options.name, nics=options.nics, device=options.device
        ) as engine:
            print(json.dumps({"address": str(engine.address), "nics": engine.nics}), flush=True)
            Server(engine).run(ended.is_set)
    except (FabricError, KeyboardInterrupt) as error:
        sys.exit(fail(error))


if __name__ == "__main__":
    main()
