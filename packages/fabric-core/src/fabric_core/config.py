"""Every setting of fabric, in one place: environment over file over defaults, and code over all of them.

    engine = TransferEngine.open(nics=2)          code
    FABRIC_NICS=2                                 environment: the field's name in capitals, after FABRIC_
    FABRIC_CONFIG=/etc/fabric.toml                file: the field's name as a key at the top level

`fabric env` prints each with its value and where it came from. A bad value raises ConfigError, which names the
variable, the value and what is allowed; nothing is guessed. An empty environment variable counts as not set,
but for those of the secret, which must not get lost unnoticed.

Imports pydantic, so only `TransferEngine.open` and the command line import this module.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, SecretStr, ValidationError, field_validator
from pydantic.fields import FieldInfo

from fabric_core.errors import ConfigError

__all__ = [
    "OTHER_VARIABLES",
    "PREFIX",
    "Settings",
    "Source",
    "allowed",
    "default_local_dir",
    "is_secret",
    "unknown_variables",
]

PREFIX = "FABRIC_"

Source = Literal["default", "file", "env", "code"]

#: FABRIC_* variables that are no fields of Settings -> help.
OTHER_VARIABLES: dict[str, str] = {
    "FABRIC_CONFIG": "Path of a TOML file with settings",
    "FABRIC_CFLAGS": "Build from source: appended to the C compiler's arguments",
    "FABRIC_LDFLAGS": "Build from source: appended to the linker's arguments",
    "FABRIC_CUDA_LIBRARY": "Path of the CUDA driver's library. Not set: libcuda.so.1",
    "FABRIC_VERBOSE": "Build from source: show the compiler's command lines",
}


def default_local_dir(environ: Mapping[str, str] = os.environ) -> str:
    """Return where the local backend's sockets live unless FABRIC_LOCAL_DIR says otherwise: private to the user."""
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    return f"{runtime}/fabric" if runtime.startswith("/") else f"/tmp/fabric-{os.getuid()}"


def _field(default: Any, allowed: str, description: str, **limits: Any) -> Any:
    """A field that can say in words what it takes: for error texts and `fabric env`."""
    return Field(default, description=description, json_schema_extra={"allowed": allowed}, **limits)


@dataclass(slots=True)
class _Origin:
    """Where values came from: the kind of source, and what to call it in an error text."""

    sources: dict[str, Source] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)


