"""Pages that the engine took away in the middle of a prompt, and watches that were closed early."""

from __future__ import annotations

import numpy as np
import pytest
from ahead_pair import SINGLE, fill, prepared
from kv_pair import LAYOUT, LIMIT, TOKENS, open_pair, until

from fabric_core import BadRange, FabricError

OLD, NEW = [[5, 2, 7]], [[1, 3, 4]]


@pytest.mark.parametrize("how", ["push", "hook", "watch"])
def test_what_is_pushed_after_a_move_comes_from_the_new_pages(how: str) -> None:
    """C7: the old pages are another request's by then. A watch that would go on with them is told of, and not used."""
    memory = np.zeros((2, 8, LAYOUT.page_bytes // 4), np.uint32)
    with open_pair(memory) as pair:
        job, pending = pair.start()
        with job:
            job.use(OLD)
            memory[:, OLD[0]] = 1
            watch = job.watch([(0, TOKENS)]) if how == "watch" else None
            if watch is not None:
                watch.value = 1
            else:
                job.push(0, 0, TOKENS)
            until(lambda: job.idle)
            if watch is not None:
                with pytest.raises(BadRange, match="while a watch has layers left"):
                    job.use(NEW, moved=True)
                watch.close()
            job.use(NEW, moved=True)
            memory[:, OLD[0]] = 9
            memory[:, NEW[0]] = 1
            if how == "hook":
                job.hook(0, TOKENS)(1)
            else:
                job.push(1, 0, TOKENS)
        with pending.wait() as kv:
            assert [np.unique(part).tolist() for layer in (0, 1) for part in kv.layer(layer)] == [[1]] * 4


def test_a_watch_that_was_closed_is_not_waited_for() -> None:
    """C1: what was never pushed is told at once, and not at the request's deadline."""
    with open_pair() as pair:
        job, _pending = pair.start(timeout=10 * LIMIT)
        fill(pair, 5)
        watch = prepared(job, SINGLE)
        watch.value = 4
        watch.close()
        assert not watch.wait_all(10 * LIMIT)
        assert not watch.waiting
        with pytest.raises(FabricError, match="was never pushed"):
            job.finish()
