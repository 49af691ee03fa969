"""vLLM's own FusedMoEKernel over our prepare/finalize pair: two ranks make what a dense layer makes.

`make test-engines` runs it; it needs vLLM (0.32 was tried, on processors).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm.model_executor.layers.fused_moe.modular_kernel", reason="make test-engines runs it")

import vllm.model_executor.layers.fused_moe.modular_kernel as mk  # type: ignore[import-not-found]  # noqa: E402
from vllm_moe_rank import EXPERTS, RANKS, BatchedExperts, Layer, RowExperts, held, map_of, run  # noqa: E402

from fabric_core import ConfigError, TransferEngine, Unsupported  # noqa: E402
from fabric_moe import StepError, Table, vllm_quant  # noqa: E402
from fabric_moe import vllm as adapter  # noqa: E402

MOST = 9
LIMIT = 60.0  # seconds: the longest that anything may take which is meant to work


class World:
    """A pair and a kernel for each rank, each driven by a thread of its own."""

    def __init__(self, batched: bool, kind: Any, reduces: bool = False) -> None:
        self.engine = TransferEngine.open(local_shuffle=7)
        self.layer = Layer(32, kind)
        table = Table()
        cls = adapter.FabricBatchedPrepareAndFinalize if batched else adapter.FabricPrepareAndFinalize
        self.pairs = [cls(self.engine, table, r, RANKS, max_tokens=MOST, timeout=LIMIT) for r in range(RANKS)]
        self.experts: list[Any] = [
            BatchedExperts(self.layer, r, False, max_num_tokens=MOST, num_dispatchers=RANKS)
            if batched
            else RowExperts(self.layer, r, reduces)
            for r in range(RANKS)
        ]
        self.kernels = [mk.FusedMoEKernel(p, e) for p, e in zip(self.pairs, self.experts, strict=True)]

    def on_all(self, call: Callable[[int], Any]) -> list[Any]:
        with ThreadPoolExecutor(RANKS) as pool:
            return list(pool.map(call, range(RANKS), timeout=LIMIT))

    def close(self) -> None:
        for pair in self.pairs:
            pair.destroy()
        self.engine.close()


Open = Callable[..., World]


@pytest.fixture
def opened() -> Iterator[Open]:
    worlds: list[World] = []

    def make(*arguments: Any, **more: Any) -> World:
        worlds.append(World(*arguments, **more))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()


def some_quant(**changes: Any) -> Any:
    """What vLLM's classes ask of a FusedMoEQuantConfig: fp8 rows, quantised after they came."""
    usual = {"is_block_quantized": False, "quant_dtype": torch.float8_e4m3fn, "a1_scale": None, "a1_gscale": None}
    return SimpleNamespace(
        **{**usual, "per_act_token_quant": False, "block_shape": None, "is_scale_swizzled": True, **changes}
    )


def close_to(found: Any, wanted: Any) -> bool:
    """Three roundings to the layer's type: of what an expert made, of a rank's sum, of the sum over ranks."""
    eps = torch.finfo(found.dtype).eps
    return bool(torch.isfinite(found).all()) and torch.allclose(found.float(), wanted, rtol=4 * eps, atol=4 * eps)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("batched", "reduces"), [(False, False), (False, True), (True, False)])
def test_two_ranks_make_what_a_dense_layer_makes(opened: Open, batched: bool, reduces: bool, kind: Any) -> None:
    world = opened(batched, kind, reduces=reduces)
    for step, counts in enumerate([(5, 9), (0, 4), (1, 0), (9, 9)]):  # of each rank's tokens
        given = [world.layer.tokens(10 * step + r, counts[r]) for r in range(RANKS)]
        found = world.on_all(lambda r, given=given: run(world.kernels[r], world.layer, r, *given[r]))  # type: ignore[misc]
        for r in range(RANKS):
            x, ids, weights = given[r]
            assert found[r].dtype == kind
            assert close_to(found[r], world.layer.dense(x, ids, weights)), (step, r)
    assert all(experts.rows for experts in world.experts)


