"""What a bare TCP connection of this machine carries between two Python processes, for `run.py --transport tcp`.

- write: one process sends pieces of a size, walking over the same span as everybody's; the other receives them into its
  memory. Sizes below 64 KiB are not given: they would measure Python.
- paged: the pages are gathered by sendmsg, a thousand in a call, and received in one piece.
- ping: 64 bytes there and back, both sides reading without sleeping.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import time

from adapter import SMALL, anonymous
from figures import PAGED, SIZES, plan
from harness import REGION, emit, fence, parse

_TURNS = 3000
_LEAST = 64 << 10
_AT_ONCE = 1000  #: pieces of one sendmsg: IOV_MAX is 1,024


def pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    for end in (near, far):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return near, far


def sink(far: socket.socket, volumes: list[int]) -> None:
    """Receive so many bytes at a time, and say so; then echo pings."""
    memory = memoryview(anonymous(REGION))
    for volume in volumes:
        left = volume
        while left:
            at = (volume - left) % REGION
            left -= far.recv_into(memory[at : at + min(left, REGION - at, 1 << 20)])
        far.sendall(b"x")
    far.setblocking(False)
    for _ in range(_TURNS):
        far.send(spin(far, SMALL))


def spin(end: socket.socket, nbytes: int) -> bytes:
    while True:
        try:
            return end.recv(nbytes)
        except BlockingIOError:
            continue


def main() -> None:
    chosen = parse()
    fence()
    signal.alarm(120)
    writes = [(size, *plan(size, chosen.quick)) for size in SIZES if size >= _LEAST]
    repeats = 3 if chosen.quick else 6
    volumes = [size * count for size, count, _, _ in writes] + [pages * size for pages, size in PAGED]
    near, far = pair()
    if not os.fork():
        near.close()
        sink(far, [volume for volume in volumes for _ in range(repeats)])
        os._exit(0)
    far.close()
    memory = memoryview(anonymous(REGION))
    clock = time.perf_counter
    for size, count, _, places in writes:
        rates = []
        for _ in range(repeats):
            begin = clock()
            for k in range(count):
                at = k % places * size
                near.sendall(memory[at : at + size])
            near.recv(1)
            rates.append(size * count / (clock() - begin) / 1e9)
        emit("limit", "write", size, rates[1:], "GB/s")
    for pages, size in PAGED:
        order = random.Random(5).sample(range(REGION // size), pages)
        parts = [memory[k * size : (k + 1) * size] for k in order]
        rates = []
        for _ in range(repeats):
            begin = clock()
            for first in range(0, pages, _AT_ONCE):
                send_all(near, parts[first : first + _AT_ONCE])
            near.recv(1)
            rates.append(pages * size / (clock() - begin) / 1e9)
        emit("limit", "paged", size, rates[1:], "GB/s", pages=pages)
    near.setblocking(False)
    took = []
    for _ in range(_TURNS):
        begin = clock()
        near.send(bytes(SMALL))
        spin(near, SMALL)
        took.append((clock() - begin) * 1e6 / 2)
    emit("limit", "ping", SMALL, took[100:], "us")
    os.wait()


def send_all(near: socket.socket, parts: list[memoryview]) -> None:
    """Send all of them: sendmsg may take a part."""
    while parts:
        sent = near.sendmsg(parts)
        while parts and sent >= len(parts[0]):
            sent -= len(parts.pop(0))
        if sent:
            parts[0] = parts[0][sent:]


if __name__ == "__main__":
    main()
