"""Trainers and inference ranks as Ray actors; an inference rank is killed, and another one takes its place.

    python examples/rl/ray_actors.py --updates 3

Ray makes the processes and carries addresses: a NetAddr is a value like any other. Weights go from actor to actor by
one-sided writes. They go through Ray's object store too, only so that inference ranks can compare every tensor. Exit
code 1 if one differs, an update is not committed, or --deadline is over. numpy is enough: no torch, no GPU, no NIC.
"""

from __future__ import annotations

import argparse
import faulthandler
from contextlib import ExitStack, suppress
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray

from fabric_core import NetAddr, TransferEngine
from fabric_rlweights import Controller, EngineTable, Entry, Receiver, Trainer, table_of, tensor_of

Weights = dict[str, NDArray[np.float32]]
TRAINERS, RECEIVERS, HIDDEN, INNER = 2, 2, 48, 80
SHAPES = {"gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER)}
PLACES = {"gate": ("gate_up", (0, 0)), "up": ("gate_up", (INNER, 0)), "down": ("down", (0, 0))}  # in inference ranks
PATIENCE = 60.0  #: seconds for each thing that is waited for


def fused(weights: Weights) -> Weights:
    """Return an inference rank's tensors, made of whole parameters."""
    return {"gate_up": np.concatenate([weights["gate"], weights["up"]]), "down": weights["down"]}


class Actor:
    """Each has an engine of its own."""

    def __init__(self) -> None:
        self.parts = ExitStack()
        self.engine = self.parts.enter_context(TransferEngine.open())

    def address(self) -> NetAddr:
        return self.engine.address

    def close(self) -> None:
        self.parts.close()


class Control(Actor):
    """Decides each update. Its address is all that the others have to be told."""

    def __init__(self) -> None:
        super().__init__()
        self.parts.enter_context(Controller(self.engine, trainers=TRAINERS, receivers=RECEIVERS))


class TrainerRank(Actor):
    """Holds its share of the rows of each parameter."""

    def __init__(self, rank: int, controller: NetAddr) -> None:
        super().__init__()
        self.random = np.random.default_rng(rank)
        self.shards = {name: np.zeros((rows // TRAINERS, n), np.float32) for name, (rows, n) in SHAPES.items()}
        boxes = {name: (((rank * len(shard), 0), shard.shape), SHAPES[name]) for name, shard in self.shards.items()}
        mine = table_of(rank, self.shards, boxes=boxes)
        self.trainer = self.parts.enter_context(Trainer(self.engine, *mine, controller=controller))

    def step(self) -> Weights:
        """Change every element, in place. Returns the weights, to compare with."""
        for shard in self.shards.values():
            np.add(shard, self.random.uniform(0.5, 1.0, shard.shape), out=shard, casting="same_kind")
        return self.shards

    def push(self, version: int) -> str:
        """Write the shards into all inference ranks. Returns why that was not committed; empty: it was."""
        outcome = self.trainer.push(version, timeout=PATIENCE)
        return "" if outcome.committed else f"{', '.join(outcome.culprits)}: {outcome.reason}"


class InferenceRank(Actor):
    """Is written to while it does nothing."""

    def __init__(self, rank: int, controller: NetAddr) -> None:
        super().__init__()
        self.tensors = fused({name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()})
        tensors = tuple(tensor_of(name, array) for name, array in self.tensors.items())
        entries = (Entry(param=p, start=(0, 0), size=SHAPES[p], tensor=t, at=at) for p, (t, at) in PLACES.items())
        table = EngineTable(rank=rank, tensors=tensors, entries=tuple(entries))
        self.receiver = self.parts.enter_context(Receiver(self.engine, table, self.tensors, controller=controller))

    def check(self, version: int, *shards: Weights) -> str:
        """Compare every tensor with what the trainers have. Raises ValueError for the wrong version or tensors."""
        if not self.receiver.wait_version(version, PATIENCE) or self.receiver.version != version:
            raise ValueError(f"version {version} is not served; the last one was {self.receiver.version}")
        wanted = fused({name: np.concatenate([part[name] for part in shards]) for name in SHAPES})
        if wrong := [name for name in wanted if not np.array_equal(wanted[name], self.tensors[name])]:
            raise ValueError(f"{wrong} are not what the trainers have in version {version}")
        return f"{len(wanted)} tensors at {self.engine.address}"


def get(refs: Any) -> Any:
    """Wait for what actors return; longer than they wait themselves, so that their errors are heard."""
    return ray.get(refs, timeout=PATIENCE + 30)


def update(version: int, trainers: list[Any], ranks: list[Any]) -> list[Any]:
    """One step and one update; then every tensor is compared. Returns references to the trainers' weights."""
    weights = [trainer.step.remote() for trainer in trainers]
    for _ in range(3):  # an update in which a rank dies is not committed; the next one does without the dead
        problems = [text for text in get([trainer.push.remote(version) for trainer in trainers]) if text]
        if not problems:
            found = get([rank.check.remote(version, *weights) for rank in ranks])
            print(f"version {version} is right: {', '.join(found)}", flush=True)
            return weights
        print(f"version {version} was not committed: {problems[0]}", flush=True)
    raise SystemExit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=3, help="before an inference rank is killed; two follow")
    parser.add_argument("--deadline", type=float, default=300.0, help="seconds for everything")
    args = parser.parse_args()
    faulthandler.dump_traceback_later(args.deadline, exit=True)  # with exit code 1; Ray's processes end soon after
    ray.init(address="local", num_cpus=1, object_store_memory=80 << 20, include_dashboard=False)
    control, train, serve = (ray.remote(num_cpus=0)(kind) for kind in (Control, TrainerRank, InferenceRank))
    chief = control.remote()
    controller = chief.address.remote()  # a reference; the actors that it is passed to get the address
    trainers = [train.remote(rank, controller) for rank in range(TRAINERS)]
    ranks = [serve.remote(rank, controller) for rank in range(RECEIVERS)]
    addresses = get([actor.address.remote() for actor in [*trainers, *ranks]])
    for version in range(1, args.updates + 1):
        update(version, trainers, ranks)
    waits = ranks[-1].check.remote(args.updates + 1)  # for a version that it will not live to see
    ray.kill(ranks.pop())
    weights = update(args.updates + 1, trainers, ranks)
    with suppress(ray.exceptions.RayActorError):
        raise SystemExit(f"the inference rank at {addresses[-1]} was not killed, it found {get(waits)}")
    print(f"the inference rank at {addresses[-1]} was killed", flush=True)
    ranks.append(serve.remote(len(ranks), controller))  # it comes late, and is given the version that is served
    print(f"one came late: {get(ranks[-1].check.remote(args.updates + 1, *weights))}", flush=True)
    update(args.updates + 2, trainers, ranks)
    get([actor.close.remote() for actor in [*trainers, *ranks, chief]])
    ray.shutdown()


if __name__ == "__main__":
    main()
