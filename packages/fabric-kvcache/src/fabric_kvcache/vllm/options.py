"""What `kv_connector_extra_config` may say, checked before anything is opened."""

from __future__ import annotations

import difflib
from typing import Annotated, Any, Literal

import msgspec

from fabric_core import ConfigError

__all__ = ["Options"]

_Seconds = Annotated[float, msgspec.Meta(gt=0, le=86_400)]


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every key with its default. Both sides of a pair need not have the same."""

    host: str = "127.0.0.1"  #: where the producer's card is served (card.py), and what it tells decoders to ask
    port: Annotated[int, msgspec.Meta(ge=0, le=65_535)] | None = (
        None  #: None: vLLM's `kv_port`; each DP rank adds its own
    )
    timeout: _Seconds = 120.0  #: decode: of a whole transfer, prefill included
    hold: _Seconds = 120.0  #: prefill: how long a finished prompt's blocks wait for a decoder that has not asked
    confirm_timeout: _Seconds = 10.0  #: decode: how long a prefiller has to confirm a cancel
    pieces: Literal["blocks", "tokens"] = "blocks"  #: on processors: what moves; the same on both sides (transposed.py)
    backend: str | None = None  #: fabric backend; None: FABRIC_BACKEND, or the best that works here
    heartbeat: _Seconds | None = None  #: None: FABRIC_HEARTBEAT, or 5 (worker.py)
    nics: Annotated[int, msgspec.Meta(ge=1, le=8)] | None = None
    name: str | None = None  #: base of this rank's fabric address; the rank is added

    @classmethod
    def of(cls, extra: dict[str, Any]) -> Options:
        """Read them. Raises ConfigError, naming the key, the value and what is allowed."""
        for key in extra:
            if key not in cls.__struct_fields__:
                close = difflib.get_close_matches(str(key), cls.__struct_fields__, n=1)
                hint = f"; is {close[0]!r} meant?" if close else "."
                raise ConfigError(
                    f"kv_connector_extra_config has {key!r}, which FabricConnector does not know{hint} It knows "
                    + ", ".join(cls.__struct_fields__)
                )
        try:
            found = msgspec.convert(extra, cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"kv_connector_extra_config={extra!r}: {error}") from None
        if found.host in {"", "0.0.0.0", "::"}:
            raise ConfigError(
                f"kv_connector_extra_config has host={found.host!r}: decoders are told to ask there, so name an "
                "address of this machine that they can reach"
            )
        return found
