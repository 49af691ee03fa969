"""Two network namespaces joined by two links of limited rate: what several NICs of one group add up to, and the demo.

Root only (namespaces, tc). Nothing of it touches the machine's own network.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

RATE_MBIT = 200
FABRIC = [sys.executable, "-m", "fabric_core.cli"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


@dataclass
class Namespaces:
    """`a` and `b`, with two links between them; addresses 10.201.LINK.1 and .2."""

    provider: str
    names: tuple[str, str]
    running: list[subprocess.Popen[str]] = field(default_factory=list)

    def environ(self, side: int) -> dict[str, str]:
        nics = ",".join(f"10.201.{link}.{side + 1}" for link in (1, 2))
        clean = {name: value for name, value in os.environ.items() if not name.startswith("FABRIC_")}
        return {**clean, "FABRIC_EFA_PROVIDER": self.provider, "FABRIC_EFA_NICS": nics}

    def command(self, side: int, *words: str) -> list[str]:
        return ["ip", "netns", "exec", self.names[side], *words]

    def run(self, side: int, *words: str, timeout: float = 120) -> str:
        ended = subprocess.run(
            self.command(side, *words), env=self.environ(side), capture_output=True, text=True, timeout=timeout
        )
        assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
        return ended.stdout

    def start(self, side: int, *words: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            self.command(side, *words), env=self.environ(side), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            stdin=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.running.append(process)
        return process


@pytest.fixture
def namespaces(tcp: str) -> Iterator[Namespaces]:
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
        pytest.skip("needs root, ip and tc to make network namespaces")
    names = (f"fabric-a{os.getpid()}", f"fabric-b{os.getpid()}")
    it = Namespaces(tcp, names)
    try:
        try:
            for name in names:
                ip("netns", "add", name)
                ip("-n", name, "link", "set", "lo", "up")
            for link in (1, 2):
                pair = [f"fv{link}a{os.getpid() % 100000}", f"fv{link}b{os.getpid() % 100000}"]
                ip("link", "add", pair[0], "type", "veth", "peer", "name", pair[1])
                for side, (name, dev) in enumerate(zip(names, pair, strict=True)):
                    ip("link", "set", dev, "netns", name)
                    ip("-n", name, "addr", "add", f"10.201.{link}.{side + 1}/24", "dev", dev)
                    ip("-n", name, "link", "set", dev, "up")
                    shape = ["tbf", "rate", f"{RATE_MBIT}mbit", "burst", "1mb", "latency", "20ms"]
                    tc = ["tc", "-n", name, "qdisc", "add", "dev", dev, "root", *shape]
                    subprocess.run(tc, check=True, capture_output=True, timeout=20)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this kernel does not let us: {error.stderr.decode(errors='replace').strip()}")
        yield it
    finally:
        for process in it.running:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe:
                    pipe.close()
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def first_line(process: subprocess.Popen[str]) -> str:
    timer = threading.Timer(60, process.kill)
    timer.start()
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    timer.cancel()
    assert line, "the other side ended before it printed its address"
    return line


def test_two_limited_links_carry_twice_what_one_does(namespaces: Namespaces) -> None:
    """C5, shards add up: at least 1.9 times one link, with every byte compared."""
    serving = namespaces.start(1, *FABRIC, "bench", "--backend", "efa", "--serve", "far", "--nics", "2")
    address = first_line(serving)
    speed = {}
    for nics in (1, 2):
        bench = ["bench", "write", "--connect", address, "--nics", str(nics), "-b", "8M", "-n", "16", "--csv"]
        (row,) = csv.DictReader(namespaces.run(0, *FABRIC, *bench).splitlines())
        assert row["wrong_bytes"] == "0"
        speed[nics] = float(row["gbit_s"])
    assert speed[1] > 0.5 * RATE_MBIT / 1000, f"one link alone is too slow to tell: {speed}"
    assert speed[2] >= 1.9 * speed[1], speed


def test_ping_finds_the_other_machine(namespaces: Namespaces) -> None:
    """The address as the other side prints it is enough; the backend is taken from it."""
    address = first_line(namespaces.start(1, *FABRIC, "ping", "--backend", "efa", "--nics", "2"))
    report = json.loads(namespaces.run(0, *FABRIC, "ping", address, "-n", "5", "--nics", "2", "--json"))
    assert (report["data"]["sent"], report["data"]["lost"]) == (5, 0)


def test_ping_of_a_machine_needs_no_setting(namespaces: Namespaces, monkeypatch: pytest.MonkeyPatch) -> None:
    """`fabric ping --backend efa --on NIC` there, `fabric ping HOST` here: the rest follows from the address."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("FABRIC_")}
    monkeypatch.setattr(Namespaces, "environ", lambda *_: clean)
    dev = f"fv2b{os.getpid() % 100000}"
    words = ["ping", "--backend", "efa", "--provider", namespaces.provider, "--on", dev]
    address = first_line(namespaces.start(1, *FABRIC, *words))
    assert "10.201.2.2" in address
    report = json.loads(namespaces.run(0, *FABRIC, "ping", "10.201.2.2", "-n", "5", "--json"))
    assert (report["data"]["sent"], report["data"]["lost"]) == (5, 0)
    assert report["data"]["local_nics"][0].partition("/")[2].startswith("10.201.2.1:")


