"""vLLM's trainer half against stand-ins for vLLM: who is told what, and what a failure leaves behind."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.append(str(Path(__file__).parent))

import pytest

torch = pytest.importorskip("torch")

from small_world import until  # noqa: E402
from vllm_stand_in import Source, Workers, stand_in  # noqa: E402

from fabric_core import ConfigError, TransferEngine, Unsupported  # noqa: E402
from fabric_rlweights.vllm.session import Session, UpdateFailed  # noqa: E402

LIMIT = 60.0


class _Fleet:
    """Workers in this process. `broken`: those whose loader raises."""

    def __init__(self, count: int) -> None:
        self.count, self.broken = count, set[int]()
        self.models: list[dict[str, Any]] = [{} for _ in range(count)]
        self.client = Workers(self._join)

    def _join(self, told: dict[str, Any]) -> list[Any]:
        params = {name: (tuple(shape), dtype) for name, shape, dtype in told["params"]}

        def loader(number: int) -> Any:
            def load(weights: Any) -> None:
                if number in self.broken:
                    raise RuntimeError("no memory today")
                self.models[number] = {name: tensor.clone() for name, tensor in weights}

            return load

        return [
            Session(TransferEngine.open(), number, params, told["controller"], loader(number), patience=LIMIT)
            for number in range(self.count)
        ]

    def close(self) -> None:
        for session in self.client.sessions:
            session.close()


@contextmanager
def _trainers(monkeypatch: pytest.MonkeyPatch, ranks: int, workers: int) -> Iterator[tuple[_Fleet, list[Any], Any]]:
    """Trainer engines of which each holds the whole module, and the workers."""
    fleet, module = _Fleet(workers), torch.nn.Linear(8, 4)
    with stand_in() as fabric:
        address = [""]

        def everybody(found: str) -> str:
            address[0] = found or address[0]
            return address[0]

        monkeypatch.setattr(fabric.trainer, "_everybody", everybody)
        made: list[Any] = []
        try:
            for rank in range(ranks):
                info = fabric.trainer.FabricTrainerInitInfo(rank=rank, trainers=ranks, receivers=workers, timeout=LIMIT)
                made.append(
                    fabric.trainer.FabricTrainerWeightTransferEngine.trainer_init(
                        info, client=fleet.client, source=Source(module)
                    )
                )
            yield fleet, made, module
        finally:
            for one in made:
                one.shutdown()
            fleet.close()


def _send(trainers: list[Any]) -> list[Any]:
    """Everybody at once: outcomes, or what was raised."""

    def one(trainer: Any) -> Any:
        try:
            return trainer.send_weights()
        except UpdateFailed as error:
            return error

    with ThreadPoolExecutor(len(trainers)) as threads:
        return list(threads.map(one, trainers))


def test_a_rank_that_was_alone_has_the_number_of_the_others_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with _trainers(monkeypatch, 2, 1) as (fleet, trainers, module):
        assert all(outcome.committed for outcome in _send(trainers))
        trainers[0]._info.timeout = 1.0
        with pytest.raises(UpdateFailed, match="trainer 1 did not offer"):
            trainers[0].send_weights()
        trainers[0]._info.timeout = LIMIT
        until(lambda: trainers[1]._trainer.newest == 2, "the other rank heard nothing of it")
        outcomes = _send(trainers)
        assert [getattr(outcome, "committed", outcome) for outcome in outcomes] == [True, True]
        assert {outcome.version for outcome in outcomes} == {3}
        assert torch.equal(fleet.models[0]["weight"], module.weight)


def test_a_worker_that_cannot_load_is_told_to_all_ranks_and_the_next_update_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with _trainers(monkeypatch, 2, 2) as (fleet, trainers, module):
        fleet.broken = {1}
        failed = _send(trainers)
        assert all(isinstance(error, UpdateFailed) for error in failed), failed
        assert all("receiver 1" in str(error) and "no memory today" in str(error) for error in failed)
        assert not any(fleet.client.open)
        fleet.broken = set()
        with torch.no_grad():
            module.weight.fill_(3.0)
        assert all(outcome.committed for outcome in _send(trainers))
        assert all(torch.equal(model["weight"], module.weight) for model in fleet.models)
        assert fleet.client.finished[-1] == "2"


def test_parameters_that_moved_are_not_sent_from_where_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    with _trainers(monkeypatch, 1, 1) as (fleet, trainers, module):
        old = module.weight.data
        module.weight.data = old.clone()
        with pytest.raises(ConfigError, match=r"weight is not where it was .* trainer_init\(\) again"):
            trainers[0].send_weights()
        assert not any(fleet.client.open)
        module.weight.data = old
        assert trainers[0].send_weights().committed


def test_a_trainer_that_could_not_join_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[TransferEngine] = []
    real = TransferEngine.open

    def opens(*words: Any, **more: Any) -> TransferEngine:
        opened.append(real(*words, **more))
        return opened[-1]

    def refuse(_told: Any) -> list[Any]:
        raise ConnectionError("no server")

    monkeypatch.setattr(TransferEngine, "open", opens)
    with stand_in() as fabric:
        info = fabric.trainer.FabricTrainerInitInfo(rank=0)
        with pytest.raises(ConnectionError, match="no server"):
            fabric.trainer.FabricTrainerWeightTransferEngine.trainer_init(
                info, client=Workers(refuse), source=Source(torch.nn.Linear(2, 2))
            )
        assert len(opened) == 2
        assert all(engine.closed for engine in opened)
        for timeout in (0, -1.0, float("nan"), 1e6, None, True):
            info = fabric.trainer.FabricTrainerInitInfo(rank=0, timeout=timeout)
            with pytest.raises(ConfigError, match="seconds of an update, above 0"):
                fabric.trainer.FabricTrainerWeightTransferEngine.trainer_init(
                    info, client=None, source=Source(torch.nn.Linear(2, 2))
                )
    assert len(opened) == 2


def test_a_gpus_parameters_are_served_by_an_engine_of_that_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def opens(device: str = "cpu", *_words: Any) -> Any:
        asked.append(device)
        raise Unsupported("no more is wanted")

    with stand_in() as fabric:
        gpu = SimpleNamespace(device=torch.device("cuda", 1))
        assert fabric.trainer._device([torch.zeros(1), gpu]) == "cuda:1"
        assert fabric.trainer._device([]) == "cpu"
        monkeypatch.setattr(fabric.trainer, "_device", lambda _buffers: "cuda:1")
        monkeypatch.setattr(fabric.trainer.FabricTrainerWeightTransferEngine, "_control", lambda *_: "local:nobody")
        monkeypatch.setattr(fabric.trainer.TransferEngine, "open", opens)
        with pytest.raises(Unsupported):
            fabric.trainer.FabricTrainerWeightTransferEngine.trainer_init(
                fabric.trainer.FabricTrainerInitInfo(rank=0), client=None, source=Source(torch.nn.Linear(2, 2))
            )
    assert asked == ["cuda:1"]


def test_several_instances_are_told_at_once_and_number_their_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    with stand_in() as fabric:
        client = fabric.client(["http://a:1", "http://b:2/", "http://c:3"])
        monkeypatch.setattr(client, "workers", lambda: [2, 4, 1])
        client.init_weight_transfer_engine({"controller": "x"})
        told = {url: json["init_info"] for url, _path, json in fabric.http.posts}
        assert [told[url].get("first_rank", 0) for url in ("http://a:1", "http://b:2", "http://c:3")] == [0, 2, 6]
        fabric.http.fails.add(("http://b:2", "finish_weight_update"))
        asked: list[int] = []

        def ask(number: int, *_words: Any) -> dict[str, Any]:
            asked.append(number)
            return {"success": True}

        monkeypatch.setattr(client, "_ask", ask)
        with pytest.raises(RuntimeError, match="500 for http://b:2"):
            client.finish_weight_update("7")
        assert sorted(asked) == [0, 1, 2], "a cache of old weights was kept"
        with pytest.raises(ConfigError, match="the address of each vLLM instance, once"):
            fabric.client(["http://a:1", "http://a:1"])


@pytest.mark.parametrize("obeys", [True, False])
def test_a_prefix_cache_that_requests_hold_is_emptied_all_the_same(
    monkeypatch: pytest.MonkeyPatch, obeys: bool
) -> None:
    """vLLM answers 200 and `"success": false` then, and goes on serving the old weights' KV."""
    asked: list[str] = []

    def ask(_number: int, path: str, params: dict[str, str]) -> dict[str, Any]:
        assert path == "reset_prefix_cache"
        assert params["reset_external"] == "true"
        asked.append(params["reset_running_requests"])
        return {"success": obeys and asked[-1] == "true"}

    with stand_in() as fabric:
        client = fabric.client("http://a:1")
        monkeypatch.setattr(client, "_ask", ask)
        if obeys:
            client.finish_weight_update("7")
            assert [path for _url, path, _json in fabric.http.posts][-1] == "reset_encoder_cache"
        else:
            with pytest.raises(UpdateFailed, match="http://a:1 has the new weights and a prefix cache of the old ones"):
                client.finish_weight_update("7")
    assert asked == ["false", "true"]
