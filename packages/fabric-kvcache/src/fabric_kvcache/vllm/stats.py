"""What the connector tells vLLM's log and Prometheus: times, bytes and writes of transfers, and how many failed."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (  # type: ignore[import-not-found]
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.metrics.utils import create_metric_per_engine  # type: ignore[import-not-found]

from fabric_kvcache.vllm.steps import Report

__all__ = ["FabricPromMetrics", "FabricStats"]

_KEYS = ("seconds", "bytes", "writes", "sent_bytes", "failed")


class FabricStats(KVConnectorStats):  # type: ignore[misc]
    """Lists of one number per transfer since the last time, so that ranks and steps can be joined."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data=data or {})
        if not self.data:
            self.reset()

    def reset(self) -> None:
        self.data: dict[str, list[float]] = {key: [] for key in _KEYS}

    def note(self, report: Report) -> None:
        for nbytes, writes, seconds in report.received.values():
            self.data["seconds"].append(seconds)
            self.data["bytes"].append(nbytes)
            self.data["writes"].append(writes)
        self.data["sent_bytes"] += [nbytes for nbytes, _writes in report.sent.values()]
        self.data["failed"] += [1] * len(report.reasons)

    def take(self) -> FabricStats | None:
        """Return what was noted, and begin anew; None for nothing."""
        if self.is_empty():
            return None
        taken = FabricStats(self.data)
        self.reset()
        return taken

    def is_empty(self) -> bool:
        return not any(self.data.values())

    def aggregate(self, other: KVConnectorStats) -> FabricStats:
        for key in _KEYS:
            self.data[key] += other.data.get(key, [])
        return self

    def reduce(self) -> dict[str, int | float]:
        seconds, nbytes = self.data["seconds"], self.data["bytes"]
        count = len(seconds)
        return {
            "Received": count,
            "Avg time from request to KV (ms)": round(1e3 * sum(seconds) / count, 3) if count else 0,
            "Avg MiB": round(sum(nbytes) / count / 2**20, 3) if count else 0,
            "Avg writes": round(sum(self.data["writes"]) / count, 1) if count else 0,
            "Sent MiB": round(sum(self.data["sent_bytes"]) / 2**20, 3),
            "Failed": len(self.data["failed"]),
        }


class FabricPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Prometheus: one histogram for each list, and a counter of failures."""

    def __init__(self, config: Any, types: Any, labels: list[str], values: dict[int, list[object]]) -> None:
        super().__init__(config, types, labels, values)
        made = {
            "seconds": self._histogram(
                "vllm:fabric_kv_receive_seconds",
                "Time from asking for a prompt's KV until all of it was here, prefill included.",
                [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30],
            ),
            "bytes": self._histogram(
                "vllm:fabric_kv_received_bytes", "Bytes of KV of one request.", [2.0 ** (12 + 2 * i) for i in range(12)]
            ),
            "writes": self._histogram(
                "vllm:fabric_kv_received_writes",
                "Writes that brought one request.",
                [2.0 ** (2 * i) for i in range(10)],
            ),
            "sent_bytes": self._histogram(
                "vllm:fabric_kv_sent_bytes",
                "Bytes of KV sent of one request.",
                [2.0 ** (12 + 2 * i) for i in range(12)],
            ),
        }
        failed = self._counter_cls(
            name="vllm:fabric_kv_failed",
            documentation="Requests whose KV was not received, by rank.",
            labelnames=labels,
        )
        self._made = {key: create_metric_per_engine(one, values) for key, one in made.items()}
        self._failed = create_metric_per_engine(failed, values)

    def _histogram(self, name: str, text: str, buckets: list[float]) -> Any:
        return self._histogram_cls(name=name, documentation=text, buckets=buckets, labelnames=self._labelnames)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for key, metric in self._made.items():
            for value in transfer_stats_data.get(key, ()):
                metric[engine_idx].observe(value)
        failed = len(transfer_stats_data.get("failed", ()))
        if failed:
            self._failed[engine_idx].inc(failed)
