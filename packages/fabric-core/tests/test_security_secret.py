"""The job's secret (S1, S10): where it comes from, that every peer is asked for it, and that nothing ever shows it."""

from __future__ import annotations

import json
import logging
import os
import stat
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import SecretStr

from fabric_core import RemoteAccessError, TransferEngine
from fabric_core.config import Settings
from fabric_core.errors import CODES, ConfigError
from fabric_core.secret import LEAST_BYTES, handshake_key

WORD = "correct-horse-battery-staple"
OTHER = "a-different-secret-altogether"


@pytest.fixture(autouse=True)
def _no_secret_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FABRIC_SECRET", raising=False)
    monkeypatch.delenv("FABRIC_SECRET_FILE", raising=False)


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text(f"\n {WORD}\n")
    path.chmod(0o600)
    return path


# ---- where it comes from ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["FABRIC_SECRET", "FABRIC_SECRET_FILE"])
def test_a_blank_secret_is_not_taken_for_none(name: str) -> None:
    """S1: what was to fill the variable failed; the job must not go on without."""
    with pytest.raises(ConfigError, match=f"{name} is set, but blank"):
        Settings.load(environ={name: " "})


def test_file_environment_and_code_give_the_same_key(secret_file: Path) -> None:
    """S1: and the key is not the secret."""
    ways = [
        Settings.load(environ={"FABRIC_SECRET": WORD}),
        Settings.load(environ={"FABRIC_SECRET_FILE": str(secret_file)}),
        Settings.load(environ={}, secret=WORD),
        Settings(secret=SecretStr(WORD)),
        Settings(secret=WORD).replace(nics=2),
    ]
    keys = {handshake_key(settings) for settings in ways}
    assert len(keys) == 1
    key = keys.pop()
    assert key is not None
    assert len(key) == 32
    assert WORD.encode() not in key
    assert handshake_key(Settings.load(environ={"FABRIC_SECRET": OTHER})) != key
    assert handshake_key(Settings.load(environ={})) is None


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610, 0o777])
def test_a_file_open_to_others_is_refused_with_its_mode_and_the_cure(secret_file: Path, mode: int) -> None:
    secret_file.chmod(mode)
    with pytest.raises(ConfigError, match=rf"mode {mode:04o}.*chmod 600 {secret_file}"):
        handshake_key(Settings(secret_file=str(secret_file)))


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o700])
def test_a_file_of_our_own_is_taken(secret_file: Path, mode: int) -> None:
    secret_file.chmod(mode)
    assert handshake_key(Settings(secret_file=str(secret_file)))


