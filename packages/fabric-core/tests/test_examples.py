"""The examples run as they are, on the local backend and on the one in Python."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"

#: What each example prints, so that we know that it came to its end.
SAYS = {
    "first_transfer.py": "1048576 bytes went from",
    "send_recv.py": "GOODBYE",
    "paged.py": "surplus immediates: 0",
    "asyncio_hand_over.py": "request 3: 262144 bytes are here",
}

pytestmark = pytest.mark.skipif(not EXAMPLES.is_dir(), reason=f"no source tree: {EXAMPLES} is not there")


@pytest.mark.parametrize("example", SAYS)
def test_the_example_runs(example: str, tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-W", "error", EXAMPLES / example],
        cwd=tmp_path,
        env={**os.environ, "FABRIC_BACKEND": "local"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 0, ended.stderr
    assert SAYS[example] in ended.stdout
    assert ended.stderr == ""


def test_every_example_is_run() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(SAYS)
