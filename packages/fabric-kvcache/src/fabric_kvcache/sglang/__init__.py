"""SGLang's disaggregation backend `fabric`. See docs/engines.md.

    python -m sglang.launch_server ... --disaggregation-mode prefill --disaggregation-transfer-backend fabric

The entry point `sglang.srt.plugins` calls `register` in every process of SGLang. Importing this package does not import
SGLang.
"""

from __future__ import annotations

from typing import Any

from fabric_core import Unsupported

__all__ = ["register"]

_NAME = "fabric"


def register() -> None:
    """Make the backend known to SGLang, whose set of them is closed: see `_classes`. May be called twice.

    Raises Unsupported: this SGLang has other names for what is changed here; it logs so, and goes on without it.
    """
    try:
        from sglang.srt.arg_groups.choices import (  # type: ignore[import-not-found]
            DISAGG_TRANSFER_BACKEND_CHOICES,
            add_disagg_transfer_backend_choices,
        )
        from sglang.srt.disaggregation.utils import TransferBackend  # type: ignore[import-not-found]
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # type: ignore[import-not-found]
    except ImportError as error:
        raise Unsupported(
            f"the backend {_NAME!r} cannot be added to this SGLang: {error}. 0.5.23 was tried; if you do not need it, "
            "list the plug-ins that you do in SGLANG_PLUGINS"
        ) from error

    if _NAME in TransferBackend._value2member_map_:
        return
    if _NAME not in DISAGG_TRANSFER_BACKEND_CHOICES:
        add_disagg_transfer_backend_choices([_NAME])
    # An Enum has no way to get one more member, and SGLang turns the option's word into one.
    member = object.__new__(TransferBackend)
    member._name_, member._value_ = _NAME.upper(), _NAME
    member._sort_order_ = len(TransferBackend)
    TransferBackend._member_names_.append(member._name_)
    TransferBackend._member_map_[member._name_] = member
    TransferBackend._value2member_map_[_NAME] = member
    HookRegistry.register("sglang.srt.disaggregation.utils.get_kv_class", _classes, HookType.AROUND)


def _classes(original: Any, transfer_backend: Any, class_type: Any) -> Any:
    """Around SGLang's get_kv_class, an if-chain over the built-in backends."""
    if getattr(transfer_backend, "value", None) != _NAME or class_type.value == "kvargs":
        return original(transfer_backend, class_type)
    try:
        from fabric_kvcache.sglang import conn
    except ImportError as error:
        raise Unsupported(f"this SGLang has other classes for Mooncake than 0.5.23: {error}") from error

    return {
        "manager": conn.FabricKVManager, "sender": conn.FabricKVSender, "receiver": conn.FabricKVReceiver,
        "bootstrap_server": conn.FabricKVBootstrapServer,
    }[class_type.value]  # fmt: skip
