"""Dispatch and combine of tokens between the experts of a mixture-of-experts model. Start at `MoeGroup.open`."""

from __future__ import annotations

from fabric_moe.config import MoeConfig
from fabric_moe.errors import RankLost, StepError
from fabric_moe.group import MoeGroup
from fabric_moe.meet import Table
from fabric_moe.nodes import NodeGroup
from fabric_moe.received import Received
from fabric_moe.step import Step
from fabric_moe.views import View

__version__ = "0.1.0"

__all__ = [
    "MoeConfig",
    "MoeGroup",
    "NodeGroup",
    "RankLost",
    "Received",
    "Step",
    "StepError",
    "Table",
    "View",
    "__version__",
]