@pytest.mark.parametrize("batched", [False, True])
def test_tokens_in_any_layout_and_ids_that_are_none(opened: Open, batched: bool) -> None:
    """vLLM's output has its input's layout; -1 is no expert; and the pair is as good as new after each."""
    world = opened(batched, torch.float32)
    given = [world.layer.tokens(r, 5) for r in range(RANKS)]

    def turned(x: Any) -> Any:
        return x.t().contiguous().t()

    def every_second(x: Any) -> Any:
        return torch.stack([x, x], 2)[:, :, 0]

    for laid in (turned, every_second, turned):
        found = world.on_all(
            lambda r, laid=laid: run(world.kernels[r], world.layer, r, laid(given[r][0]), *given[r][1:])
        )  # type: ignore[misc]
        assert all(close_to(found[r], world.layer.dense(*given[r])) for r in range(RANKS)), laid.__name__
    none = [torch.where(torch.arange(ids.shape[1]) == 1, -1, ids) for _, ids, _ in given]
    found = world.on_all(lambda r: run(world.kernels[r], world.layer, r, given[r][0], none[r], given[r][2]))
    for r, (x, _, weights) in enumerate(given):
        assert close_to(found[r], world.layer.dense(x, none[r].clamp(min=0), torch.where(none[r] < 0, 0.0, weights)))


@pytest.mark.parametrize("batched", [False, True])
def test_weights_on_the_input(opened: Open, batched: bool) -> None:
    world = opened(batched, torch.float32)
    given = [world.layer.tokens(r, 6, topk=1) for r in range(RANKS)]
    found = world.on_all(lambda r: run(world.kernels[r], world.layer, r, *given[r], on_input=True))
    for r in range(RANKS):
        assert close_to(found[r], world.layer.dense(*given[r], on_input=True))


def test_all_tokens_to_one_rank(opened: Open) -> None:
    """The other rank's experts get nothing, and its kernel hears so."""
    world = opened(False, torch.float32)
    given = [(x, ids % 3, weights) for x, ids, weights in (world.layer.tokens(r, 4, topk=2) for r in range(RANKS))]
    found = world.on_all(lambda r: run(world.kernels[r], world.layer, r, *given[r]))
    for r in range(RANKS):
        assert close_to(found[r], world.layer.dense(*given[r]))
    assert [experts.rows for experts in world.experts] == [8, 0]


