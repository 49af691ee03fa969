"""A decoder-only transformer, as trainers name its parameters and as inference engines fuse and cut them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fabric_core import ConfigError
from fabric_rlweights.meta import EngineTable, Entry, Tensor, contiguous

__all__ = ["Model", "engine_table", "whole"]

ITEM = 2  #: bytes of bfloat16


@dataclass(frozen=True)
class Model:
    """Sizes. All weights are bfloat16."""

    hidden: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    inner: int = 96
    vocab: int = 100
    tied: bool = False

    @classmethod
    def of_bytes(cls, nbytes: int) -> Model:
        """A model of about so many bytes: layers of 0.1 GB as long as they fit. Raises ConfigError below 1 MiB."""
        if nbytes < 1 << 20:
            raise ConfigError(f"a model of {nbytes} bytes: at least 1 MiB")
        hidden = 2048 if nbytes >= 1 << 29 else 256
        model = cls(hidden, 1, hidden // 64, max(2, hidden // 512), 64, hidden * 4, hidden * 8)
        each = model.nbytes - cls(hidden, 0, hidden // 64, max(2, hidden // 512), 64, hidden * 4, hidden * 8).nbytes
        layers = max(1, round((nbytes - model.nbytes) / each) + 1)
        return cls(hidden, layers, model.heads, model.kv_heads, 64, model.inner, model.vocab)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Parameter -> shape, with the names of Hugging Face."""
        h, q, kv = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab, h)}
        for layer in range(self.layers):
            at = f"model.layers.{layer}."
            found |= {
                at + "input_layernorm.weight": (h,),
                at + "self_attn.q_proj.weight": (q, h),
                at + "self_attn.k_proj.weight": (kv, h),
                at + "self_attn.v_proj.weight": (kv, h),
                at + "self_attn.o_proj.weight": (h, q),
                at + "post_attention_layernorm.weight": (h,),
                at + "mlp.gate_proj.weight": (self.inner, h),
                at + "mlp.up_proj.weight": (self.inner, h),
                at + "mlp.down_proj.weight": (h, self.inner),
            }
        found["model.norm.weight"] = (h,)
        if not self.tied:
            found["lm_head.weight"] = (self.vocab, h)
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters."""
        total = 0
        for shape in self.shapes().values():
            count = ITEM
            for extent in shape:
                count *= extent
            total += count
        return total


def whole(name: str, shape: tuple[int, ...], version: int, seed: int) -> Any:
    """The bits of a whole parameter in a version: both sides can make them, without torch."""
    rng = np.random.default_rng([seed, version, *name.encode()])
    # bfloat16 below 2 in magnitude: no infinity and no NaN, which a cast would not keep bit by bit
    return (rng.integers(0, 1 << 16, shape, dtype=np.uint16) & np.uint16(0xBFFF)).view(np.int16)


def engine_table(model: Model, rank: int, tp: int) -> EngineTable:
    """The table of one of `tp` inference ranks: fused qkv and gate_up, KV heads replicated if they are too few."""
    if model.heads % tp or model.inner % tp or (model.kv_heads % tp and tp % model.kv_heads):
        raise ConfigError(f"{model} cannot be cut for {tp} inference ranks")
    tensors: list[Tensor] = []
    entries: list[Entry] = []
    shapes = model.shapes()

    def add(tensor: str, parts: list[tuple[str, int, int, int]]) -> None:
        """Each part: parameter, axis that is cut (-1: none), first, count; parts follow each other along axis 0."""
        at = 0
        rest: tuple[int, ...] = ()
        for param, axis, first, count in parts:
            start, size = [0] * len(shapes[param]), list(shapes[param])
            if axis >= 0:
                start[axis], size[axis] = first, count
            where = (at,) + (0,) * (len(size) - 1)
            entries.append(Entry(param=param, start=tuple(start), size=tuple(size), tensor=tensor, at=where))
            at, rest = at + size[0], tuple(size[1:])
        shape = (at, *rest)
        tensors.append(Tensor(name=tensor, shape=shape, strides=contiguous(shape, ITEM), dtype="bfloat16"))

    def cut(param: str, axis: int, parts: int = tp, index: int = rank) -> tuple[str, int, int, int]:
        count = -(-shapes[param][axis] // parts)
        first = min(index * count, shapes[param][axis])
        return param, axis, first, min(count, shapes[param][axis] - first)

    def heads(param: str) -> tuple[str, int, int, int]:
        parts = min(tp, model.kv_heads)
        return cut(param, 0, parts, rank * parts // tp)

    add("model.embed_tokens.weight", [cut("model.embed_tokens.weight", 0)])
    for layer in range(model.layers):
        at = f"model.layers.{layer}."
        add(at + "input_layernorm.weight", [(at + "input_layernorm.weight", -1, 0, 0)])
        attn = at + "self_attn."
        parts = [cut(attn + "q_proj.weight", 0), heads(attn + "k_proj.weight"), heads(attn + "v_proj.weight")]
        add(attn + "qkv_proj.weight", parts)
        add(attn + "o_proj.weight", [cut(attn + "o_proj.weight", 1)])
        add(at + "post_attention_layernorm.weight", [(at + "post_attention_layernorm.weight", -1, 0, 0)])
        add(at + "mlp.gate_up_proj.weight", [cut(at + "mlp.gate_proj.weight", 0), cut(at + "mlp.up_proj.weight", 0)])
        add(at + "mlp.down_proj.weight", [cut(at + "mlp.down_proj.weight", 1)])
    add("model.norm.weight", [("model.norm.weight", -1, 0, 0)])
    if not model.tied:
        add("lm_head.weight", [cut("lm_head.weight", 0)])
    return EngineTable(rank=rank, tensors=tuple(tensors), entries=tuple(entries))


def torch_model(model: Model) -> Any:
    """The trainer's module, on the meta device: parameters only, with the names of `Model.shapes`."""
    import torch
    from torch import nn

    def linear(out: int, into: int) -> Any:
        return nn.Linear(into, out, bias=False, dtype=torch.bfloat16, device="meta")

    def norm() -> Any:
        return nn.RMSNorm(model.hidden, dtype=torch.bfloat16, device="meta")

    class Attention(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            h, q, kv = model.hidden, model.heads * model.head_dim, model.kv_heads * model.head_dim
            self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
                linear(q, h),
                linear(kv, h),
                linear(kv, h),
                linear(h, q),
            )

    class Mlp(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            h, i = model.hidden, model.inner
            self.gate_proj, self.up_proj, self.down_proj = linear(i, h), linear(i, h), linear(h, i)

    class Layer(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.input_layernorm, self.post_attention_layernorm = norm(), norm()
            self.self_attn, self.mlp = Attention(), Mlp()

    class Body(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.embed_tokens = nn.Embedding(model.vocab, model.hidden, dtype=torch.bfloat16, device="meta")
            self.layers = nn.ModuleList(Layer() for _ in range(model.layers))
            self.norm = norm()

    class Whole(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = Body()
            if not model.tied:
                self.lm_head = linear(model.vocab, model.hidden)

    return Whole()


def shard(module: Any, mesh: Any) -> None:
    """TP over the mesh's dimension "tp", then FSDP2 over "dp" (HSDP over "replicate" and "dp" if there is one)."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    names = mesh.mesh_dim_names
    if "tp" in names and mesh["tp"].size() > 1:
        plan: dict[str, Any] = {"model.embed_tokens": RowwiseParallel()}
        if hasattr(module, "lm_head"):
            plan["lm_head"] = ColwiseParallel()
        for at in (f"model.layers.{n}." for n in range(len(module.model.layers))):
            for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
                plan[at + name] = ColwiseParallel()
            for name in ("self_attn.o_proj", "mlp.down_proj"):
                plan[at + name] = RowwiseParallel()
        parallelize_module(module, mesh["tp"], plan)
    data = mesh["replicate", "dp"] if "replicate" in names else mesh["dp"]
    for layer in module.model.layers:
        fully_shard(layer, mesh=data)
    fully_shard(module, mesh=data)
