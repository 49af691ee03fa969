"""A small update with every way that a piece can go, for trainers and receivers on any mix of the host and a GPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))

import torch
from oracle import place, plain

from fabric_core import TransferEngine
from fabric_rlweights.controller import Controller
from fabric_rlweights.dtensor import table_of
from fabric_rlweights.hooks import Hooks
from fabric_rlweights.job.device_model import memory_for
from fabric_rlweights.meta import EngineTable, Quant
from fabric_rlweights.plan import Options
from fabric_rlweights.receiver import Receiver
from fabric_rlweights.trainer import Trainer

__all__ = ["PADDED", "Finish", "Ways", "expected", "make", "parameters", "same", "table"]

ROWS, COLUMNS = 300, 260  #: blocks of 128 are cut at the right and at the bottom
PADDED = 200


class Finish(Hooks):
    """Keeps what staging tensors were finished from."""

    def __init__(self) -> None:
        self.made: dict[str, Any] = {}
        self.calls: list[str] = []

    def finish(self, name: str, data: Any) -> None:
        self.made[name] = data if isinstance(data, torch.Tensor) else torch.from_numpy(data)

    def pause(self, version: int) -> None:
        self.calls.append("pause")

    def exchange(self, tensors: dict[str, Any]) -> None:
        self.calls.append("exchange")

    def resume(self, version: int) -> None:
        self.calls.append("resume")


def parameters(where: str, version: int) -> dict[str, Any]:
    """One of each kind; `where`: cpu, pinned, cuda:0. Random numbers of a version."""
    generator = torch.Generator().manual_seed(version)
    made = {
        "straight": torch.randn(512, 256, generator=generator).bfloat16(),
        "columns": torch.randn(64, 96, generator=generator).bfloat16(),
        "turned": torch.randn(96, 64, generator=generator).bfloat16(),
        "cast": torch.randn(130, 70, generator=generator),
        "blocks": torch.randn(ROWS, COLUMNS, generator=generator).bfloat16(),
        "whole": torch.randn(96, 64, generator=generator).half(),
        "staged": torch.randn(40, 24, generator=generator).bfloat16(),
    }
    made["blocks"][:128, :128] = 0
    made["blocks"][130] *= 3e-6
    return {
        name: tensor.pin_memory() if where == "pinned" else tensor.to(where).contiguous()
        for name, tensor in made.items()
    }


def table(rank: int) -> EngineTable:
    """What an inference rank wants of them."""
    scales = (-(-ROWS // 128), -(-COLUMNS // 128))
    return EngineTable(
        rank=rank,
        tensors=(
            plain("straight", (512, 256), "bfloat16"),
            plain("columns", (64, 48), "bfloat16"),
            plain("turned", (64, 96), "bfloat16"),
            plain("cast", (PADDED, 70), "bfloat16", keep=(((130, 0), (PADDED - 130, 70)),)),
            plain("blocks", (ROWS, COLUMNS), "float8_e4m3fn", quant=Quant(scheme="block", scales="blocks_scale")),
            plain("blocks_scale", scales, "float32"),
            plain("whole", (96, 64), "float8_e4m3fn", quant=Quant(scheme="tensor", scales="whole_scale")),
            plain("whole_scale", (1,), "float32"),
            plain("staged", (40, 24), "bfloat16", layout="staging"),
        ),
        entries=(
            place("straight", "straight", (0, 0), (512, 256), (0, 0)),
            place("columns", "columns", (0, 48), (64, 48), (0, 0)),
            place("turned", "turned", (0, 0), (96, 64), (0, 0)).model_copy(update={"axes": (1, 0)}),
            place("cast", "cast", (0, 0), (130, 70), (0, 0)),
            place("blocks", "blocks", (0, 0), (ROWS, COLUMNS), (0, 0)),
            place("whole", "whole", (0, 0), (96, 64), (0, 0)),
            place("staged", "staged", (0, 0), (40, 24), (0, 0)),
        ),
    )


def expected(source: dict[str, Any]) -> dict[str, Any]:
    """What a load and a quantiser on the CPU make of them: whole tensors at once, without any code of ours."""
    p = {name: tensor.cpu() for name, tensor in source.items()}
    found = {"straight": p["straight"], "columns": p["columns"][:, 48:], "turned": p["turned"].T}
    found["cast"] = p["cast"].bfloat16()
    padded = torch.zeros(384, 384)
    padded[:ROWS, :COLUMNS] = p["blocks"].float()
    tiles = padded.view(3, 128, 3, 128)
    scale = tiles.abs().amax(dim=(1, 3), keepdim=True).clamp(1e-4) / 448.0
    quantised = (tiles * (1.0 / scale)).to(torch.float8_e4m3fn).view(384, 384)
    found["blocks"], found["blocks_scale"] = quantised[:ROWS, :COLUMNS], scale.view(3, 3)
    one = p["whole"].float().abs().amax().clamp(1e-4) / 448.0
    found["whole"] = (p["whole"].float() * (1.0 / one)).to(torch.float8_e4m3fn)
    found["whole_scale"] = one.view(1)
    found["staged"] = p["staged"]
    return found


def same(name: str, got: Any, want: Any) -> None:
    """Compare bits."""
    got, want = got.cpu().contiguous().view(torch.uint8), want.contiguous().view(torch.uint8)
    wrong = int((got != want).sum())
    assert wrong == 0, f"{name}: {wrong} of {want.numel()} bytes are wrong"


class Ways:
    """A controller, a trainer, and a receiver."""

    def __init__(self, stack: ExitStack, trainer: str, receiver: str, **more: Any) -> None:
        self._stack = stack
        device = "cuda:0" if "cuda:0" in (trainer, receiver) or trainer == "pinned" else "cpu"
        self._device, self._receiver_device = more.pop("engine", device), receiver
        self.double = more.pop("double_buffer", False)
        watermark = more.pop("watermark", 4 << 20)
        self.home = stack.enter_context(TransferEngine.open())
        options = Options(piece_bytes=more.pop("piece_bytes", 1 << 16))
        wanted = {"trainers": 1, "receivers": 1, "options": options, "digests": True, **more}
        self.controller = stack.enter_context(Controller(self.home, **wanted))
        self.parameters = parameters(trainer, 0)
        description, buffers = table_of(0, self.parameters)
        self.trainer = stack.enter_context(
            Trainer(self.engine(), description, buffers, controller=self.home.address, watermark=watermark)
        )
        self.receiver, self.hooks = self.late(0)

    def engine(self) -> TransferEngine:
        """An engine for whoever."""
        return self._stack.enter_context(TransferEngine.open(self._device))

    def late(self, rank: int) -> tuple[Receiver, Finish]:
        """One more receiver."""
        described, memory = memory_for(table(rank), self._receiver_device)
        hooks = Finish()
        made = Receiver(
            self.engine(), described, memory, controller=self.home.address, hooks=hooks, double_buffer=self.double
        )
        return self._stack.enter_context(made), hooks

    def fill(self, version: int) -> None:
        """New weights, in place."""
        for name, tensor in parameters("cpu", version).items():
            self.parameters[name].copy_(tensor)

    def check(self, receiver: Receiver, hooks: Finish, version: int) -> None:
        """Every byte, the padding too."""
        assert receiver.version == version
        assert receiver.serving
        want = expected(parameters("cpu", version))
        kinds = {tensor.name: tensor for tensor in table(0).tensors}
        for name, served in receiver.tensors.items():
            data = served if isinstance(served, torch.Tensor) else torch.from_numpy(served)
            assert str(data.device) == self._receiver_device
            got = data.view(getattr(torch, kinds[name].dtype)).view(kinds[name].shape)
            if name == "cast":
                assert (got[130:].contiguous().view(torch.uint8) == 0xFF).all(), "padding was written to"
                got = got[:130]
            same(name, got, want[name])
        assert str(hooks.made["staged"].device) == self._receiver_device


@contextmanager
def make(trainer: str, receiver: str, **more: Any) -> Iterator[Ways]:
    """`trainer`, `receiver`: where their weights lie: cpu, pinned, cuda:0."""
    with ExitStack() as stack:
        ways = Ways(stack, trainer, receiver, **more)
        ways.controller.wait_ready(60)
        yield ways