class Settings(BaseModel):
    """What an engine is opened with. Immutable; `Settings.load()` is how one gets it."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    backend: str = _field("auto", "auto, or a name that `fabric plugins` prints", "NIC backend to use", min_length=1)
    backends: tuple[str, ...] | None = _field(
        None, "names separated by commas", "Allow list: only these backends are loaded. Not set: all"
    )
    nics: int | None = _field(None, "an integer from 1 to 8", "NICs per group. Not set: all of the device", ge=1, le=8)
    polling: Literal["auto", "busy", "adaptive"] = _field(
        "auto",
        "auto, busy or adaptive",
        "busy: a worker spins on its own core. adaptive: it spins a while, then sleeps. auto: by the number of cores",
    )
    spin_us: int | None = _field(
        None,
        "microseconds, an integer from 0 to 1000000",
        "How long an adaptive worker spins before it sleeps. Not set: by the number of cores",
        ge=0,
        le=1_000_000,
    )
    gpu_linger_us: int = _field(
        0,
        "microseconds, an integer from 0 to 1000000",
        "local backend: how long a kernel that copies pages stays on the GPU without work. 0: it is launched each time",
        ge=0,
        le=1_000_000,
    )
    timeout: float = _field(
        30.0, "seconds, above 0", "Deadline of an operation that was given none: nothing waits for ever", gt=0
    )
    connect_timeout: float = _field(2.0, "seconds, above 0", "How long first contact with a peer may take", gt=0)
    heartbeat: float = _field(1.0, "seconds, above 0", "How often a silent peer is asked whether it is alive", gt=0)
    max_inflight: int = _field(
        65536, "an integer from 1 to 16777216", "Operations of one engine in flight at most", ge=1, le=1 << 24
    )
    submit_timeout: float = _field(
        5.0, "seconds, 0 or more", "How long a full ring may hold a submit before it raises QueueFull", ge=0
    )
    imm_slots: int = _field(
        65536, "an integer from 256 to 16777216", "Immediates of one engine in use at most", ge=256, le=1 << 24
    )
    secret: SecretStr | None = _field(
        None,
        "text of at least 16 bytes, from the environment or code",
        "Secret of the job: handshakes prove it. Better: FABRIC_SECRET_FILE. Not set: none",
    )
    secret_file: str | None = _field(
        None,
        "a path; the file is ours, mode 0600",
        "File with the secret of the job, of at least 16 bytes. Not set: none",
        min_length=1,
    )
    local_dir: str = Field(
        default_factory=default_local_dir,
        description="Directory of the local backend's sockets (mode 0700). Peers must use the same one",
        json_schema_extra={"allowed": "an absolute path of at most 80 bytes"},
    )
    local_path: Literal["auto", "map", "cma", "bounce"] = _field(
        "auto",
        "auto, map, cma or bounce",
        "How the local backend moves data: map shared memory, process_vm_writev, a bounce ring, or what works best",
    )
    local_shuffle: int | None = _field(
        None,
        "a seed, an integer from 0 to 4294967295",
        "For tests: the local backend reorders deliveries and completions on purpose",
        ge=0,
        le=0xFFFFFFFF,
    )
    sim_seed: int | None = _field(
        None,
        "a seed, an integer from 0 to 18446744073709551615",
        "The order that the sim backend puts things in. Not set: another one each time",
        ge=0,
        le=0xFFFFFFFFFFFFFFFF,
    )
    sim_nic: Literal["none", "efa-p5", "efa-p5en", "cx7"] = _field(
        "none",
        "none, efa-p5, efa-p5en or cx7",
        "The NIC whose times the sim backend keeps; none: as fast as memory",
    )
    faults: str | None = _field(
        None,
        "words like 'reorder,delay=2ms,fail=0.001:EIO': see fabric_core.faults",
        "For tests: what goes wrong on purpose, around any backend. Not set: nothing",
        min_length=1,
    )
    pin_cpus: bool = _field(False, "true or false", "Pin worker threads to cores of the device's NUMA node")
    log_level: Literal["debug", "info", "warning", "error"] = _field(
        "warning", "debug, info, warning or error", "What the loggers below `fabric` print"
    )

    _sources: dict[str, Source] = PrivateAttr(default_factory=dict)

    def __init__(self, _origin: _Origin | None = None, **values: Any) -> None:
        """Make settings out of code alone; see `load` for environment and file. Raises ConfigError."""
        origin = _Origin() if _origin is None else _origin
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(_explain(error, origin.labels)) from None
        self._sources = origin.sources if _origin else dict.fromkeys(values, "code")

    @classmethod
    def load(cls, *, environ: Mapping[str, str] | None = None, **overrides: Any) -> Self:
        """Collect all sources; `overrides` are fields given in code. Raises ConfigError.

        An override of None means "not given", so that callers can pass on optional arguments.
        """
        environ = os.environ if environ is None else environ
        values: dict[str, Any] = {}
        origin = _Origin()

        def take(found: Mapping[str, Any], source: Source, label: str) -> None:
            for name, value in found.items():
                values[name] = value
                origin.sources[name] = source
                origin.labels[name] = label.format(name=name, upper=PREFIX + name.upper())

        path = environ.get(PREFIX + "CONFIG", "")
        if path:
            take(_read_file(path), "file", f"{{name}} in {path}")
        take(_read_environment(environ), "env", "{upper}")
        given = {name: value for name, value in overrides.items() if value is not None}
        for name in given:
            if name not in cls.model_fields:
                raise ConfigError(f"there is no setting {name!r}{_close(name, cls.model_fields)}")
        take(given, "code", "{name}=")
        values.setdefault("local_dir", default_local_dir(environ))
        return cls(origin, **values)

    def replace(self, **overrides: Any) -> Self:
        """Return a copy with some fields changed by code; None means "leave it". Raises ConfigError."""
        given = {name: value for name, value in overrides.items() if value is not None}
        changed = type(self)(**{**{name: getattr(self, name) for name in type(self).model_fields}, **given})
        changed._sources = {**self._sources, **dict.fromkeys(given, "code")}
        return changed

    def sources(self) -> dict[str, Source]:
        """Tell for each field where its value came from."""
        return {name: self._sources.get(name, "default") for name in type(self).model_fields}

    @field_validator("backends", mode="before")
    @classmethod
    def _split_names(cls, value: Any) -> Any:
        if isinstance(value, str):
            return tuple(name for name in (part.strip() for part in value.split(",")) if name)
        return value

    @field_validator("log_level", "polling", "local_path", mode="before")
    @classmethod
    def _any_case(cls, value: Any) -> Any:
        return value.strip().lower() if isinstance(value, str) else value

    @field_validator("faults")
    @classmethod
    def _faults_make_sense(cls, value: str | None) -> str | None:
        from fabric_core.faults import Plan

        return None if value is None else str(Plan.parse(value)) or "seed=0"

    @field_validator("local_dir")
    @classmethod
    def _usable_directory(cls, value: str) -> str:
        # A Unix socket's whole path has 107 bytes; the rest is for its name.
        if not value.startswith("/") or len(os.fsencode(value)) > 80:
            raise ValueError("not usable as a directory of sockets")
        return value


def _read_environment(environ: Mapping[str, str]) -> dict[str, str]:
    for name in (PREFIX + "SECRET", PREFIX + "SECRET_FILE"):
        if name in environ and not environ[name].strip():  # what was to fill it failed: not to be taken for "no secret"
            raise ConfigError(f"{name} is set, but blank: unset it to run without a secret, or give it one")
    found = {name: environ.get(PREFIX + name.upper(), "") for name in Settings.model_fields}
    return {name: value for name, value in found.items() if value.strip()}


def is_secret(name: str) -> bool:
    """Whether the value of this field is never shown."""
    return name == "secret"


def _read_file(path: str) -> dict[str, Any]:
    try:
        with Path(path).open("rb") as file:
            content = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"FABRIC_CONFIG={path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"FABRIC_CONFIG={path}: not valid TOML: {error}") from None
    for name in content:
        if is_secret(name):
            raise ConfigError(f"{path}: {name!r} is not taken from here: put it into a file of its own, secret_file")
        if name not in Settings.model_fields:
            raise ConfigError(f"{path}: there is no setting {name!r}{_close(name, Settings.model_fields)}")
    return content


def _close(name: str, known: Iterable[str]) -> str:
    """Return ", did you mean ..." or "", with the known names that look like `name`."""
    near = difflib.get_close_matches(name, list(known), n=2, cutoff=0.6)
    return f", did you mean {' or '.join(near)}?" if near else ""


def allowed(name: str) -> str:
    """Return in words what the field takes."""
    info: FieldInfo = Settings.model_fields[name]
    extra = info.json_schema_extra
    return str(extra["allowed"]) if isinstance(extra, dict) else "see `fabric env`"


def _explain(error: ValidationError, where: Mapping[str, str]) -> str:
    """Say variable, value and what is allowed, for each field that is wrong."""
    lines: dict[str, str] = {}
    for problem in error.errors(include_url=False):
        name = str(problem["loc"][0]) if problem["loc"] else ""
        if name in Settings.model_fields:
            value = "(not shown)" if is_secret(name) else problem["input"]
            label = where.get(name, f"{name}=")
            joint = "" if label.endswith("=") else " = "
            lines.setdefault(name, f"{label}{joint}{value!r}: must be {allowed(name)}")
        else:
            lines.setdefault(name, f"there is no setting {name!r}{_close(name, Settings.model_fields)}")
    return "; ".join(lines.values())


def unknown_variables(environ: Mapping[str, str], declared: Iterable[str] = ()) -> dict[str, str]:
    """Return FABRIC_* variables that nobody reads -> a close spelling that somebody does, or "".

    `declared`: variables that backends read themselves (`Backend.variables`).
    """
    known = {PREFIX + name.upper() for name in Settings.model_fields} | set(OTHER_VARIABLES) | set(declared)
    strange = sorted(name for name in environ if name.startswith(PREFIX) and name not in known)
    return {name: next(iter(difflib.get_close_matches(name, known, n=1, cutoff=0.75)), "") for name in strange}
