"""The `sim` backend: engines of this process on a simulated network, in real time.

For trying a workload under reordering and delay on any machine: requests are done in no order, completions and
immediates come in no order, and with `sim_nic` each takes the time that this NIC would take. Engines of other processes
are not reached; for processes of one host there is `local`, and for faults around any backend the setting `faults`.
The deterministic simulator under virtual time is another thing: `fabric sim`.
"""

from __future__ import annotations

import itertools
import os
import re
import secrets
from typing import TYPE_CHECKING, Any

from fabric_core.domain import API_VERSION, DeviceInfo, GroupConfig, NativeDomain, Unavailable
from fabric_core.errors import BackendError

if TYPE_CHECKING:
    from fabric_core.domain import Domain

__all__ = ["SimBackend", "backend"]

_incarnation = itertools.count(secrets.randbits(32) << 16 | 1)


class SimBackend:
    """See the module's text. Settings: `nics`, `sim_seed`, `sim_nic`."""

    name = "sim"
    api_version = API_VERSION
    one_process = True

    def probe(self) -> list[DeviceInfo | Unavailable]:
        """One device, everywhere."""
        return [DeviceInfo("sim", "sim", caps=("imm",), note="engines of this process, on a simulated network")]

    def known_address(self, domain: str) -> bool:
        """Whether this is NAME, NAME.NIC or NAME.NIC#INCARNATION."""
        return re.fullmatch(r"[A-Za-z0-9_-]{1,64}(\.[0-7])?(#[0-9a-f]{1,16})?", domain) is not None

    def open_group(self, config: GroupConfig) -> list[NativeDomain | Domain]:
        """Open `config.nics` (default: as many as the model has) NICs. Raises BackendError with the reason."""
        from fabric_core.native_lib import ffi, lib, text

        settings: Any = config.settings
        models: dict[str, int] = {}
        while (model := lib.fab_sim_nic_at(len(models))) != ffi.NULL:
            models[text(model.name)] = len(models)
        number = models[settings.sim_nic]
        nics = config.nics or int(lib.fab_sim_nic_at(number).nics)
        seed = secrets.randbits(63) if settings.sim_seed is None else settings.sim_seed
        incarnation = next(_incarnation)
        opened: list[Any] = []
        for index in range(nics):
            out = ffi.new("void **")
            rc = lib.fab_sim_live_open(config.name.encode(), index, incarnation, seed, number, out)
            if rc < 0:
                for domain in opened:
                    lib.fab_sim_live_close(domain)
                raise BackendError(f"sim backend {config.name!r}: {os.strerror(-rc)}")
            opened.append(out[0])
        ops = int(ffi.cast("uintptr_t", lib.fab_sim_live_ops()))
        return [NativeDomain(ops, int(ffi.cast("uintptr_t", domain))) for domain in opened]


backend = SimBackend()
