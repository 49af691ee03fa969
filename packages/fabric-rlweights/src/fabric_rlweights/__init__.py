"""Weight transfer from the ranks of a trainer to the ranks of inference engines. Start at `Trainer` and `Receiver`.

A plan is worked out once from both sides' tables and proven; in every update trainers then write their shards straight
into the inference engines' weights.
"""

from __future__ import annotations

from fabric_rlweights.controller import Controller
from fabric_rlweights.dtensor import table_of
from fabric_rlweights.hooks import Hooks
from fabric_rlweights.memory import tensor_of
from fabric_rlweights.meta import EngineTable, Entry, Quant, Shard, Tensor, TrainerTable
from fabric_rlweights.plan import Options, Plan, make_plan
from fabric_rlweights.receiver import Receiver
from fabric_rlweights.record import Recorder
from fabric_rlweights.report import UpdateReport
from fabric_rlweights.trainer import Outcome, Trainer

__version__ = "0.1.0"

__all__ = [
    "Controller",
    "EngineTable",
    "Entry",
    "Hooks",
    "Options",
    "Outcome",
    "Plan",
    "Quant",
    "Receiver",
    "Recorder",
    "Shard",
    "Tensor",
    "Trainer",
    "TrainerTable",
    "UpdateReport",
    "__version__",
    "make_plan",
    "table_of",
    "tensor_of",
]
