"""Settings: precedence, sources, and error texts that name variable, value and what is allowed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fabric_core.config import PREFIX, Settings, allowed, default_local_dir, unknown_variables
from fabric_core.errors import ConfigError, FabricError


def load(environ: dict[str, str] | None = None, **overrides: object) -> Settings:
    return Settings.load(environ=environ or {}, **overrides)


def test_defaults_say_that_they_are_defaults() -> None:
    settings = load()
    assert settings.backend == "auto"
    assert settings.timeout == 30.0
    assert settings.nics is None
    assert set(settings.sources().values()) == {"default"}


def test_code_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    file = tmp_path / "fabric.toml"
    file.write_text('nics = 2\ntimeout = 11.0\nheartbeat = 0.5\nbackends = ["local"]\n')
    environ = {"FABRIC_CONFIG": str(file), "FABRIC_NICS": "3", "FABRIC_TIMEOUT": "12"}
    settings = load(environ, nics=4)
    assert (settings.nics, settings.timeout, settings.heartbeat) == (4, 12.0, 0.5)
    assert settings.backends == ("local",)
    sources = settings.sources()
    assert [sources[name] for name in ("nics", "timeout", "heartbeat", "polling")] == ["code", "env", "file", "default"]


def test_an_empty_variable_counts_as_not_set() -> None:
    assert load({"FABRIC_NICS": "", "FABRIC_TIMEOUT": " "}).sources()["nics"] == "default"


def test_an_override_of_none_is_not_an_override() -> None:
    assert load({"FABRIC_NICS": "3"}, nics=None).nics == 3


@pytest.mark.parametrize(
    ("environ", "field", "value"),
    [
        ({"FABRIC_BACKENDS": "local, ibverbs,"}, "backends", ("local", "ibverbs")),
        ({"FABRIC_PIN_CPUS": "1"}, "pin_cpus", True),
        ({"FABRIC_POLLING": "BUSY"}, "polling", "busy"),
        ({"FABRIC_LOG_LEVEL": "Debug"}, "log_level", "debug"),
        ({"FABRIC_LOCAL_SHUFFLE": "0"}, "local_shuffle", 0),
        ({"FABRIC_SUBMIT_TIMEOUT": "0"}, "submit_timeout", 0.0),
        ({"FABRIC_LOCAL_DIR": "/run/x"}, "local_dir", "/run/x"),
    ],
)
def test_variables_are_read_as_their_fields_type(environ: dict[str, str], field: str, value: object) -> None:
    assert getattr(load(environ), field) == value


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NICS", "0"),
        ("NICS", "9"),
        ("NICS", "two"),
        ("POLLING", "fast"),
        ("TIMEOUT", "0"),
        ("TIMEOUT", "-1"),
        ("TIMEOUT", "nan"),
        ("TIMEOUT", "inf"),
        ("HEARTBEAT", "soon"),
        ("SPIN_US", "-1"),
        ("MAX_INFLIGHT", "0"),
        ("IMM_SLOTS", str(1 << 25)),
        ("LOCAL_PATH", "teleport"),
        ("LOCAL_SHUFFLE", "-1"),
        ("LOCAL_DIR", "relative/path"),
        ("LOCAL_DIR", "/" + "x" * 90),
        ("PIN_CPUS", "perhaps"),
    ],
)
def test_a_bad_value_names_variable_value_and_what_is_allowed(name: str, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load({PREFIX + name: value})
    text = str(caught.value)
    assert f"FABRIC_{name}" in text
    assert repr(value) in text
    assert allowed(name.lower()) in text


def test_all_bad_values_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load({"FABRIC_NICS": "0", "FABRIC_POLLING": "x"})
    assert "FABRIC_NICS" in str(caught.value)
    assert "FABRIC_POLLING" in str(caught.value)


def test_a_bad_value_in_the_file_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "f.toml"
    file.write_text("nics = 99\n")
    with pytest.raises(ConfigError, match=rf"nics in {file} = 99: must be an integer from 1 to 8"):
        load({"FABRIC_CONFIG": str(file)})


@pytest.mark.parametrize(
    ("content", "hint"),
    [(b"nisc = 2\n", "did you mean nics"), (b"nics = \n", "not valid TOML"), (b"\xff\xfe", "not valid TOML")],
)
def test_a_bad_file_is_a_config_error(tmp_path: Path, content: bytes, hint: str) -> None:
    file = tmp_path / "f.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=hint) as caught:
        load({"FABRIC_CONFIG": str(file)})
    assert str(file) in str(caught.value)


def test_a_missing_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load({"FABRIC_CONFIG": str(tmp_path / "nowhere.toml")})


def test_code_errors_are_config_errors_with_close_spellings() -> None:
    with pytest.raises(ConfigError, match="did you mean nics"):
        load(nisc=2)
    with pytest.raises(ConfigError, match="nics=99: must be an integer from 1 to 8"):
        load(nics=99)
    with pytest.raises(ConfigError, match="nics=99"):
        Settings(nics=99)
    with pytest.raises(FabricError, match="did you mean timeout"):
        Settings(timeouts=1)


def test_replace_keeps_sources_and_marks_what_code_changed() -> None:
    base = load({"FABRIC_NICS": "3", "FABRIC_TIMEOUT": "5"})
    changed = base.replace(nics=4, heartbeat=None)
    assert (changed.nics, changed.timeout) == (4, 5.0)
    assert (changed.sources()["nics"], changed.sources()["timeout"]) == ("code", "env")
    assert changed.sources()["heartbeat"] == "default"
    assert base.nics == 3
    with pytest.raises(ConfigError):
        base.replace(nics=0)


def test_settings_cannot_be_changed_in_place() -> None:
    settings = load()
    with pytest.raises(ValueError, match="frozen"):
        settings.nics = 3


def test_every_field_has_a_help_text_and_says_what_it_takes() -> None:
    for name, info in Settings.model_fields.items():
        assert info.description, name
        assert allowed(name) != "see `fabric env`", name


def test_the_socket_directory_belongs_to_the_user() -> None:
    assert default_local_dir({"XDG_RUNTIME_DIR": "/run/user/7"}) == "/run/user/7/fabric"
    assert default_local_dir({}) == f"/tmp/fabric-{os.getuid()}"
    assert default_local_dir({"XDG_RUNTIME_DIR": "odd"}) == f"/tmp/fabric-{os.getuid()}"
    assert load({"XDG_RUNTIME_DIR": "/run/user/7"}).local_dir == "/run/user/7/fabric"


def test_variables_that_nobody_reads_are_found_with_a_suggestion() -> None:
    environ = {"FABRIC_NISC": "1", "FABRIC_ZZZZ": "1", "FABRIC_NICS": "1", "FABRIC_CONFIG": "", "FABRIC_MYNIC_QPS": "4"}
    assert unknown_variables(environ, ["FABRIC_MYNIC_QPS"]) == {"FABRIC_NISC": "FABRIC_NICS", "FABRIC_ZZZZ": ""}
