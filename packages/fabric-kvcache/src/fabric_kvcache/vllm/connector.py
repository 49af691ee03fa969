"""`FabricConnector`: vLLM's interface for KV connectors, spoken by the halves in scheduling.py and worker.py.

Written against vLLM 0.32. Methods of the interface that a version does not call do no harm. Before 0.30 workers cannot
say which requests were not received, and the scheduler does not hand over its blocks: those versions are refused.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from fabric_core import Unsupported
from fabric_kvcache.vllm.card import Card, CardServer
from fabric_kvcache.vllm.options import Options
from fabric_kvcache.vllm.scheduling import Scheduling
from fabric_kvcache.vllm.specs import layer_caches, packing_of, rank_of
from fabric_kvcache.vllm.stats import FabricPromMetrics, FabricStats
from fabric_kvcache.vllm.steps import Report, Step
from fabric_kvcache.vllm.worker import Worker

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (  # type: ignore[import-not-found]
        KVConnectorBase_V1,
        KVConnectorHandshakeMetadata,
        KVConnectorMetadata,
        KVConnectorRole,
        KVConnectorTransferResults,
        KVConnectorWorkerMetadata,
        SupportsHMA,
    )
except ImportError as error:
    if error.name == "vllm":  # there is none
        raise
    raise Unsupported(f"FabricConnector is made for vLLM 0.30 to 0.32, and this one is another: {error}") from error

__all__ = ["FabricConnector"]

log = logging.getLogger("fabric.kvcache.vllm")


@dataclass
class FabricStep(KVConnectorMetadata):  # type: ignore[misc]
    """Scheduler to workers, each step."""

    step: Step = field(default_factory=Step)


@dataclass
class FabricReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Worker to scheduler, each step in which something happened."""

    report: Report = field(default_factory=Report)

    def aggregate(self, other: Any) -> FabricReport:
        self.report.add(other.report)
        return self


@dataclass
class FabricHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """Worker to scheduler, once: where this rank is, and what moves."""

    address: str
    granule: int
    packing: str


class FabricConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """See docs/vllm.md. `kv_role`: kv_producer computes prompts, kv_consumer receives them, kv_both does both."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        parallel = vllm_config.parallel_config
        self._options = Options.of(dict(transfer.kv_connector_extra_config))
        self._producer, self._consumer = bool(transfer.is_kv_producer), bool(transfer.is_kv_consumer)
        if parallel.pipeline_parallel_size > 1:
            raise Unsupported(
                f"pipeline_parallel_size={parallel.pipeline_parallel_size}: FabricConnector moves the KV of one stage; "
                "use tensor parallelism"
            )
        self._worker: Worker | None = None
        self._stats = FabricStats()
        self._failed: set[str] = set()
        self._server: CardServer | None = None
        self._scheduling: Scheduling | None = None
        if role == KVConnectorRole.SCHEDULER:
            groups = tuple(kv_cache_config.transfer_group_ids)
            self._scheduling = Scheduling(self._options, groups, producer=self._producer, consumer=self._consumer)

    # ---- the worker half

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        config = self._vllm_config
        tp, rank = rank_of(config)
        found = layer_caches(kv_caches, self._kv_cache_config, config)
        self._worker = Worker(
            found,
            self._options,
            tp=tp,
            rank=rank,
            packing=packing_of(config, found),
            device=str(found[0].tensor.device) if found[0].tensor.device.type != "cpu" else "cpu",
            instance=str(config.kv_transfer_config.engine_id)[:128],
            most=max(64, 2 * config.scheduler_config.max_num_seqs),
            producer=self._producer,
            consumer=self._consumer,
        )
        log.info("%s: %s, %d bytes", self._worker.address, self._worker.caches.shard, self._worker.caches.nbytes)

    def get_handshake_metadata(self) -> FabricHandshake | None:
        worker = self._worker
        return None if worker is None else FabricHandshake(worker.address, worker.caches.granule, worker.packing)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None:
            self._worker.begin(connector_metadata.step)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing: what is asked for was asked for when the step began."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a request is scheduled when all of it is here."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.layer(layer_name)

    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.end()

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        if self._worker is None:
            return KVConnectorTransferResults()
        sent, ended, failed = self._worker.poll()
        return KVConnectorTransferResults(finished_sending=sent, finished_recving=ended, failed_recving=failed)

    def build_connector_worker_meta(self) -> FabricReport | None:
        report = self._worker.report() if self._worker is not None else Report()
        self._stats.note(report)
        return FabricReport(report) if report else None

    def get_kv_connector_stats(self) -> FabricStats | None:
        return self._stats.take()

    def shutdown(self) -> None:
        worker, self._worker = self._worker, None
        server, self._server = self._server, None
        if worker is not None:
            worker.close()
        if server is not None:
            server.close()

    # ---- the scheduler half

    @property
    def _half(self) -> Scheduling:
        assert self._scheduling is not None, "this is the worker half"
        return self._scheduling

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._half.bind(kv_cache_manager)

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        """All ranks are up: tell the world where they are."""
        if not self._producer or not metadata:
            return
        config, options = self._vllm_config, self._options
        ranks = [metadata[rank] for rank in sorted(metadata)]
        port = options.port if options.port is not None else config.kv_transfer_config.kv_port
        if port:
            port += config.parallel_config.data_parallel_rank

        def card(host: str, port: int) -> Card:
            return Card(
                engine=str(config.kv_transfer_config.engine_id),
                addresses=tuple(one.address for one in ranks),
                host=host,
                port=port,
                granule=ranks[0].granule,
                packing=ranks[0].packing,
                model=str(config.model_config.model)[:4096],
            )

        self._server = CardServer(options.host, port, card, self._half.waiting.drop)
        self._half.card = self._server.card
        log.info("the prefiller's card is at http://%s:%d/fabric/kv", options.host, self._server.port)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._half.matched(request, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        return tuple(self._kv_cache_config.transfer_group_ids)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._half.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> FabricStep:
        return FabricStep(self._half.step(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        meta = connector_output.kv_connector_worker_meta
        report = meta.report if isinstance(meta, FabricReport) else None
        ended, sent = set(connector_output.finished_recving or ()), set(connector_output.finished_sending or ())
        self._half.reported(report, ended, sent)

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, Any]:
        from vllm.v1.request import RequestStatus  # type: ignore[import-not-found]

        well = request.status in {RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED}
        return self._half.finished(request, block_ids, well=well)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, Any]:
        return self.request_finished_all_groups(request, (block_ids,))

    def has_pending_push_work(self) -> bool:
        return self._scheduling is not None and self._scheduling.busy

    # ---- what vLLM asks of the class

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """`save_kv_layer` is what sends a layer: it must be called, which a full CUDA graph does not do."""
        return True

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> FabricStats:
        return FabricStats(data)

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> FabricPromMetrics:
        return FabricPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
