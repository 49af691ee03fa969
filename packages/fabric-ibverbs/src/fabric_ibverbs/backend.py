"""The `ibverbs` backend as fabric-core sees it: which NICs there are, and opening those that serve a device."""

from __future__ import annotations

import errno
import re
import secrets
from typing import TYPE_CHECKING, Any

from fabric_core.domain import API_VERSION, DeviceInfo, GroupConfig, NativeDomain, Unavailable
from fabric_core.errors import BackendError, FabricError
from fabric_ibverbs import library
from fabric_ibverbs.options import VARIABLES, Options

if TYPE_CHECKING:
    from fabric_core.domain import Domain
    from fabric_core.topology import Nic
    from fabric_ibverbs.nics import Choice

__all__ = ["VerbsBackend", "backend"]

_ERR_MAX = 512
_ADDRESS = re.compile(r"[0-9a-f]{32}/[0-9a-f]{1,4}/[0-9a-f]{1,6}/[0-9a-f]{1,8}#[0-9a-f]{1,16}")
_NO_NUMA = 0xFFFFFFFF


class VerbsBackend:
    """See the package's text. Settings: `nics`, `heartbeat`, `connect_timeout`, `secret`; and FABRIC_VERBS_*."""

    name = "ibverbs"
    api_version = API_VERSION
    variables = VARIABLES

    def probe(self) -> list[DeviceInfo | Unavailable]:
        """Every RDMA device with its state; what cannot be used says why."""
        from fabric_ibverbs import nics

        try:
            rdma = [nic for nic in nics.machine().nics if nic.rdma]
            options = Options.load()
            abilities = library.optional(options)
        except library.Missing as error:
            return [Unavailable("ibverbs", error.reason, error.cure)]
        except FabricError as error:
            return [Unavailable("ibverbs", str(error))]
        if not rdma:
            return [Unavailable("ibverbs", "no RDMA device", "`rdma link`; load the NIC's driver (mlx5_ib, rdma_rxe)")]
        return [self._device(options, nic, abilities) for nic in rdma]

    @staticmethod
    def _device(options: Options, nic: Nic, abilities: tuple[str, ...]) -> DeviceInfo | Unavailable:
        from fabric_ibverbs.nics import gid_index

        found = library.limits(options, nic.name)
        if isinstance(found, str):
            cure = "container: --device /dev/infiniband; or join the group that owns /dev/infiniband/uverbs*"
            return Unavailable(nic.name, found, cure)
        port = next((port for port in nic.ports if port.state == "active"), nic.ports[0])
        note = f"{port.link_layer}, port {port.number} {port.state}, {found.max_qp} queue pairs"
        try:
            index = gid_index(options, nic, port)
            gid, kind = next(((gid, kind) for number, gid, kind in port.gids if number == index), ("", ""))
            note += f", GID {index} {gid} {kind}".rstrip()
        except FabricError as error:
            note += f", {error}"
        caps = ("imm", *(("relaxed",) if "relaxed ordering" in abilities and options.relaxed else ()))
        return DeviceInfo(
            nic.name,
            "ibverbs",
            state=nic.state,
            rate_gbit_s=nic.rate_gbit_s,
            numa=nic.numa,
            pci=nic.pci.address if nic.pci else None,
            mtu=nic.mtu,
            caps=caps,
            note=note,
        )

    def known_address(self, domain: str) -> bool:
        """Whether this is GID/LID/QPN/QKEY#INCARNATION in hex."""
        return _ADDRESS.fullmatch(domain) is not None

    def words(self, nic: str, peer: str, status: int) -> str:
        """What an error of first contact means with this backend, beside the engine's own words; "" if no more."""
        if status == -errno.ENOSPC:
            return "this NIC or the peer's serves no more peers: FABRIC_VERBS_PEERS, and what its queues hold"
        return ""

    def open_group(self, config: GroupConfig) -> list[NativeDomain | Domain]:
        """Open the ports of FABRIC_VERBS_NICS, or those near the device that are up.

        Raises BackendError with the reason of library or kernel, and ConfigError for settings that cannot be used.
        """
        from fabric_ibverbs.nics import choose

        options = Options.load()
        ffi, lib = library.load(options)
        chosen = choose(options, config)
        incarnation = secrets.randbits(63) | 1
        opened: list[NativeDomain | Domain] = []
        try:
            for choice in chosen:
                ctx = self._open_one(ffi, lib, config, options, choice, incarnation)
                opened.append(NativeDomain(lib.fab_verbs_ops(), ctx, keepalive=lib))
        except BaseException:
            for domain in opened:
                assert isinstance(domain, NativeDomain)
                lib.fab_verbs_close(ffi.cast("void *", domain.ctx))
            raise
        return opened

    @staticmethod
    def _open_one(ffi: Any, lib: Any, config: GroupConfig, options: Options, choice: Choice, incarnation: int) -> int:
        from fabric_core.native_api import native_api
        from fabric_core.secret import handshake_key

        settings: Any = config.settings
        key = handshake_key(settings)
        contact = lib.fab_verbs_contact_of(native_api())
        if contact == ffi.NULL:
            raise BackendError("this fabric-core does not hand out its first contact; upgrade fabric-core")
        nic, port = choice.nic, choice.port
        held = ffi.new("char[]", nic.name.encode())
        cfg = ffi.new(
            "fab_verbs_cfg *",
            {
                "device": held,
                "port": port.number,
                "gid_index": choice.gid_index,
                "pkey_index": choice.pkey_index,
                "sl": options.sl,
                "traffic_class": options.traffic_class,
                "hop_limit": 64,
                "timeout": options.timeout,
                "retry": options.retry,
                "depth": options.depth,
                "chain": options.chain,
                "inline_bytes": options.inline,
                "mtu": options.mtu,
                "force_grh": options.grh,
                "relaxed": options.relaxed,
                "max_links": options.peers,
                "numa": _NO_NUMA if nic.numa is None else nic.numa,
                "bandwidth": int((port.rate_gbit_s or 0) * 1e9 / 8),
                "incarnation": incarnation,
                "heartbeat_ns": int(settings.heartbeat * 1e9),
                "connect_ns": int(settings.connect_timeout * 1e9),
                "key": ffi.NULL if key is None else ffi.from_buffer("uint8_t[32]", key),
                "contact": contact,
            },
        )
        out = ffi.new("void **")
        err = ffi.new("char[]", _ERR_MAX)
        if lib.fab_verbs_open(cfg, out, err, _ERR_MAX) < 0:
            raise BackendError(f"{nic.name} port {port.number} cannot be opened: {library.text(ffi, err)}")
        return int(ffi.cast("uintptr_t", out[0]))


backend = VerbsBackend()
