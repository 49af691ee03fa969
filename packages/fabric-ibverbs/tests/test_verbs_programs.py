"""The C programs of tests/c on software RDMA devices: what Python is too slow for in an emulated machine.

tools/rdma-guest/build_programs.py compiles them before the guest starts; skipped where they or the devices are missing.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from verbs_rig import grown, hardware, need, netem

pytestmark = [pytest.mark.nic, pytest.mark.slow, pytest.mark.timeout(400)]

BUILT = Path(__file__).resolve().parents[3] / "build" / "verbs"
IMMEDIATES = int(os.environ.get("VERBS_IMMEDIATES", "10000"))


@pytest.fixture(autouse=True)
def _devices() -> None:
    need(2)


def program(name: str, *arguments: object, **environment: str) -> str:
    path = BUILT / name
    if not path.exists():
        pytest.skip(f"{name} is not compiled: tools/rdma-guest/build_programs.py")
    command = [str(path), "rxe0", "rxe1", "auto", *map(str, arguments)]
    env = {**os.environ, **environment}
    limit = 380 + IMMEDIATES // 50
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False, env=env)
    said = done.stdout + done.stderr
    print(said)
    assert done.returncode == 0, said
    return said


@pytest.mark.timeout(400 + IMMEDIATES // 50)
@pytest.mark.parametrize(
    ("size", "weather"),
    # Software RDMA breaks a queue pair if a write of several packets is overtaken, perftest's too: that one only loses.
    [(64, ("delay", "100us", "reorder", "10%", "loss", "1%")), (12288, ("loss", "1%"))],
    ids=["one packet", "three packets"],
)
def test_each_immediate_comes_once_and_after_its_own_bytes(size: int, weather: tuple[str, ...]) -> None:
    """R1, R2, C10: under loss and reordering; its bytes are looked at when the number is handed out."""
    before = hardware("rxe1")
    with netem("rxe0", *weather):
        program("imm_weather", IMMEDIATES if size == 64 else IMMEDIATES // 10, size)
    assert grown("rxe1", before).get("out_of_seq_request", 0) > 0, "there was no bad weather"


@pytest.mark.parametrize("seed", [1, 2])
def test_hundreds_of_refused_writes_between_others_fail_alone(seed: int) -> None:
    """C1, C4: queue pairs are mended while more is posted; the good writes arrive once, after their bytes."""
    turns = int(os.environ.get("VERBS_REFUSALS", "200"))
    assert "mended" in program("mend_stress", turns, seed)


@pytest.mark.parametrize(
    "weather", [("loss", "20%"), ("delay", "200us", "100us", "duplicate", "1%")], ids=["loss", "jitter"]
)
def test_a_refusal_whose_answer_is_lost_is_asked_for(weather: tuple[str, ...]) -> None:
    """C1, C4: a queue pair in error does not say again what it refused. Its writer asks over the other queue pair which
    writes were executed: those end well, the refused one fails alone, the rest are posted again."""
    with netem("rxe1", *weather):  # the way back: answers
        said = program("mend_stress", 20, 1, FABRIC_VERBS_TIMEOUT="15")
    if weather[0] == "loss":  # of jitter it takes more turns
        assert "asked 0" not in said


def test_an_address_that_comes_back_is_reached_again() -> None:
    """R8: a device whose interface loses its address is a lost NIC, and with the address a good one, both ways."""
    said = program("address_back", 2)
    assert said.count("its NIC is back: so") == 2
    assert said.count("from it, again: connected") == 2


def test_what_was_behind_a_refused_write_ends_beside_a_busy_peer() -> None:
    """C1: it is posted again although the completion queue's common part is taken meanwhile."""
    assert program("redo_share", 3).count("1 refused, 30 well of 31") == 3


def test_a_message_that_was_given_up_is_not_delivered_to_who_wakes_up() -> None:
    """C11: who stood still finds a message, and beside it the farewell of its sender, who was told that it is lost."""
    assert program("given_up", 3).count("1 failed, 1 sent, 1 came, 0 of it before; the last: 'found'") == 3


def test_hosts_that_are_not_there_cost_the_others_nothing() -> None:
    """C8, C11: the kernel looks for each of them for a second; first contact with a living one does not wait for it."""
    assert "connected after" in program("dead_hosts", 20)


def test_too_little_memory_that_may_be_locked_is_an_error() -> None:
    """R3: opening ends, and says why (`ulimit -l`)."""
    program = BUILT / "dead_hosts"
    if not program.exists():
        pytest.skip("dead_hosts is not compiled: tools/rdma-guest/build_programs.py")
    nobody = ["prlimit", "--memlock=65536", "setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    done = subprocess.run(
        [*nobody, str(program), "rxe0", "rxe1", "auto", "1"], capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 1
    assert "Cannot allocate memory" in done.stderr
    assert "ulimit -l" in done.stderr


def test_many_peers_connect_at_once() -> None:
    """Handshakes in parallel (VERBS_PEERS sets how many); each peer has its credit, and each immediate comes once."""
    count = int(os.environ.get("VERBS_PEERS", "40"))
    said = program("many_peers", count)
    assert f"{count} of {count} ended, 0 refused, {count} immediates came" in said
    has = {name: int(number) for name, number in re.findall(r"^(\w+) (\d+)$", said, re.MULTILINE)}
    assert has["most_links"] * has["link_cqes"] < has["mcq"], "links both ways could overrun their completion queue"


def test_peers_beyond_what_the_queues_hold_are_refused_and_the_others_served() -> None:
    """Back-pressure with a name (ENOSPC) at first contact, instead of a queue that overruns."""
    said = program("many_peers", 40, 32)
    assert "40 of 40 ended, 8 refused, 32 immediates came" in said
    assert "full 0" not in said
