"""A worker's metrics, in Python and for Prometheus."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from swift_ft.logging import IterationStats, LogWriterMetrics
from swift_ft.network.page_server import PageServer, metrics_page

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LogMetrics:
    """The current metrics of one worker's log.

    Attributes:
        last: what logging cost in the iteration that ended last.
        total: what it cost in all iterations.
        written: the segments and records that were written.
        memory_budget_bytes: this worker's share.
        disk_budget_bytes: this worker's share; None for no limit.
        store_bytes_per_s: how fast the store takes segments; None if none are shipped.
        packing: whether messages are packed.
        read_from_peers_bytes: segments that this worker's replays read from the workers that wrote them.
        read_from_store_bytes: segments that they read from the store.
        protected: the log has no gap since the last checkpoint.
    """

    last: IterationStats
    total: IterationStats
    written: LogWriterMetrics
    memory_budget_bytes: int
    disk_budget_bytes: int | None
    store_bytes_per_s: float | None
    packing: bool
    read_from_peers_bytes: int
    read_from_store_bytes: int
    protected: bool


@dataclass(frozen=True, slots=True)
class SessionMetrics:
    """The current metrics of one worker.

    Attributes:
        rank: the worker.
        generation: the membership that it works in.
        iteration: iterations that its state has completed.
        replaying: its state is being rebuilt from the log.
        recoveries: how often training has continued after an interruption, in this process.
        committed: iteration of the last committed checkpoint; None before the first.
        in_memory: iterations completed by the newest memory checkpoint that is complete; None without any.
        pace: how many times as long as its peers it takes for its own work, if it is a straggler; else 1.
        link_busy: share of the time in which only the network held up the bytes of its busiest link; None as
            long as it has sent little, or where the kernel cannot say.
        link_bytes_per_s: so many arrived there, of that time.
        log: its log.
    """

    rank: int
    generation: int
    iteration: int
    replaying: bool
    recoveries: int
    committed: int | None
    in_memory: int | None
    pace: float
    link_busy: float | None
    link_bytes_per_s: float | None
    log: LogMetrics

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary."""
        return asdict(self)


_HIGH_WATER = ("queue_high_water_bytes", "pool_high_water_bytes")
_NOW = ("disk_bytes", "waiting_segments")


def serve_worker_metrics(address: str, base: int, rank: int, read: Callable[[], SessionMetrics]) -> None:
    """As ``swift-run --worker-metrics-port`` promises: worker r serves its metrics at that port + r.

    It does while the process lives. Nothing is computed before a scrape. If it cannot listen, training
    continues without metrics.

    Args:
        address: where it listens; empty for all addresses of this host.
        base: the port of worker 0.
        rank: this worker.
        read: reads its metrics.
    """
    pages = {"/metrics": metrics_page(MetricsCollector(read))}
    try:
        PageServer(address, base + rank, pages, name="swift-metrics")
    except OSError as error:
        _logger.warning(
            "Worker %d serves no metrics: %s is not available (%s). Training continues.",
            rank,
            f"port {base + rank} at {address}" if address else f"port {base + rank}",
            error,
            extra={"event": "metrics_not_served", "rank": rank},
        )


class MetricsCollector:
    """Answers a scrape; see ``prometheus_client.registry.Collector``."""

    def __init__(self, read: Callable[[], SessionMetrics]) -> None:
        self._read = read

    def collect(self) -> Iterator[Any]:
        """One family per metric, with the values of now."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        metrics = self._read()
        labels, values = ["rank"], [str(metrics.rank)]

        def family(kind: Any, name: str, words: str, value: float) -> Any:
            found = kind(f"swift_ft_{name}", words, labels=labels)
            found.add_metric(values, value)
            return found

        for name, words in _WORKER.items():
            if (value := getattr(metrics, name)) is not None:
                yield family(GaugeMetricFamily, name, words, float(value))
        yield family(CounterMetricFamily, "recoveries", "Recoveries in this process.", metrics.recoveries)
        for name, words in _LOG.items():
            if (value := getattr(metrics.log, name)) is not None:
                yield family(GaugeMetricFamily, f"log_{name}", words, float(value))
        for name, words in _READ.items():
            yield family(CounterMetricFamily, f"log_{name}", words, getattr(metrics.log, name))
        for name, words in _ACCOUNT.items():
            now = name in _HIGH_WATER
            value = getattr(metrics.log.last if now else metrics.log.total, name)
            kind = GaugeMetricFamily if now else CounterMetricFamily
            yield family(kind, f"log_{_prometheus_name(name)}", words, value)
        for name, (shown, words) in _WRITTEN.items():
            kind = GaugeMetricFamily if name in _NOW else CounterMetricFamily
            yield family(kind, f"log_{shown}", words, getattr(metrics.log.written, name))


def _prometheus_name(name: str) -> str:
    """Base units are spelled out: ``held_back_s`` is ``held_back_seconds``."""
    return f"{name.removesuffix('_s')}_seconds" if name.endswith("_s") else name


_WORKER = {
    "generation": "The membership that the worker works in.",
    "iteration": "Iterations that the worker's state has completed.",
    "replaying": "1 while the worker's state is being rebuilt from the log.",
    "committed": "Iteration of the last committed checkpoint.",
    "in_memory": "Iteration of the newest complete memory checkpoint.",
    "link_busy": "Share of the time in which only the network held up the bytes of the busiest link.",
    "link_bytes_per_s": "Bytes that arrived over the worker's busiest link, per second of that time.",
    "pace": "How many times as long as its peers a straggler takes for its own work; 1 for any other worker.",
}
_LOG = {
    "memory_budget_bytes": "Memory that the worker's log may take.",
    "disk_budget_bytes": "Disk that the worker's log may take.",
    "store_bytes_per_s": "Bytes per second at which the store takes uploaded segments.",
    "packing": "1 while messages are packed.",
    "protected": "0 from when the log could not be written until a checkpoint covers the gap.",
}
_READ = {
    "read_from_peers_bytes": "Bytes of segments that replays read from the workers that wrote them.",
    "read_from_store_bytes": "Bytes of segments that replays read from the store.",
}
_ACCOUNT = {
    "messages": "Messages logged.",
    "bytes": "Payload of the messages logged.",
    "step_s": "Time in steps.",
    "bubble_s": "Time that the worker waited for messages.",
    "copied_in_bubbles_s": "Time of copies to the host while the worker waited for messages.",
    "copied_outside_s": "Time of copies to the host during computation.",
    "held_back_s": "Time that training waited for room in the log's budget.",
    "queue_high_water_bytes": "Most payload bytes that waited to be written, in the last iteration.",
    "pool_high_water_bytes": "Largest amount of page-locked memory in use, in the last iteration.",
}
_WRITTEN = {
    "bytes": ("written_bytes", "Bytes of segments, framing included."),
    "records": ("records", "Messages and receipts written."),
    "segments": ("segments", "Segments completed."),
    "disk_bytes": ("disk_bytes", "Bytes of segments on the tier that is written to."),
    "waiting_segments": ("waiting_segments", "Complete segments that are not in the store yet."),
}
