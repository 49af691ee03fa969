"""Real models on real meshes, as columns: for planning and simulation at sizes that no one machine holds.

The sizes are those of the models' published config.json. Trainers: PP cuts the layers, EP the experts; within, FSDP
cuts axis 0, and what is no expert is the same on all EP ranks. Inference: fp8 in blocks of 128 x 128, TP for attention
and shared experts within each data-parallel replica, EP over all ranks for experts; qkv, gate_up and w13 fused.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from fabric_core import ConfigError
from fabric_rlweights.boxes import Ints
from fabric_rlweights.columns import Held, Params, Tensors, Wants
from fabric_rlweights.dtypes import code_of
from fabric_rlweights.tables import Destination

__all__ = ["PRESETS", "Mesh", "Moe", "preset"]

BF16, FP8, FP32 = code_of("bfloat16"), code_of("float8_e4m3fn"), code_of("float32")
BLOCK = 128


@dataclass(frozen=True)
class Moe:
    """A mixture of experts. `q_lora` 0: plain grouped-query attention, else MLA."""

    hidden: int
    layers: int
    dense_layers: int
    inner: int  #: of dense layers
    expert_inner: int
    experts: int
    shared: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    q_lora: int = 0
    kv_lora: int = 0
    rope: int = 0
    value_dim: int = 0


@dataclass(frozen=True)
class Mesh:
    """Ranks on both sides. `grouped`: experts of a layer are one 3-D parameter (FSDP cuts experts), else one each."""

    fsdp: int
    pp: int
    ep: int
    receivers: int
    tp: int
    grouped: bool = True


KIMI_K2 = Moe(7168, 61, 1, 18432, 2048, 384, 1, 64, 64, 128, 163840, 1536, 512, 64, 128)
DEEPSEEK_V3 = Moe(7168, 61, 3, 18432, 2048, 256, 1, 128, 128, 128, 129280, 1536, 512, 64, 128)
QWEN3_235B = Moe(4096, 94, 0, 12288, 1536, 128, 0, 64, 4, 128, 151936)

#: name -> (model, mesh). The first mesh is the paper's, as far as it is told; how its 128 inference ranks cut is not.
PRESETS: dict[str, tuple[Moe, Mesh]] = {
    "kimi-k2-256x128": (KIMI_K2, Mesh(16, 2, 8, 128, 8)),
    "kimi-k2-256x128-single": (KIMI_K2, Mesh(16, 2, 8, 128, 8, grouped=False)),
    "deepseek-v3-256x128": (DEEPSEEK_V3, Mesh(16, 2, 8, 128, 8)),
    "qwen3-235b-128x64": (QWEN3_235B, Mesh(8, 2, 8, 64, 4)),
}


def preset(name: str) -> tuple[Params, Held, Destination]:
    """Return both sides of a preset. Raises ConfigError with the names that there are."""
    if name not in PRESETS:
        raise ConfigError(f"no preset is called {name!r}; there are {', '.join(PRESETS)}")
    model, mesh = PRESETS[name]
    params = Params(3)
    sides = Sides(params, mesh, model.layers)
    _fill(sides, model)
    return params, sides.held(), sides.destination()


@dataclass
class Sides:
    """Collects rows for all ranks at once."""

    params: Params
    mesh: Mesh
    layers: int
    _held: list[Held] = field(default_factory=list)
    _wants: list[Wants] = field(default_factory=list)
    _names: list[str] = field(default_factory=list)
    _tensors: list[tuple[tuple[int, int, int], int, int]] = field(default_factory=list)  # shape, dtype, scales

    def param(self, name: str, shape: tuple[int, ...], layer: int, *, expert: int = -1) -> int:
        """Add a parameter to the trainers. `expert`: EP owns it as a whole."""
        number = self.params.add(name, shape, BF16)
        m = self.mesh
        stage = min(layer * m.pp // self.layers, m.pp - 1)
        f, e = np.divmod(np.arange(m.fsdp * m.ep), m.ep)
        count = np.full(len(f), 0, np.int64)
        step = -(-shape[0] // m.fsdp)
        first = np.minimum(f * step, shape[0])
        if expert >= 0:
            keep = e == expert * m.ep // max(self._experts, 1)
            f, e, first, count = f[keep], e[keep], first[keep], count[keep]
        if len(shape) == 3:  # grouped experts: EP cuts them, then FSDP
            each = -(-shape[0] // m.ep)
            inner = -(-each // m.fsdp)
            first = np.minimum(e * each + np.minimum(f * inner, each), shape[0])
            end = np.minimum(np.minimum(e * each + np.minimum((f + 1) * inner, each), (e + 1) * each), shape[0])
        else:
            end = np.minimum(first + step, shape[0])
        count = end - first
        keep = count > 0
        f, e, first, count = f[keep], e[keep], first[keep], count[keep]
        rank = stage * m.fsdp * m.ep + f * m.ep + e
        n = len(rank)
        start, size, stride = (np.zeros((n, 3), np.int64), np.ones((n, 3), np.int64), np.zeros((n, 3), np.int64))
        step_bytes = 2
        for axis in range(len(shape) - 1, -1, -1):
            at = 3 - len(shape) + axis
            size[:, at], stride[:, at] = shape[axis], step_bytes
            step_bytes *= shape[axis]
        start[:, 3 - len(shape)], size[:, 3 - len(shape)] = first, count
        fill = np.full(n, number, np.int64)
        self._held.append(Held(fill, rank.astype(np.int64), fill, start, size, np.zeros(n, np.int64), stride))
        return number

    _experts: int = 0

    def tensor(self, name: str, shape: tuple[int, ...], dtype: int, *, quant: bool) -> int:
        """Add a tensor to every inference rank, with its scales if it is quantised; returns its number."""
        one, two, three = (1,) * (3 - len(shape)) + shape
        wide = (one, two, three)
        number = len(self._names)
        self._names.append(name)
        self._tensors.append((wide, FP8 if quant else dtype, number + 1 if quant else -1))
        if quant:
            self._names.append(name + "_scale_inv")
            self._tensors.append(((wide[0], -(-wide[1] // BLOCK), -(-wide[2] // BLOCK)), FP32, -1))
        return number

    def want(
        self,
        tensor: int,
        param: int | Ints,
        start: list[int | Ints],
        size: list[int],
        at: list[int],
        lead: bool = False,
    ) -> None:
        """Say what every inference rank has at `at` (in the tensor, 3 axes): start may differ by rank.

        `lead`: axis 0 of the parameter is the tensor's (grouped experts); else only the last two are.
        """
        m = self.mesh.receivers
        shape, dtype, scales = self._tensors[tensor]
        item = {BF16: 2, FP8: 1, FP32: 4}[dtype]
        stride = np.array([shape[1] * shape[2] * item, shape[2] * item, item], np.int64)
        first = np.column_stack([np.broadcast_to(np.asarray(s, np.int64), m) for s in start])
        place = np.broadcast_to(np.array(at, np.int64), (m, 3))
        extent = np.broadcast_to(np.array(size, np.int64), (m, 3)).copy()
        quantised = scales >= 0
        scale_at, scale_step = np.zeros(m, np.int64), np.zeros((m, 3), np.int64)
        if quantised:
            s = self._tensors[scales][0]
            steps = np.array([s[1] * s[2] * 4, s[2] * 4, 4], np.int64)
            scale_at = (place * steps // np.array([1, BLOCK, BLOCK])).sum(axis=1)
            scale_step[:] = steps if lead else np.array([0, steps[1], steps[2]])
        mine = np.arange(m, dtype=np.int64)
        steps_of = np.broadcast_to(stride if lead else np.array([0, stride[1], stride[2]]), (m, 3)).copy()
        self._wants.append(
            Wants(
                np.broadcast_to(np.asarray(param, np.int64), m).copy(), tensor * m + mine, first, extent.copy(),
                (place * stride).sum(axis=1), steps_of, place.copy(), extent, scale_at, scale_step,
            )
        )  # fmt: skip

    def held(self) -> Held:
        """All the trainers' rows."""
        return Held.concat(self._held)

    def destination(self) -> Destination:
        """All the inference ranks' rows."""
        m, n = self.mesh.receivers, len(self._names)
        shape = np.repeat(np.array([t[0] for t in self._tensors], np.int64), m, axis=0)
        dtype = np.repeat(np.array([t[1] for t in self._tensors], np.int64), m)
        item = np.where(dtype == FP8, 1, np.where(dtype == FP32, 4, 2))
        rank = np.tile(np.arange(m, dtype=np.int64), n)
        number = np.repeat(np.arange(n, dtype=np.int64), m)
        scales = np.repeat(np.array([t[2] for t in self._tensors], np.int64), m)
        zero = np.zeros(n * m, np.int64)
        tensors = Tensors(
            names=[name for name in self._names for _ in range(m)],
            rank=rank,
            number=number,
            shape=shape,
            stride=np.column_stack([shape[:, 1] * shape[:, 2] * item, shape[:, 2] * item, item]),
            dtype=dtype,
            layout=zero,
            quant=(scales >= 0).astype(np.int64),
            scales=np.where(scales >= 0, scales * m + rank, -1),
            block=np.where(scales >= 0, BLOCK, 0),
            address=zero,
            nbytes=np.prod(shape, axis=1) * item,
        )
        nothing = (np.zeros(0, np.int64), np.zeros((0, 3), np.int64), np.zeros((0, 3), np.int64))
        return Destination(tensors, Wants.concat(self._wants), nothing)