def test_block_scales_travel_with_their_tokens(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's quantiser is called before tokens are sent; its kernels are for GPUs, so ours stands in."""

    def halves(rows: Any, scale: Any, **more: Any) -> Any:
        return rows.to(torch.float8_e4m3fn), rows[:, :2].float()

    monkeypatch.setattr(vllm_quant, "moe_kernel_quantize_input", halves)
    world = opened(False, torch.bfloat16)
    given = [world.layer.tokens(r, 5) for r in range(RANKS)]
    quant = some_quant(is_block_quantized=True, block_shape=[128, 128])

    def prepare(r: int) -> Any:
        x, ids, weights = given[r]
        return world.pairs[r].prepare(x, weights, ids, EXPERTS, map_of(r), False, quant, False)

    sent = torch.cat([x for x, _, _ in given])
    for rows, scales, *_ in world.on_all(prepare):
        assert rows.dtype == torch.float8_e4m3fn
        for row, scale in zip(rows, scales, strict=True):
            at = (sent[:, :2].float() == scale).all(1).nonzero().flatten().tolist()
            assert len(at) == 1
            assert torch.equal(row.view(torch.uint8), sent[at[0]].to(torch.float8_e4m3fn).view(torch.uint8))


@pytest.mark.parametrize(("per_token", "shape"), [(True, (MOST * RANKS, 1)), (False, (1, 1))])
def test_scales_of_batched_rows_have_their_experts_dimension(
    opened: Open, monkeypatch: pytest.MonkeyPatch, per_token: bool, shape: tuple[int, int]
) -> None:
    """Rows that are quantised after they came: vLLM's batched experts take scales of three dimensions only."""

    def stand_in(rows: Any, scale: Any, **more: Any) -> Any:
        return rows.to(torch.float8_e4m3fn), rows[:, :1].float() if per_token else torch.full((1,), 2.0)

    monkeypatch.setattr(vllm_quant, "moe_kernel_quantize_input", stand_in)
    world = opened(True, torch.bfloat16)
    given = [world.layer.tokens(r, 5) for r in range(RANKS)]
    quant = some_quant(per_act_token_quant=per_token)

    def prepare(r: int) -> Any:
        x, ids, weights = given[r]
        return world.pairs[r].prepare(x, weights, ids, EXPERTS, map_of(r), False, quant, False)

    for r, (rows, scales, *_) in enumerate(world.on_all(prepare)):
        assert scales.shape == (len(held(r)), *shape)
        if per_token:
            assert torch.equal(scales[..., 0].to(torch.float8_e4m3fn).float(), rows[..., 0].float())


def test_numbers_of_four_bits_get_the_scale_of_the_tensor(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[tuple[Any, Any]] = []

    def stand_in(rows: Any, scale: Any, **more: Any) -> Any:
        heard.append((scale, more["is_scale_swizzled"]))
        return rows[:, ::2].to(torch.uint8), rows[:, :2].float()

    monkeypatch.setattr(vllm_quant, "moe_kernel_quantize_input", stand_in)
    world = opened(False, torch.bfloat16)
    given = [world.layer.tokens(r, 5) for r in range(RANKS)]
    quant = some_quant(quant_dtype="nvfp4", a1_scale="of the type", a1_gscale="of the tensor", is_scale_swizzled=False)

    def prepare(r: int) -> Any:
        x, ids, weights = given[r]
        return world.pairs[r].prepare(x, weights, ids, EXPERTS, map_of(r), False, quant, False)

    for rows, scales, *_ in world.on_all(prepare):
        assert len(rows) == len(scales)
    assert heard == [("of the tensor", False)] * RANKS


def test_dispatch_is_under_way_before_anybody_waits(opened: Open) -> None:
    """prepare_async returns on a rank whose peer has not come yet: vLLM computes shared experts meanwhile."""
    world = opened(False, torch.float32)
    given = [world.layer.tokens(r, 3) for r in range(RANKS)]
    world.on_all(lambda r: run(world.kernels[r], world.layer, r, *given[r]))  # groups are open now
    quant = world.experts[0].quant_config
    receivers = [
        world.pairs[r].prepare_async(given[r][0], given[r][2], given[r][1], EXPERTS, map_of(r), False, quant)[1]
        for r in range(RANKS)
    ]  # one thread: would never end if the first call waited for the second
    for r, receiver in enumerate(receivers):
        rows, _, meta, ids, weights = receiver()
        assert len(rows) == len(ids) == len(weights)
        assert int(meta.expert_num_tokens.sum()) == int((map_of(r)[ids] >= 0).sum())


def test_what_is_refused(opened: Open) -> None:
    world = opened(False, torch.float32)
    pair, quant = world.pairs[0], world.experts[0].quant_config
    x, ids, weights = world.layer.tokens(1, 3)
    with pytest.raises(Unsupported, match="top-3"):
        pair.prepare(x, weights, ids, EXPERTS, map_of(0), True, quant, False)
    with pytest.raises(StepError, match="without a prepare"):
        pair.finalize(x, x, weights, ids, False, world.experts[0].finalize_weight_and_reduce_impl())
    odd = torch.tensor([0, -1, 1, -1, 2], dtype=torch.int32)  # round robin

    def placed(r: int) -> str:
        with pytest.raises(ConfigError, match="linear placement") as refusal:
            world.pairs[r].prepare(x, weights, ids, EXPERTS, odd if r == 0 else -odd, False, quant, False)
        return str(refusal.value)

    assert "holds experts [0, 2, 4]" in world.on_all(placed)[0]
