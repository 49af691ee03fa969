"""One rank of verl's checkpoint engine as a process: does what verl's manager has it do over Ray.

    ("prepare", None) | ("join", kwargs) | ("send", salt) | ("take", salt) | ("finalize", None) | ("end", None)

Each is answered. `take` compares every byte with what the salt makes, and answers how many tensors were right.
"""

from __future__ import annotations

import asyncio
from multiprocessing.connection import Connection
from typing import Any

import torch
from stream_world import octets, some_weights
from verl.checkpoint_engine import CheckpointEngineRegistry  # type: ignore[import-not-found]
from verl.utils.import_utils import import_external_libs  # type: ignore[import-not-found]


async def take(engine: Any, salt: int) -> int | str:
    wanted, right = some_weights(salt), 0
    async for name, tensor in engine.receive_weights(global_steps=salt):
        expected, ours = wanted[right]
        if (name, tensor.dtype, tensor.shape) != (expected, ours.dtype, ours.shape):
            return f"{name} came, {expected} was due"
        if not torch.equal(octets(tensor), octets(ours)):
            return f"{name}: other bytes"
        right += 1
    return right


def obey(engine: Any, word: str, given: Any) -> Any:
    match word:
        case "prepare":
            return engine.prepare()
        case "join":
            return engine.init_process_group(**given)
        case "send":
            return asyncio.run(engine.send_weights(iter(some_weights(given)), global_steps=given))
        case "take":
            return asyncio.run(take(engine, given))
    return engine.finalize()


def serve(pipe: Connection, actor: bool) -> None:
    torch.set_num_threads(1)
    import_external_libs("fabric_rlweights.verl")  # as verl does with custom_backend_module
    more = {"is_master": True} if actor else {}
    engine = CheckpointEngineRegistry.new("fabric", bucket_size=4096, device="cpu", timeout=60.0, **more)
    while True:
        word, given = pipe.recv()
        if word == "end":
            return
        try:
            pipe.send(obey(engine, word, given))
        except Exception as error:
            pipe.send(f"{type(error).__name__}: {error}")
