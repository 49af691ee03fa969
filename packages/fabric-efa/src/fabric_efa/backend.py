"""The `efa` backend as fabric-core sees it: which NICs there are, and opening those that serve a device."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from fabric_core.domain import API_VERSION, DeviceInfo, GroupConfig, NativeDomain, Unavailable
from fabric_core.errors import BackendError, FabricError, Unsupported
from fabric_efa import library
from fabric_efa.nics import Choice, choose, default_provider
from fabric_efa.options import VARIABLES, Options

if TYPE_CHECKING:
    from fabric_core.domain import Domain

__all__ = ["EfaBackend", "backend"]

_ERR_MAX = 512
_PEERS = 1024
_ADDRESS = re.compile(r"[A-Za-z0-9_+-]{1,64}/([0-9.]{7,15}:[0-9]{1,5}|([0-9a-f]{2}){1,64})#[0-9a-f]{1,16}")


class EfaBackend:
    """See the package's text. Settings: `nics`, `heartbeat`, `connect_timeout`, `secret`; and FABRIC_EFA_*."""

    name = "efa"
    api_version = API_VERSION
    variables = VARIABLES

    def probe(self) -> list[DeviceInfo | Unavailable]:
        """EFA devices, or what the chosen provider offers; a missing library is one line with its cure."""
        try:
            options = Options.load()
            provider = default_provider(options)
            found = library.offers(options, provider)
            version, _api = library.versions(options)
        except FabricError as error:
            return [Unavailable("efa", getattr(error, "reason", "") or str(error), getattr(error, "cure", ""))]
        if not found:
            return [Unavailable("efa", f"libfabric {version} has no provider {provider!r} here", "`fi_info -l`")]
        devices: list[DeviceInfo | Unavailable] = []
        for nic in {nic.domain: nic for nic in reversed(found)}.values():
            fast = nic.provider.startswith("efa")
            devices.append(
                DeviceInfo(
                    nic.domain,
                    "efa",
                    state=nic.state or "up",
                    rate_gbit_s=nic.bits_per_s / 1e9 if fast and nic.bits_per_s else None,
                    pci=nic.pci or None,
                    mtu=nic.mtu or None,
                    caps=("imm", "gpu-direct") if fast else ("imm",),
                    note=f"libfabric {version}, provider {nic.provider}",
                )
            )
        return devices[::-1]

    def checks(self) -> Iterator[dict[str, str]]:
        """For `fabric doctor`."""
        from fabric_efa.doctor import checks

        return checks()

    def known_address(self, domain: str) -> bool:
        """Whether this is PROVIDER/HOST:PORT#INCARNATION or PROVIDER/HEX#INCARNATION."""
        return _ADDRESS.fullmatch(domain) is not None

    def words(self, nic: str, peer: str, status: int) -> str:
        """For the texts of errors: what the provider said of it."""
        return library.words(nic, peer, status)

    def open_group(self, config: GroupConfig) -> list[NativeDomain | Domain]:
        """Open the NICs of FABRIC_EFA_NICS, or those near the device.

        Raises BackendError with libfabric's reason, ConfigError for settings that cannot be used, and Unsupported for
        GPU memory on a provider that cannot reach it.
        """
        options = Options.load()
        ffi, lib = library.load(options)
        chosen = choose(options, config)
        if config.device.startswith("cuda") and not chosen[0].provider.startswith(("efa", "verbs", "cxi")):
            raise Unsupported(
                f"provider {chosen[0].provider} does not reach GPU memory; open a cpu engine, or use an EFA instance"
            )
        incarnation = secrets.randbits(63) | 1
        opened: list[NativeDomain | Domain] = []
        try:
            for number, choice in enumerate(chosen):
                ctx = self._open_one(ffi, lib, config, options, choice, number, incarnation)
                opened.append(NativeDomain(lib.fab_efa_ops(), ctx, keepalive=lib))
        except BaseException:
            for domain in opened:
                assert isinstance(domain, NativeDomain)
                lib.fab_efa_close(ffi.cast("void *", domain.ctx))
            raise
        return opened

    @staticmethod
    def _open_one(
        ffi: Any, lib: Any, config: GroupConfig, options: Options, choice: Choice, number: int, incarnation: int
    ) -> int:
        from fabric_core.native_api import native_api
        from fabric_core.secret import handshake_key

        settings: Any = config.settings
        key = handshake_key(settings)
        contact = lib.fab_efa_contact_of(native_api())
        if contact == ffi.NULL:
            raise BackendError("this fabric-core does not hand out its first contact; upgrade fabric-core")
        held = [ffi.new("char[]", word.encode()) for word in (choice.provider, choice.domain, choice.source)]
        cfg = ffi.new(
            "fab_efa_cfg *",
            {
                "provider": held[0],
                "domain": held[1] if choice.domain else ffi.NULL,
                "source": held[2] if choice.source else ffi.NULL,
                "key": ffi.NULL if key is None else ffi.from_buffer("uint8_t[32]", key),
                "contact": contact,
                "incarnation": incarnation,
                "heartbeat_ns": int(settings.heartbeat * 1e9),
                "connect_ns": int(settings.connect_timeout * 1e9),
                "strict_seed": -1 if options.strict is None else options.strict,
                "nic": number,
                "max_peers": _PEERS,
                "unguarded": int(options.unguarded),
            },
        )
        out = ffi.new("void **")
        err = ffi.new("char[]", _ERR_MAX)
        if lib.fab_efa_open(cfg, out, err, _ERR_MAX) < 0:
            where = choice.source or choice.domain or "default"
            raise BackendError(f"provider {choice.provider}, NIC {where}: {library.text(ffi, err)}")
        return int(ffi.cast("uintptr_t", out[0]))


backend = EfaBackend()