def test_a_peer_is_found_through_a_shared_folder(namespaces: Namespaces, tmp_path: Path) -> None:
    """Bootstrap: the far side publishes its address and a descriptor under names, the near side looks them up."""
    far = (
        "import sys; from fabric_core import TransferEngine; from fabric_core.bootstrap import open_board\n"
        "board = open_board(sys.argv[1]); e = TransferEngine.open('cpu', 'efa')\n"
        "m = e.empty(4096); d = e.reg_mr(m)[1]\n"
        "imm = e.alloc_imm(); arrived = e.expect_imm_count(imm, 1, timeout=60)\n"
        "board.publish('far', f'{d.to_bytes().hex()} {imm}')\n"
        "arrived.wait(60); print(bytes(m[:5]).decode(), flush=True)"
    )
    near = (
        "import sys; from fabric_core import MrDesc, TransferEngine; from fabric_core.bootstrap import open_board\n"
        "text, imm = open_board(sys.argv[1]).lookup('far', 60).split(); desc = MrDesc.from_bytes(bytes.fromhex(text))\n"
        "e = TransferEngine.open('cpu', 'efa'); h, _ = e.reg_mr(bytearray(b'hello'))\n"
        "e.submit_single_write(5, int(imm), (h, 0), (desc, 0), timeout=30).wait(60); e.close()"
    )
    board = f"file:{tmp_path}/board"
    serving = namespaces.start(1, sys.executable, "-c", far, board)
    namespaces.run(0, sys.executable, "-c", near, board)
    assert first_line(serving) == "hello"


def test_the_kv_demo_spans_two_namespaces(
    namespaces: Namespaces, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same text from a prefiller here and a decoder there as from one process."""
    from fabric_kvcache.demo import launch
    from fabric_kvcache.demo.model import why_not

    if reason := why_not():
        pytest.skip(reason)

    # Each role starts in its own namespace: what the demo calls as its Python is this.
    python = tmp_path / "python"
    nics = ["10.201.1.1,10.201.2.1", "10.201.1.2,10.201.2.2"]
    python.write_text(
        "#!/bin/sh\n"
        f'case "$*" in *demo.prefiller*) ns={namespaces.names[0]}; nics={nics[0]};; '
        f"*) ns={namespaces.names[1]}; nics={nics[1]};; esac\n"
        f'FABRIC_EFA_NICS=$nics exec ip netns exec $ns {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv(
        "FABRIC_HEARTBEAT", "5"
    )  # two processes compute on few cores, and the links drop what is too much
    options = launch.Options(prompt="Why is the sea salt?", max_new_tokens=8, backend="efa", nics=2, timeout=200)
    with launch.Demo(options, lambda _text: None, lambda _stage: None) as demo:
        result = demo.run()
    assert result.equal, result
