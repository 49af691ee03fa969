"""NIXL moves the pages that `kv_peers.py` lists: two processes, UCX, its progress thread off. Needs nixl and numpy.

    kv_nixl.py DIRECTORY      DIRECTORY holds question.json, source.bin, wanted.bin and pieces.npy

Prints one JSON line per run: burst (all layers at once) and paced (a layer every compute time). Requests are built
before the clock starts; a layer's request carries a notification, and the target is done when it has as many of them as
layers. While a layer "computes" the initiator polls what is under way, as NIXL needs.
"""

from __future__ import annotations

import importlib
import json
import mmap
import os
import subprocess
import sys
import time
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import numpy as np

POISON = 0xEE
PATIENCE = 60.0  # seconds: for any one step


class Side:
    """An agent with one registered memory."""

    def __init__(self, name: str, nbytes: int, link: Connection[Any, Any]) -> None:
        api: Any = importlib.import_module("nixl_cu12._api")
        self.agent: Any = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
        self.memory = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
        self.memory[:] = POISON
        self.base = int(self.memory.ctypes.data)
        self.registered = self.agent.register_memory([(self.base, nbytes, 0, "")], "DRAM")
        link.send((self.agent.get_agent_metadata(), self.base))
        metadata, self.remote = link.recv()
        peer = self.agent.add_remote_agent(metadata)
        self.peer = peer.decode() if isinstance(peer, bytes) else peer


def pending(state: str) -> bool:
    if state == "ERR":
        raise RuntimeError("NIXL says ERR")
    return state != "DONE"


def target(directory: Path) -> None:
    link: Connection[Any, Any] = Client(str(directory / "link"), "AF_UNIX")
    question = json.loads((directory / "question.json").read_text())
    wanted = np.fromfile(directory / "wanted.bin", np.uint8)
    side = Side("target", len(wanted), link)
    side.agent.make_connection(side.peer)
    while (words := link.recv()) is not None:
        if words == "arm":
            side.memory[:] = POISON
            link.send("armed")
            seen, end = 0, time.monotonic() + PATIENCE
            while seen < question["notifications"]:
                seen += sum(len(many) for many in side.agent.get_new_notifs().values())
                if time.monotonic() > end:
                    raise TimeoutError(f"{seen} of {question['notifications']} notifications arrived")
            link.send(time.monotonic_ns())
        else:
            link.send(int(np.count_nonzero(side.memory != wanted)))


class Initiator:
    def __init__(self, directory: Path, link: Connection[Any, Any]) -> None:
        self.link = link
        self.question = json.loads((directory / "question.json").read_text())
        source = np.fromfile(directory / "source.bin", np.uint8)
        pieces = np.load(directory / "pieces.npy")  # step (layer in a chunk), source offset, target offset, length
        self.side = side = Side("initiator", len(source), link)
        side.memory[:] = source
        side.agent.make_connection(side.peer)
        here, there = (np.zeros((len(pieces), 3), np.uint64) for _ in range(2))
        here[:, 0], there[:, 0] = pieces[:, 1] + np.uint64(side.base), pieces[:, 2] + np.uint64(side.remote)
        here[:, 1] = there[:, 1] = pieces[:, 3]
        self.lists = (
            side.agent.prep_xfer_dlist("NIXL_INIT_AGENT", here, "DRAM"),
            side.agent.prep_xfer_dlist(side.peer, there, "DRAM"),
        )
        steps = [
            np.flatnonzero(pieces[:, 0] == step).astype(np.int32) for step in range(self.question["notifications"])
        ]
        self.requests = [
            side.agent.make_prepped_xfer("WRITE", self.lists[0], rows, self.lists[1], rows, b"step") for rows in steps
        ]

    def run(self, compute_us: list[float]) -> dict[str, Any]:
        """One transfer; `compute_us` of each step, all 0 for a burst."""
        self.link.send("arm")
        assert self.link.recv() == "armed"
        agent, posted = self.side.agent, []
        under_way: list[Any] = []
        began = due = time.monotonic_ns()
        ready = began
        for request, each in zip(self.requests, compute_us, strict=True):
            due += int(1000 * each)
            while time.monotonic_ns() < due:
                under_way = [one for one in under_way if pending(agent.check_xfer_state(one))]
            ready = time.monotonic_ns()
            if pending(agent.transfer(request)):
                under_way.append(request)
            posted.append((time.monotonic_ns() - ready) / 1000)
        while under_way:
            under_way = [one for one in under_way if pending(agent.check_xfer_state(one))]
        while not self.link.poll(0):
            agent.get_new_notifs()  # keeps its sockets moving until the target has everything
        arrived = self.link.recv()
        self.link.send("check")
        return {
            "seconds": (arrived - began) / 1e9,
            "exposed_us": (arrived - ready) / 1000,
            "posted_us": posted,
            "wrong": self.link.recv(),
        }


def main() -> None:
    directory = Path(sys.argv[1])
    if len(sys.argv) > 2:
        target(directory)
        return
    child = subprocess.Popen([sys.executable, __file__, str(directory), "target"])
    with Listener(str(directory / "link"), "AF_UNIX") as listener:
        link = listener.accept()
    try:
        initiator = Initiator(directory, link)
        question = initiator.question
        burst = [0.0] * question["notifications"]
        initiator.run(burst)  # first contact, cold pages
        for kind, compute in (("burst", burst), ("paced", question["step_us"])):
            print(json.dumps({"kind": kind, **initiator.run(compute)}), flush=True)
        link.send(None)
        child.wait(10)
    finally:
        child.kill()
        child.wait()
        sys.stdout.flush()
    os._exit(0)  # how a library takes itself down is not what is measured here


if __name__ == "__main__":
    main()
