"""A NIC backend in pure Python: Unix sockets for wires. Read `fabric_core.domain` first; this is what it looks like."""

from fabric_pysock.backend import backend

__all__ = ["backend"]
