"""`fabric ping`: can two processes talk?"""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated

import typer

from fabric_core.cli import ping_meet
from fabric_core.cli.guard import guarded, say
from fabric_core.cli.models import Ping, Report
from fabric_core.cli.options import Json
from fabric_core.cli.ping_backend import On, Port, Provider, choose, find
from fabric_core.cli.render import Column, conclude, console, number, show_table, text_lines
from fabric_core.errors import ConfigError, DeadlineExceeded

if TYPE_CHECKING:
    from fabric_core import TransferEngine

__all__ = ["command", "measure"]


def measure(
    address: str,
    *,
    count: int,
    size: int,
    nics: int | None,
    timeout: float,
    interval: float = 0.0,
    backend: str = "",
) -> Ping:
    """Send `count` writes with an immediate and wait for each to come back. Raises FabricError if nobody answers."""
    from fabric_core.cli.bench_ops import Link
    from fabric_core.cli.session import Session, open_engine, parse_address

    peer = parse_address(address)
    times: list[float] = []
    lost = 0
    with open_engine(backend=backend or peer.backend, nics=nics) as engine, Session(engine, timeout) as session:
        link = Link(session, peer, 2 * max(size, 8), "engine")
        half = max(size, 8)
        sent_mark, back_mark = link.buffer.view[half : half + 8], link.buffer.view[:8]
        with link.echoing(size):
            for i in range(count):
                if i and interval:
                    time.sleep(interval)
                sent_mark[:] = (i + 1).to_bytes(8, "little")
                begin = time.perf_counter()
                engine.submit_single_write(
                    size, link.remote_imm, (link.buffer.handle, half), (link.remote, 0), timeout=timeout
                )
                try:
                    # An answer to an earlier ping, given up meanwhile, may come first: the mark tells them apart.
                    while back_mark != sent_mark:
                        engine.expect_imm_count(link.imm, 1, timeout=timeout - (time.perf_counter() - begin)).wait()
                    times.append((time.perf_counter() - begin) * 1e6)
                except (DeadlineExceeded, ValueError):
                    lost += 1
        sent_mark.release()
        back_mark.release()
        local, remote = _nics(str(engine.address)), _nics(str(link.remote.addr))
        link.close()
        times.sort()
        return Ping(
            address=str(link.remote.addr),
            local_nics=local,
            remote_nics=remote,
            bytes=size,
            sent=count,
            lost=lost,
            connect_us=link.connect_ns / 1000,
            min_us=times[0] if times else None,
            p50_us=_rank(times, 0.50),
            p99_us=_rank(times, 0.99),
            max_us=times[-1] if times else None,
        )


def _rank(times: list[float], share: float) -> float | None:
    return times[min(len(times) - 1, int(share * len(times)))] if times else None


def _nics(address: str) -> list[str]:
    return address.partition(":")[2].split(",")


def answer(name: str, nics: int | None, backend: str, port: int = ping_meet.PORT) -> None:
    """Print our address, hand it to who asks at `port` of our IP addresses, and answer until interrupted."""
    from fabric_core.cli.bench_peer import Server
    from fabric_core.cli.session import open_engine

    with open_engine(backend=backend, name=name, nics=nics) as engine, ExitStack() as stack:
        who = _meet(stack, engine, port) or str(engine.address)
        print(engine.address, flush=True)
        say(f"answering; elsewhere: fabric ping {who} (or fabric bench --connect ...); Ctrl-C ends")
        Server(engine).run()


def _meet(stack: ExitStack, engine: TransferEngine, port: int) -> str:
    """Listen where our NICs have IP addresses; return what others then call us, "" if they need the whole address."""
    if not (hosts := ping_meet.hosts_of(engine.address)):
        return ""
    try:
        stack.enter_context(ping_meet.Meeting(engine.address, hosts, port))
    except ConfigError as error:
        if port != ping_meet.PORT:
            raise
        say(f"found by the whole address only: {error}")
        return ""
    return hosts[0] if port == ping_meet.PORT else f"{hosts[0]}:{port}"


@guarded
def command(
    address: Annotated[
        str, typer.Argument(metavar="[HOST|ADDRESS]", help="Whom to ping: a machine, or an address. Without: answer.")
    ] = "",
    *,
    count: Annotated[int, typer.Option("--count", "-n", min=1, max=1_000_000, help="How many pings.")] = 10,
    size: Annotated[int, typer.Option("--size", "-s", min=8, max=1 << 20, help="Bytes of one.")] = 64,
    interval: Annotated[float, typer.Option("--interval", "-i", min=0, help="Seconds between two.")] = 0.1,
    timeout: Annotated[float, typer.Option("--timeout", "-t", min=0.001, help="Seconds until one is lost.")] = 2.0,
    name: Annotated[str, typer.Option("--name", help="Answer under this name (local backend).")] = "ping",
    nics: Annotated[int | None, typer.Option("--nics", min=1, max=8, help="NICs to use.")] = None,
    backend: Annotated[str, typer.Option("--backend", help="Backend to use; default: the address's.")] = "",
    provider: Provider = "",
    on: On = "",
    port: Port = ping_meet.PORT,
    json: Json = False,
) -> None:
    """Can these two processes talk, and how fast? Without an argument: answer.

    Two machines: `fabric ping --backend efa --on eth0` on one, `fabric ping HOST` on the other. One: `fabric ping` and
    `fabric ping ping`. Times are there and back: a write with an immediate, answered by one. Exit codes: 1 some were
    lost, 4 no peer.
    """
    backend = choose(backend, provider, on)
    if not address:
        answer(name, nics, backend, port)
        return
    peer = str(find(address, backend, port, max(timeout, 2.0)))
    data = measure(peer, count=count, size=size, nics=nics, timeout=timeout, interval=interval, backend=backend)
    problems = [f"{data.lost} of {data.sent} were lost"] if data.lost else []
    conclude(Report[Ping](schema="fabric.ping/1", data=data, problems=problems), None if json else lambda: _show(data))


def _show(data: Ping) -> None:
    out = console()
    text_lines(out, f"{' '.join(data.local_nics)} -> {' '.join(data.remote_nics)}", "")
    titles = ("BYTES", "SENT", "LOST", "CONNECT(us)", "MIN(us)", "p50(us)", "p99(us)", "MAX(us)")
    figures = [data.connect_us, data.min_us, data.p50_us, data.p99_us, data.max_us]
    row = [str(data.bytes), str(data.sent), str(data.lost), *(number(figure, 1) for figure in figures)]
    show_table(out, [Column(title, right=True) for title in titles], [row])
