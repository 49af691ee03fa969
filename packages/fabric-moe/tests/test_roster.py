"""Meeting on a board: leftovers of an earlier run are not taken for ranks, and no order of looking blocks."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from moe_cases import Case
from moe_told import all_say, start

from fabric_core import DeadlineExceeded, ProtocolError
from fabric_core.bootstrap import FileBoard
from fabric_moe import Table, roster
from fabric_moe.roster import Roster, gather

CASE = Case(ranks=3, experts=6, topk=2, hidden=16, tokens=[4], more={"timeout": 60.0})


def roster_of(board: Any, rank: int, process: str, monkeypatch: pytest.MonkeyPatch, ranks: int = 2) -> Roster:
    """A roster as another process would make it."""
    monkeypatch.setattr(roster, "process_id", lambda: process)
    return Roster(board, "job", 0, rank, range(ranks))


def test_a_card_of_an_earlier_run_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1's old card and what it had read lie there. Rank 0 waits for the new one, whichever is looked at first."""
    board = FileBoard(tmp_path)
    before = [roster_of(board, r, f"old{r}", monkeypatch) for r in range(2)]
    for r, one in enumerate(before):
        one.publish(f"old card {r}")
    for one in (*before, *before):
        one.look()  # and nobody withdraws: they were killed

    mine = roster_of(board, 0, "new0", monkeypatch)
    mine.publish("new card 0")
    for _ in range(3):
        assert mine.look() is None
    assert "left by an earlier run" in mine.missing()
    theirs = roster_of(board, 1, "new1", monkeypatch)
    theirs.publish("new card 1")
    assert theirs.look() is None  # rank 0 has read its old card until now
    found = [one.look() for one in (mine, theirs, mine, theirs)]
    assert found[2] == found[3] == {0: "new card 0", 1: "new card 1"}
    mine.withdraw()
    theirs.withdraw()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job.g0.r0.met", "job.g0.r1.met"]  # no card


def test_who_has_met_all_may_leave_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 is gone when rank 1 looks whether it has read its card. The next generation is no different."""
    table = Table()
    for number in range(4):
        ranks = []
        for r in range(2):
            monkeypatch.setattr(roster, "process_id", lambda r=r: f"p{r}")
            ranks.append(Roster(table, "job", number, r, range(2)))
            ranks[r].publish(str(r))
        assert ranks[1].look() is None  # rank 0 has not said yet that it has read both
        wanted = {0: "0", 1: "1"}
        assert ranks[0].look() == wanted
        ranks[0].withdraw()
        assert ranks[1].look() == wanted
        ranks[1].withdraw()
    left = [f"job.g{number}.r{r}.met" for number in (2, 3) for r in range(2)]
    assert sorted(table._values) == left  # and no more of them, however many generations there are


def test_nothing_stays_of_a_meeting_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table()
    one, two = (roster_of(table, r, f"p{r}", monkeypatch) for r in range(2))
    one.publish("0")
    two.publish("1")
    assert one.look() is None  # rank 1 has read nothing, and never will
    assert "job.g0.r0.met" in table._values
    one.withdraw()
    assert sorted(table._values) == ["job.g0.r1"]


def test_nobody_goes_on_before_all_have_read_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table()
    ranks = [roster_of(table, r, f"p{r}", monkeypatch, 3) for r in range(3)]
    for r, one in enumerate(ranks):
        one.publish(str(r))
    assert ranks[0].look() is None
    assert ranks[1].look() is None  # rank 2 has not read anything yet
    wanted = {0: "0", 1: "1", 2: "2"}
    assert ranks[2].look() == wanted
    assert [one.look() for one in ranks] == [wanted] * 3


def test_two_jobs_are_met_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes, each with a rank in two jobs, that look at them in different orders."""
    table = Table()
    found: dict[str, Any] = {}

    def made(process: str, rank: int) -> list[Roster]:
        monkeypatch.setattr(roster, "process_id", lambda: process)
        rosters = [Roster(table, job, 0, rank, range(2)) for job in ("a", "b")]
        for one in rosters:
            one.publish(process)
        return rosters

    ours, theirs = made("p", 0), made("q", 1)[::-1]

    def run(name: str, rosters: list[Roster]) -> None:
        found[name] = gather(rosters, 60.0)

    threads = [threading.Thread(target=run, args=args) for args in (("p", ours), ("q", theirs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {"p": [{0: "p", 1: "q"}] * 2, "q": [{0: "p", 1: "q"}] * 2}


def test_who_did_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table()
    one = roster_of(table, 0, "p", monkeypatch, 3)
    one.publish("card")
    with pytest.raises(DeadlineExceeded, match=r"within 0 s nobody published job\.g0\.r1, job\.g0\.r2"):
        gather([one], 0.0)
    table.publish("job.g0.r1", "nonsense")
    with pytest.raises(ProtocolError, match="rank 1, is no card: 'nonsense'"):
        gather([one], 0.0)


def test_a_fork_is_another_process() -> None:
    before = roster.process_id()
    ours, theirs = os.pipe()
    if (child := os.fork()) == 0:
        os.write(theirs, roster.process_id().encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(ours, 1000).decode() != before == roster.process_id()
    os.close(ours)
    os.close(theirs)


def test_a_killed_job_starts_again_on_the_same_board(processes: Any) -> None:
    """Its cards are still there. Rank 0 of the new run comes first, when only old cards of the others lie there."""
    started = start(processes, CASE)
    for process in started:
        os.kill(process.pid, signal.SIGKILL)
        process.process.join()
    again = [processes(CASE, [0])]
    assert not again[0]._pipe.poll(1.0)  # it does not take them
    again += [processes(CASE, [rank]) for rank in (1, 2)]
    for process in again:
        process.hear("open")
    all_say(again, "steps 0 3", "ok 3")
    for process in again:
        process.end()
