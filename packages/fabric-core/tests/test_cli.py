"""The command line: output, JSON keys, what is imported. Exit codes have a file of their own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from fabric_core import errors
from fabric_core._version import __version__
from fabric_core.cli import build
from fabric_core.cli.app import COMMANDS
from fabric_core.cli.bench import parse_size
from fabric_core.cli.explain import explain
from fabric_core.cli.render import Column, console, show_table, size
from fabric_core.cli.topo import cpu_ranges

ENVELOPE = ["schema", "host", "time", "versions", "data", "problems"]


@pytest.fixture(autouse=True)
def _full_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)  # pytest-xdist sets it


def fabric(*argv: str) -> Result:
    return CliRunner().invoke(build(argv), list(argv))


def fabric_json(*argv: str) -> dict[str, Any]:
    result = fabric(*argv, "--json")
    content: dict[str, Any] = json.loads(result.stdout)
    assert list(content) == ENVELOPE
    return content


def test_help_lists_every_command_and_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from fabric_core.cli import main\n"
        "try:\n    main(['--help'])\n"
        "except SystemExit as e:\n    assert not e.code, e.code\n"
        "print('LOADED', *sorted(m.split('.')[0] for m in sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    loaded = set(done.stdout.rpartition("LOADED")[2].split())
    assert not loaded & {"torch", "numpy", "matplotlib", "pydantic", "pytest"}
    for name in COMMANDS:
        assert name in done.stdout


def test_a_command_imports_no_torch_and_no_numpy() -> None:
    code = (
        "import sys\n"
        "from fabric_core.cli import main\n"
        "try:\n    main(['devices', '--json'])\n"
        "except SystemExit:\n    pass\n"
        "sys.exit(1 if {'torch', 'numpy'} & set(sys.modules) else 0)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, timeout=60).returncode == 0


def test_every_command_has_help_with_its_options() -> None:
    for name in COMMANDS:
        result = fabric(name, "--help")
        assert result.exit_code == 0, name
        assert "--json" in result.stdout, name


def test_the_whole_app_can_be_built_for_documentation() -> None:
    app = build(None)
    assert {command.name for command in app.registered_commands} >= set(COMMANDS)


def test_version() -> None:
    assert fabric("--version").stdout == f"{__version__}\n"
    assert re.search(rf"^fabric-core +{re.escape(__version__)}", fabric("version").stdout, re.MULTILINE)
    data = fabric_json("version")["data"]
    assert list(data) == ["packages", "python", "platform", "native", "libraries"]
    assert data["packages"]["fabric-core"] == __version__
    assert [list(item) for item in data["libraries"]] == [["name", "found", "needed_by"]] * 3


def test_plugins_json_keys() -> None:
    content = fabric_json("plugins")
    assert content["schema"] == "fabric.plugins/1"
    assert list(content["data"]) == ["plugins", "checks"]
    local = next(row for row in content["data"]["plugins"] if row["name"] == "local")
    keys = ["name", "group", "package", "version", "api_version", "status", "reason", "cure", "traceback"]
    assert list(local) == keys


def test_devices_json_keys() -> None:
    content = fabric_json("devices")
    assert content["schema"] == "fabric.devices/1"
    assert list(content["data"]) == ["devices", "unavailable"]
    keys = ["name", "backend", "state", "rate_gbit_s", "numa", "pci", "gpu", "mtu_bytes", "caps", "note"]
    for device in content["data"]["devices"]:
        assert list(device) == keys


def test_devices_lists_local_in_all_forms() -> None:
    assert "local" in fabric("devices", "-l").stdout.splitlines()[0]
    table = fabric("devices").stdout
    assert table.splitlines()[0].split()[:4] == ["DEVICE", "BACKEND", "STATE", "RATE(Gb/s)"]
    assert "local" in fabric("devices", "-b", "local", "-v").stdout


def test_topo_json_keys() -> None:
    content = fabric_json("topo")
    assert content["schema"] == "fabric.topo/1"
    assert list(content["data"]) == ["origin", "nodes", "things", "matrix", "groups"]
    for node in content["data"]["nodes"]:
        assert list(node) == ["id", "cpus", "memory_bytes"]
    for group in content["data"]["groups"]:
        assert list(group) == ["device", "nics", "distance", "rate_gbit_s"]


def test_topo_dump_is_an_input_elsewhere(tmp_path: Path) -> None:
    dump = tmp_path / "dump.json"
    first = fabric_json("topo", "--dump", str(dump))["data"]
    again = fabric_json("topo", "--from", str(dump))["data"]
    assert again.pop("origin") != first.pop("origin")
    assert again == first
    assert "written:" in fabric("topo", "--dump", str(dump)).stderr


def test_env_prints_each_setting_with_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FABRIC_NICS", "3")
    monkeypatch.setenv("FABRIC_NISC", "3")
    content = fabric_json("env")
    assert content["schema"] == "fabric.env/1"
    rows = {row["name"]: row for row in content["data"]["settings"]}
    assert list(rows["FABRIC_NICS"]) == ["name", "value", "source", "allowed", "help"]
    assert (rows["FABRIC_NICS"]["value"], rows["FABRIC_NICS"]["source"]) == ("3", "env")
    assert rows["FABRIC_TIMEOUT"]["source"] == "default"
    assert content["problems"] == ["FABRIC_NISC is set, but nothing reads it; did you mean FABRIC_NICS?"]
    assert "FABRIC_NISC" in fabric("env").stdout


def test_env_grep_and_export(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FABRIC_LOCAL_DIR", "/run/with blank")
    text = fabric("env", "-g", "local_dir", "--export").stdout
    assert text.splitlines()[1] == "export FABRIC_LOCAL_DIR='/run/with blank'"
    text = fabric("env", "-g", "heartbeat", "--export").stdout
    assert text.splitlines()[1].startswith("# export FABRIC_HEARTBEAT=")
    assert "no setting contains" in fabric("env", "-g", "zzzz").stdout


@pytest.mark.parametrize("code", ["ECONNRESET", "econnreset", "104", "-104"])
def test_explain_takes_names_and_numbers_of_either_sign(code: str) -> None:
    result = fabric("explain", code)
    assert result.exit_code == 0
    assert result.stdout.startswith("ECONNRESET (104)\n")
    assert "PeerLost" in result.stdout


def test_explain_knows_our_own_exceptions_and_the_rest_of_errno() -> None:
    assert explain("PeerRestarted").causes.startswith("ESTALE:")
    assert explain("peerlost").raised_as.startswith("PeerLost > TransferError > FabricError")
    assert explain("EXDEV").meaning.startswith("Invalid cross-device link")
    keys = ["name", "number", "raised_as", "meaning", "causes", "cure"]
    assert list(fabric_json("explain", "ESTALE")["data"]) == keys


def test_explain_suggests_for_what_it_does_not_know() -> None:
    result = fabric("explain", "ECONRESET")
    assert result.exit_code == 2
    assert "did you mean ECONNRESET" in result.stderr
    assert fabric("explain", "99999").exit_code == 2


def test_every_error_class_and_code_can_be_explained() -> None:
    for name in errors.__all__:
        thing = getattr(errors, name)
        if isinstance(thing, type) and issubclass(thing, errors.FabricError):
            assert explain(name).meaning, name
    for code, known in errors.CODES.items():
        assert explain(code).cure == known.cure
        assert all(known)


@pytest.mark.parametrize("text", ["64", "64B", " 64 b"])
def test_parse_size_of_bytes(text: str) -> None:
    assert parse_size(text) == 64


@pytest.mark.parametrize(("text", "value"), [("4K", 4096), ("4KiB", 4096), ("1m", 1 << 20), ("2G", 2 << 30)])
def test_parse_size_with_units(text: str, value: int) -> None:
    assert parse_size(text) == value


@pytest.mark.parametrize("text", ["", "K", "-1", "0", "1.5M", "4T", "1e6"])
def test_parse_size_refuses(text: str) -> None:
    with pytest.raises(Exception, match="is no size"):
        parse_size(text)


def test_sizes_and_cpus_for_people() -> None:
    assert [size(count) for count in (0, 1023, 1024, 1536, 1 << 20, 3 << 30)] == [
        "0 B",
        "1023 B",
        "1 KiB",
        "1.5 KiB",
        "1 MiB",
        "3 GiB",
    ]
    assert cpu_ranges((0, 1, 2, 8)) == "0-2,8"
    assert cpu_ranges([]) == ""


def narrow(width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[str]:
    monkeypatch.setenv("COLUMNS", str(width))
    columns = [Column("NAME"), Column("BIG", right=True, drop=2), Column("MORE", drop=1), Column("TEXT", text=True)]
    show_table(console(), columns, [["eth0", "123456789012345", "abcdefghij", "some words that may continue below"]])
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


def test_a_table_fits_by_leaving_out_optional_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wide = narrow(100, monkeypatch, capsys)
    assert wide[0].split() == ["NAME", "BIG", "MORE", "TEXT"]
    assert len(wide) == 2
    assert narrow(60, monkeypatch, capsys)[0].split() == ["NAME", "MORE", "TEXT"]
    small = narrow(38, monkeypatch, capsys)
    assert small[0].split() == ["NAME", "TEXT"]
    assert all(len(line) <= 38 for line in small)


def test_output_into_a_pipe_is_neither_cut_nor_coloured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    show_table(console(), [Column("STATUS", status=True), Column("T", text=True)], [["FAIL", "x" * 300]])
    out = capsys.readouterr().out
    assert "x" * 300 in out
    assert "\x1b" not in out


def test_a_column_without_any_value_is_left_out_if_it_is_optional(capsys: pytest.CaptureFixture[str]) -> None:
    show_table(console(), [Column("A"), Column("B", drop=1), Column("C")], [["1", "-", "-"]])
    assert capsys.readouterr().out.splitlines()[0].split() == ["A", "C"]