def _fill(s: Sides, c: Moe) -> None:
    s._experts = c.experts
    h, tp = c.hidden, s.mesh.tp
    t = np.arange(s.mesh.receivers) % tp

    def simple(name: str, shape: tuple[int, ...], layer: int, axis: int, quant: bool) -> None:
        """A parameter that is a tensor by itself; TP cuts `axis` (-1: none)."""
        param = s.param(name, shape, layer)
        size = [1] * (3 - len(shape)) + list(shape)
        start: list[int | Ints] = [0, 0, 0]
        if axis >= 0:
            at = 3 - len(shape) + axis
            size[at] //= tp
            start[at] = t * size[at]
        s.want(s.tensor(name, tuple(size[3 - len(shape) :]), BF16, quant=quant), param, start, size, [0, 0, 0])

    def fused(name: str, layer: int, parts: list[tuple[str, int, bool]], columns: int, quant: bool = True) -> None:
        """Parameters (name, rows, cut by TP) one under the other."""
        rows = [count // tp if cut else count for _n, count, cut in parts]
        tensor, at = s.tensor(name, (sum(rows), columns), BF16, quant=quant), 0
        for (part, count, cut), mine in zip(parts, rows, strict=True):
            param = s.param(part, (count, columns), layer)
            s.want(tensor, param, [0, t * mine if cut else 0, 0], [1, mine, columns], [0, at, 0])
            at += mine

    simple("model.embed_tokens.weight", (c.vocab, h), 0, 0, False)
    for layer in range(c.layers):
        at = f"model.layers.{layer}."
        simple(at + "input_layernorm.weight", (h,), layer, -1, False)
        simple(at + "post_attention_layernorm.weight", (h,), layer, -1, False)
        attn = at + "self_attn."
        if c.q_lora:
            low = [(attn + "q_a_proj.weight", c.q_lora, False)]
            low.append((attn + "kv_a_proj_with_mqa.weight", c.kv_lora + c.rope, False))
            fused(attn + "fused_qkv_a_proj.weight", layer, low, h)
            simple(attn + "q_a_layernorm.weight", (c.q_lora,), layer, -1, False)
            simple(attn + "kv_a_layernorm.weight", (c.kv_lora,), layer, -1, False)
            simple(attn + "q_b_proj.weight", (c.heads * (c.head_dim + c.rope), c.q_lora), layer, 0, True)
            simple(attn + "kv_b_proj.weight", (c.heads * (c.head_dim + c.value_dim), c.kv_lora), layer, 0, True)
            simple(attn + "o_proj.weight", (h, c.heads * c.value_dim), layer, 1, True)
        else:
            kv = c.kv_heads * c.head_dim
            parts = [(attn + "q_proj.weight", c.heads * c.head_dim, True)]
            parts += [(attn + "k_proj.weight", kv, True), (attn + "v_proj.weight", kv, True)]
            fused(attn + "qkv_proj.weight", layer, parts, h)
            simple(attn + "q_norm.weight", (c.head_dim,), layer, -1, False)
            simple(attn + "k_norm.weight", (c.head_dim,), layer, -1, False)
            simple(attn + "o_proj.weight", (h, c.heads * c.head_dim), layer, 1, True)
        mlp = at + "mlp."
        if layer < c.dense_layers:
            _mlp(fused, simple, mlp, layer, c.inner, h)
            continue
        simple(mlp + "gate.weight", (c.experts, h), layer, -1, False)
        if c.q_lora:
            simple(mlp + "gate.e_score_correction_bias", (c.experts,), layer, -1, False)
        if c.shared:
            _mlp(fused, simple, mlp + "shared_experts.", layer, c.expert_inner * c.shared, h)
        _experts(s, c, mlp + "experts.", layer)
    simple("model.norm.weight", (h,), c.layers - 1, -1, False)
    simple("lm_head.weight", (c.vocab, h), c.layers - 1, 0, False)


def _mlp(fused: object, simple: object, at: str, layer: int, inner: int, hidden: int) -> None:
    parts = [(at + "gate_proj.weight", inner, True), (at + "up_proj.weight", inner, True)]
    fused(at + "gate_up_proj.weight", layer, parts, hidden)  # type: ignore[operator]
    simple(at + "down_proj.weight", (hidden, inner), layer, 1, True)  # type: ignore[operator]


def _experts(s: Sides, c: Moe, at: str, layer: int) -> None:
    ranks, h, i = s.mesh.receivers, c.hidden, c.expert_inner
    each = c.experts // ranks
    if each * ranks != c.experts:
        raise ConfigError(f"{c.experts} experts are not divided by {ranks} inference ranks")
    r = np.arange(ranks)
    w13 = s.tensor(at + "w13_weight", (each, 2 * i, h), BF16, quant=True)
    w2 = s.tensor(at + "w2_weight", (each, h, i), BF16, quant=True)
    places = (("gate_proj", w13, 0, i, h), ("up_proj", w13, i, i, h), ("down_proj", w2, 0, h, i))
    for name, tensor, row, rows, columns in places:
        if s.mesh.grouped:
            param = s.param(f"{at}{name}", (c.experts, rows, columns), layer)
            s.want(tensor, param, [r * each, 0, 0], [each, rows, columns], [0, row, 0], lead=True)
            continue
        numbers = np.array(
            [s.param(f"{at}{e}.{name}.weight", (rows, columns), layer, expert=e) for e in range(c.experts)]
        )
        for k in range(each):
            s.want(tensor, numbers[r * each + k], [0, 0, 0], [1, rows, columns], [k, row, 0])
