"""Who plugs into fabric: backends and commands, found through entry points, with a reason for each that is not used.

    [project.entry-points."fabric.backends"]     an object that fits `fabric_core.domain.Backend`
    [project.entry-points."fabric.commands"]     a typer app: `fabric NAME ...`

Candidates for a name, in this order; the first wins, the others are shown as duplicates:
`register()` in code, what core brings itself, then installed packages in the order of their names.

Nothing a plug-in does when it is imported gets out of `discover()`. FABRIC_BACKENDS (names separated by commas)
restricts the backends that are loaded at all. Imports the standard library only.
"""

from __future__ import annotations

import difflib
import os
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal

from fabric_core._version import __version__
from fabric_core.domain import API_VERSION, Backend, DeviceInfo
from fabric_core.errors import BackendError, ConfigError

__all__ = [
    "BACKENDS",
    "COMMANDS",
    "Plugin",
    "Status",
    "discover",
    "get_backend",
    "load_command",
    "register",
    "select",
    "unregister",
]

BACKENDS = "fabric.backends"
COMMANDS = "fabric.commands"

#: "found": not loaded yet (discover(load=False)).
Status = Literal["ok", "found", "failed", "filtered", "duplicate", "incompatible"]

#: Known without any metadata, so that a source checkout on sys.path works too.
_BUILT_IN = {"local": "fabric_core.backends.local:backend", "sim": "fabric_core.backends.sim:backend"}
_CORE = "fabric-core"

_registered: dict[str, Backend] = {}


@dataclass(slots=True)
class Plugin:
    """One candidate, and what became of it."""

    name: str
    group: str
    package: str  #: distribution it came from; "(code)" for register()
    version: str
    status: Status = "found"
    reason: str = ""
    cure: str = ""
    value: str = ""  #: "module:attribute"
    summary: str = ""  #: one line, without importing anything
    api_version: int | None = None  #: what a backend was built for
    traceback: str = ""  #: of a failed import
    _object: Any = field(default=None, repr=False, compare=False)

    def load(self) -> Any:
        """Return the object (imported now, if not yet). Raises BackendError if this candidate is not usable."""
        if self.status == "found":
            _load(self)
        if self.status != "ok":
            text = f"{self.name} (from {self.package} {self.version}) is {self.status}: {self.reason}"
            raise BackendError(f"{text}; {self.cure}" if self.cure else text)
        return self._object


def register(name: str, backend: Backend, *, replace: bool = False) -> None:
    """Make a backend known by code (tests, examples): it wins over an installed one. Raises ConfigError."""
    wrong = _misfit(name, backend)
    if wrong:
        raise ConfigError(f"cannot register {name!r}: {wrong}")
    if name in _registered and not replace:
        raise ConfigError(f"a backend named {name!r} is registered already; pass replace=True to take its place")
    _registered[name] = backend


def unregister(name: str) -> None:
    """Undo register(); unknown names are fine."""
    _registered.pop(name, None)


def allow_list(allow: Sequence[str] | None = None) -> tuple[str, ...] | None:
    """Return the names that may be loaded (None: all): `allow`, or else FABRIC_BACKENDS."""
    if allow is not None:
        return tuple(allow)
    names = tuple(part.strip() for part in os.environ.get("FABRIC_BACKENDS", "").split(","))
    return tuple(name for name in names if name) or None


def discover(
    group: str | None = None, *, load: bool = True, allow: Sequence[str] | None = None, only: str | None = None
) -> list[Plugin]:
    """Return every candidate of one group, or of both, with its status. Never raises for a broken one.

    `load=False` imports nothing: statuses stay at "found". `allow`: `Settings.backends`; by default FABRIC_BACKENDS.
    `only`: load this name alone.
    """
    found: list[Plugin] = []
    for which in (BACKENDS, COMMANDS) if group is None else (group,):
        found += _candidates(which)
    _mark(found, allow_list(allow))
    if load:
        for plugin in found:
            if plugin.status == "found" and only in (None, plugin.name):
                _load(plugin)
    return found


def get_backend(name: str, *, allow: Sequence[str] | None = None) -> Backend:
    """Return the backend of that name.

    Raises ConfigError for a name nobody has (with close spellings), or one that the allow list excludes, and
    BackendError for one that is there but broken.
    """
    plugins = discover(BACKENDS, allow=allow, only=name)
    mine = [plugin for plugin in plugins if plugin.name == name]
    if not mine:
        known = sorted({plugin.name for plugin in plugins})
        near = difflib.get_close_matches(name, known, n=2, cutoff=0.5)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise ConfigError(f"there is no backend {name!r}; known: {', '.join(known)}{hint}")
    if mine[0].status == "filtered":
        raise ConfigError(f"backend {name!r} is installed, but {mine[0].reason}; {mine[0].cure}")
    backend: Backend = mine[0].load()
    return backend


def select(name: str = "auto", *, allow: Sequence[str] | None = None) -> Backend:
    """Return the backend to use: by name, or for "auto" the one with the fastest link that is up, else `local`.

    Backends registered by code are used by name only. A probe that raises counts as having no device.
    """
    if name != "auto":
        return get_backend(name, allow=allow)
    best: tuple[float, Backend] | None = None
    for plugin in discover(BACKENDS, allow=allow):
        if plugin.status != "ok" or plugin.package == "(code)" or plugin.name in _BUILT_IN:
            continue
        rate = _fastest(plugin._object)
        if rate > 0 and (best is None or rate > best[0]):
            best = (rate, plugin._object)
    return best[1] if best else get_backend("local", allow=allow)