def test_a_file_of_another_user_is_refused(secret_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:
        os.chown(secret_file, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(ConfigError, match=r"belongs to uid \d+, not to us"):
        handshake_key(Settings(secret_file=str(secret_file)))


@pytest.mark.parametrize("kind", ["missing", "directory", "pipe", "device", "huge"])
def test_what_is_no_such_file_is_a_config_error(tmp_path: Path, kind: str) -> None:
    path = tmp_path / kind
    if kind == "directory":
        path.mkdir(mode=0o700)
    elif kind == "pipe":  # nobody writes into it: reading must not wait (R3)
        os.mkfifo(path, 0o600)
    elif kind == "device":
        path = Path("/dev/zero")
    elif kind == "huge":
        path.touch(0o600)
        os.truncate(path, 1 << 40)
    with pytest.raises(ConfigError, match=str(path)):
        handshake_key(Settings(secret_file=str(path)))


@pytest.mark.parametrize("text", ["hunter2", "hunter2-hunter2", "   hunter2-hunter2    \n"])
def test_a_short_secret_is_refused_without_being_shown(tmp_path: Path, text: str) -> None:
    path = tmp_path / "short"
    path.write_text(text)
    path.chmod(0o600)
    for settings in (Settings(secret=text), Settings(secret_file=str(path))):
        with pytest.raises(ConfigError, match=f"at least {LEAST_BYTES} bytes") as caught:
            handshake_key(settings)
        assert "hunter2" not in str(caught.value)


def test_two_secrets_are_one_too_many(secret_file: Path) -> None:
    with pytest.raises(ConfigError, match="both set"):
        handshake_key(Settings(secret=WORD, secret_file=str(secret_file)))


def test_a_settings_file_may_name_the_secrets_file_but_not_hold_the_secret(tmp_path: Path, secret_file: Path) -> None:
    file = tmp_path / "fabric.toml"
    file.write_text(f'secret_file = "{secret_file}"\n')
    assert handshake_key(Settings.load(environ={"FABRIC_CONFIG": str(file)}))
    file.write_text(f'secret = "{WORD}"\n')
    with pytest.raises(ConfigError, match="secret_file") as caught:
        Settings.load(environ={"FABRIC_CONFIG": str(file)})
    assert WORD not in str(caught.value)


def test_an_engine_with_a_bad_secret_does_not_open(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="FABRIC_SECRET: a secret has at least"):
        TransferEngine.open(backend="local", local_dir=str(tmp_path), secret="short")
    assert not list(tmp_path.glob("*.sock"))


# ---- it is asked of every peer ---------------------------------------------------------------------------------------


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Any]:
    found: list[TransferEngine] = []

    def open_one(secret: str | None, **settings: Any) -> TransferEngine:
        place = str(tmp_path / "sockets")
        engine = TransferEngine.open(backend="local", local_dir=place, secret=secret, connect_timeout=30, **settings)
        found.append(engine)
        return engine

    yield open_one
    while found:  # emptied: pytest holds on to `open_one`, and the suite's last look wants them gone
        found.pop().close()


def write(a: TransferEngine, b: TransferEngine, timeout: float = 10) -> None:
    source, target = np.arange(64, dtype=np.uint8), np.zeros(64, dtype=np.uint8)
    handle, _ = a.reg_mr(source)
    _, desc = b.reg_mr(target)
    a.submit_single_write(64, None, (handle, 0), (desc, 0)).wait(timeout)
    assert (target == source).all()


def until(condition: Any, seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


@pytest.mark.parametrize("secret", [None, WORD])
def test_peers_that_agree_meet(engines: Any, secret: str | None) -> None:
    """S1: also when neither has one, as ever."""
    a, b = engines(secret), engines(secret)
    write(a, b)
    write(b, a)
    assert not any(a.stats()["refused"].values())


@pytest.mark.parametrize(
    "pair", [(WORD, OTHER), (WORD, None), (None, WORD)], ids=["differ", "only ours", "only theirs"]
)
def test_peers_that_do_not_agree_hear_of_it_at_once(
    engines: Any, pair: tuple[str | None, str | None], caplog: pytest.LogCaptureFixture
) -> None:
    """S1, S9, R3: long before the connect time-out, on both sides, naming the variable; counted, told once a second."""
    a, b = engines(pair[0]), engines(pair[1])
    heard: list[BaseException] = []
    b.on_error = heard.append
    start = time.monotonic()
    with caplog.at_level(logging.WARNING, logger="fabric"):
        for _ in range(5):
            with pytest.raises(
                RemoteAccessError, match=r"it refused us: the secrets differ \(FABRIC_SECRET\)"
            ) as caught:
                write(a, b)
            assert caught.value.code == "EACCES"
            assert str(b.address) in str(caught.value)
        until(lambda: b.stats()["refused"]["auth"] >= 1 and heard)
    assert time.monotonic() - start < 60
    assert "EKEYREJECTED" in str(heard[0])
    lines = [record for record in caplog.records if "EKEYREJECTED" in record.getMessage()]
    assert 1 <= len(heard) + len(lines) <= 2 * (2 + int(time.monotonic() - start)), "one a second for each side"
    for text in (caplog.text, str(heard), str(caught.value)):
        assert WORD not in text
        assert OTHER not in text


def test_one_stranger_does_not_disturb_the_others(engines: Any) -> None:
    """S8: friends go on while a stranger tries."""
    a, b, stranger = engines(WORD), engines(WORD), engines(OTHER)
    for _ in range(20):
        with pytest.raises(RemoteAccessError):
            write(stranger, b)
        write(a, b)
    until(lambda: b.stats()["refused"]["auth"] >= 20)


def test_the_errors_have_help() -> None:
    assert "FABRIC_SECRET" in CODES["EACCES"].meaning
    assert "FABRIC_SECRET" in CODES["EKEYREJECTED"].causes
    assert CODES["EUSERS"].cure


# ---- nothing shows it ------------------------------------------------------------------------------------------------


def test_no_text_of_the_settings_shows_it() -> None:
    """S10: repr, str, dumps, errors of other fields, tracebacks of a bad secret."""
    settings = Settings.load(environ={"FABRIC_SECRET": WORD})
    dumped = (repr(settings), str(settings), f"{settings}", str(settings.model_dump()), settings.model_dump_json())
    for text in (*dumped, repr(settings.replace(nics=2)), repr(settings.secret)):
        assert WORD not in text
    wrong: list[dict[str, Any]] = [{"secret": [WORD]}, {"secret": {WORD: 1}}, {"secret": WORD, "nics": WORD[:0] + "no"}]
    for values in wrong:
        with pytest.raises(ConfigError) as caught:
            Settings(**values)
        assert WORD not in str(caught.value)
        assert WORD not in "".join(traceback.format_exception(caught.value, chain=True))


def run(*args: str, secret: str = WORD, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fabric_core.cli", *args],
        env={**os.environ, **({"FABRIC_SECRET": secret} if secret else {}), "COLUMNS": "500", **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    "args",
    [
        ["env"],
        ["env", "--json"],
        ["env", "--export"],
        ["doctor", "-v"],
        ["doctor", "--json"],
        ["plugins", "--json"],
        ["ping", "local:nobody", "--json"],
        ["ping", "nonsense"],
        ["version", "--json"],
    ],
    ids=" ".join,
)
def test_no_command_shows_it(args: list[str], tmp_path: Path) -> None:
    """S10: whatever a command prints, on both streams, and what it leaves in TMPDIR (crash reports)."""
    done = run(*args, FABRIC_LOG_LEVEL="debug", FABRIC_LOCAL_DIR=str(tmp_path / "s"), TMPDIR=str(tmp_path))
    assert done.returncode in (0, 1, 2, 4), done.stderr
    assert done.stdout + done.stderr
    assert WORD not in done.stdout + done.stderr
    for path in tmp_path.rglob("*"):
        if stat.S_ISREG(path.stat().st_mode):
            assert WORD not in path.read_text(errors="replace")


def test_a_refusal_on_the_command_line_does_not_show_it(tmp_path: Path) -> None:
    done = run("env", secret="short-" + WORD[:5], FABRIC_NICS="99")
    assert done.returncode == 2
    assert WORD[:5] not in done.stdout + done.stderr


def test_env_says_that_it_is_set_and_prints_no_line_that_would_set_a_wrong_one() -> None:
    rows = {row["name"]: row for row in json.loads(run("env", "--json").stdout)["data"]["settings"]}
    assert rows["FABRIC_SECRET"]["value"] == "(set, not shown)"
    assert rows["FABRIC_SECRET"]["source"] == "env"
    lines = run("env", "--export").stdout.splitlines()
    assert next(line for line in lines if "export FABRIC_SECRET=" in line).startswith("# ")


@pytest.mark.parametrize(("secret", "words"), [(WORD, "authenticated by FABRIC_SECRET"), ("", "not authenticated")])
def test_doctor_says_whether_handshakes_are_authenticated(secret: str, words: str, tmp_path: Path) -> None:
    done = run("doctor", "--json", secret=secret, FABRIC_LOCAL_DIR=str(tmp_path / "s"))
    checks = {check["name"]: check for check in json.loads(done.stdout)["data"]["checks"]}
    assert words in checks["handshakes"]["found"]
    assert "this uid" in checks["handshakes"]["found"]
    assert "clear text" in checks["encryption"]["found"]


def test_doctor_fails_on_a_secret_that_cannot_be_used(secret_file: Path, tmp_path: Path) -> None:
    secret_file.chmod(0o644)
    environ = {"FABRIC_SECRET_FILE": str(secret_file), "FABRIC_LOCAL_DIR": str(tmp_path / "s")}
    done = run("doctor", "--json", secret="", **environ)
    checks = {check["name"]: check for check in json.loads(done.stdout)["data"]["checks"]}
    assert checks["handshakes"]["status"] == "FAIL"
    assert "chmod 600" in checks["handshakes"]["found"]
    assert done.returncode == 1


def test_no_command_takes_it_as_an_argument() -> None:
    """S1: an argument is visible to every user of the machine."""
    import typer.main

    from fabric_core.cli import build

    def walk(command: Any) -> Iterator[str]:
        for parameter in command.params:
            yield from parameter.opts
            yield parameter.name or ""
        for sub in getattr(command, "commands", {}).values():
            yield from walk(sub)

    names = set(walk(typer.main.get_command(build(["doctor"]))))
    for name in ("bench", "ping", "env", "doctor", "topo", "plugins", "demo"):
        names |= set(walk(typer.main.get_command(build([name]))))
    assert "--json" in names
    assert [name for name in names if "secret" in name.lower()] == []


def test_a_secret_may_be_any_bytes_and_is_the_same_from_a_file(tmp_path: Path) -> None:
    raw = b"\xff\xfe-sixteen-bytes-\xa0"
    (tmp_path / "secret").write_bytes(raw + b"\n")
    (tmp_path / "secret").chmod(0o600)
    code = (
        "from fabric_core.config import Settings\n"
        "from fabric_core.secret import handshake_key\n"
        "print(handshake_key(Settings.load()).hex())\n"
    )
    keys = set()
    for extra in ({b"FABRIC_SECRET": raw}, {b"FABRIC_SECRET_FILE": os.fsencode(tmp_path / "secret")}):
        ran = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env={**os.environb, **extra}
        )
        assert ran.returncode == 0, ran.stderr
        keys.add(ran.stdout)
    assert len(keys) == 1
