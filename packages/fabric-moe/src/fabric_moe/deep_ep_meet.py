"""How the ranks of a process group meet: a store of rank 0's, whose address goes round in the group."""

from __future__ import annotations

import contextlib
import socket
from typing import Any

from fabric_core.bootstrap import StoreBoard

__all__ = ["GroupBoard", "meet"]


class GroupBoard(StoreBoard):
    """The board of a group whose rank 0 may leave first, and take the store along."""

    def withdraw(self, name: str) -> None:
        """Take a name off, if there is still something to take it off from."""
        with contextlib.suppress(RuntimeError):  # torch's errors of a store that is gone
            super().withdraw(name)


def meet(group: Any) -> tuple[int, int, GroupBoard]:
    """Return (rank, ranks, board). Called by all ranks of the group together."""
    from torch.distributed import TCPStore

    if hasattr(group, "all_gather_obj"):
        rank, ranks, gather = group.rank, group.world_size, group.all_gather_obj
    else:
        rank, ranks, gather = group.rank(), group.size(), lambda value: _gather(group, value)
    hosts = gather(socket.gethostname())
    store, where = None, None
    if rank == 0:
        host = _address(hosts)
        store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        where = (host, store.port)
    host, port = gather(where)[0]
    return rank, ranks, GroupBoard(store or TCPStore(host, port, is_master=False))


def _address(hosts: list[str]) -> str:
    """Return the address of the first host that all of them reach. Raises OSError if a name has none."""
    others = [host for host in hosts if host != hosts[0]]
    if not others:
        return "127.0.0.1"
    found = socket.gethostbyname(hosts[0])
    if not found.startswith("127."):
        return found
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # /etc/hosts has our own name as a loopback
        probe.connect((others[0], 9))  # sends nothing: asks which of our addresses leads there
        name: tuple[str, int] = probe.getsockname()
        return name[0]


def _gather(group: Any, value: Any) -> list[Any]:
    import torch.distributed as dist

    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, value, group=group)
    return found