def load_command(name: str) -> Plugin | None:
    """Return the winning plug-in for `fabric NAME`, loaded (or failed), or None if there is none."""
    for plugin in discover(COMMANDS, only=name):
        if plugin.name == name and plugin.status != "duplicate":
            return plugin
    return None


# ---- inside ----------------------------------------------------------------------------------------------------------


def _candidates(group: str) -> list[Plugin]:
    """All candidates of a group in order of precedence, not judged yet."""
    found: list[Plugin] = []
    if group == BACKENDS:
        for name, backend in sorted(_registered.items()):
            plugin = Plugin(name, group, "(code)", "", "ok", api_version=backend.api_version)
            plugin._object = backend
            found.append(plugin)
        for name, value in _BUILT_IN.items():
            found.append(Plugin(name, group, _CORE, __version__, value=value, summary="built in"))
    installed = []
    for entry in entry_points(group=group):
        package, version, summary = _origin(entry)
        if group == BACKENDS and package == _CORE and entry.name in _BUILT_IN:
            continue  # core's own metadata says the same once more
        installed.append(Plugin(entry.name, group, package, version, value=entry.value, summary=summary))
    return found + sorted(installed, key=lambda plugin: (plugin.name, plugin.package, plugin.value))


def _origin(entry: EntryPoint) -> tuple[str, str, str]:
    """Package, version and summary; damaged metadata must not hide the entry."""
    try:
        if entry.dist is None:
            return "?", "?", ""
        metadata = entry.dist.metadata
        summary = (metadata.get_all("Summary") or [""])[0]
        return metadata["Name"] or "?", entry.dist.version or "?", summary
    except Exception:
        return "?", "?", ""


def _mark(found: list[Plugin], allow: tuple[str, ...] | None) -> None:
    """Settle what needs no import: duplicates and the allow list."""
    first: dict[tuple[str, str], Plugin] = {}
    for plugin in found:
        winner = first.setdefault((plugin.group, plugin.name), plugin)
        if winner is not plugin:
            plugin.status = "duplicate"
            plugin.reason = f"the name is taken by {winner.package} {winner.version}".rstrip()
            plugin.cure = f"uninstall one of {winner.package} and {plugin.package}"
        elif plugin.group == BACKENDS and allow is not None and plugin.name not in allow:
            plugin.status = "filtered"
            plugin.reason = f"FABRIC_BACKENDS allows only {', '.join(allow)}"
            plugin.cure = f"add {plugin.name} to FABRIC_BACKENDS"


def _load(plugin: Plugin) -> None:
    """Import the object and judge it; sets the status, raises nothing but KeyboardInterrupt."""
    module_name, _, attribute = plugin.value.partition(":")
    try:
        loaded: Any = import_module(module_name)
        for part in filter(None, attribute.split(".")):
            loaded = getattr(loaded, part)
    except (Exception, SystemExit) as error:
        plugin.status = "failed"
        plugin.reason = f"{type(error).__name__}: {error}".strip().rstrip(":")
        plugin.cure = _cure_for(error, plugin)
        plugin.traceback = traceback.format_exc()
        return
    if plugin.group == BACKENDS:
        plugin.api_version = getattr(loaded, "api_version", None)
        if isinstance(plugin.api_version, int) and plugin.api_version != API_VERSION:
            side = plugin.package if plugin.api_version < API_VERSION else _CORE
            plugin.status = "incompatible"
            plugin.reason = f"built for backend API {plugin.api_version}, fabric-core {__version__} has {API_VERSION}"
            plugin.cure = f"upgrade {side}"
            return
        wrong = _misfit(plugin.name, loaded)
        if wrong:
            plugin.status = "failed"
            plugin.reason = wrong
            plugin.cure = f"a defect of {plugin.package}: tell its authors; the contract is fabric_core.domain.Backend"
            return
    plugin.status = "ok"
    plugin._object = loaded


def _misfit(name: str, backend: object) -> str:
    """Say why an object is no backend of that name, or ""."""
    missing = [part for part in ("name", "api_version", "probe", "open_group") if not hasattr(backend, part)]
    if missing:
        return f"it is no backend: {type(backend).__name__} lacks {', '.join(missing)}"
    version = getattr(backend, "api_version", None)
    if version != API_VERSION:
        return f"built for backend API {version!r}, fabric-core {__version__} has {API_VERSION}"
    own = getattr(backend, "name", None)
    if own != name:
        return f"it is known as {name!r} but calls itself {own!r}, which its addresses would show"
    return ""


def _cure_for(error: BaseException, plugin: Plugin) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name:
        top = error.name.partition(".")[0]
        if top == plugin.value.partition(".")[0].partition(":")[0]:
            return f"reinstall {plugin.package}: its own module is missing"
        return f"install what provides the Python module {top!r}"
    if isinstance(error, ImportError):
        return f"install the library that is missing, or a build of {plugin.package} for this Python"
    return f"a defect of {plugin.package}: see the traceback (`fabric plugins -v`)"


def _fastest(backend: Backend) -> float:
    try:
        devices = backend.probe()
    except Exception:
        return 0.0
    rates = [device.rate_gbit_s or 0.0 for device in devices if isinstance(device, DeviceInfo) and device.state == "up"]
    return max(rates, default=0.0)
