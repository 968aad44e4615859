"""What a session can tell about itself, in Python and to Prometheus."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from swift_ft.errors import UsageError
from swift_ft.logging import Account, LogWriterMetrics

__all__ = ["LogMetrics", "SessionMetrics", "serve_as_told", "serve_metrics"]


@dataclass(frozen=True, slots=True)
class LogMetrics:
    """One worker's log, now.

    Attributes:
        last: what logging cost in the iteration that ended last.
        total: and in all of them.
        written: segments and records.
        memory_budget_bytes: this worker's share.
        disk_budget_bytes: the same; None for no limit.
        store_bytes_per_s: what the store takes, where segments are shipped to one.
        packing: messages are packed.
        read_from_peers_bytes: segments that this worker's replays got from those who wrote them.
        read_from_store_bytes: and from the store.
    """

    last: Account
    total: Account
    written: LogWriterMetrics
    memory_budget_bytes: int
    disk_budget_bytes: int | None
    store_bytes_per_s: float | None
    packing: bool
    read_from_peers_bytes: int
    read_from_store_bytes: int


@dataclass(frozen=True, slots=True)
class SessionMetrics:
    """One worker, now.

    Attributes:
        rank: the worker.
        generation: the membership that it works in.
        iteration: iterations that its state has completed.
        replaying: its state is being rebuilt from the log.
        recoveries: how often training went on after an interruption, in this process.
        committed: iteration of the last committed checkpoint; None before the first.
        log: its log.
    """

    rank: int
    generation: int
    iteration: int
    replaying: bool
    recoveries: int
    committed: int | None
    log: LogMetrics

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary."""
        return asdict(self)


_HIGH_WATER = ("queue_high_water_bytes", "pool_high_water_bytes")
_NOW = ("disk_bytes", "waiting_segments")


def serve_metrics(port: int, read: Callable[[], SessionMetrics]) -> int:
    """Serve a worker's metrics to Prometheus, from a thread, while the process lives.

    Nothing is computed before somebody asks.

    Args:
        port: where; 0 for any.
        read: gets them.

    Returns:
        The port.

    Raises:
        UsageError: prometheus_client is not installed.
        OSError: the port cannot be had.
    """
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError as error:
        raise UsageError(
            "Metrics are served by prometheus_client: pip install 'swift-ft[metrics]'."
        ) from error
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(read))
    server, _ = start_http_server(port, registry=registry)
    return int(server.server_port)


def serve_as_told(base: int, rank: int, read: Callable[[], SessionMetrics]) -> None:
    """As ``swift-run --metrics-port`` says: worker r is at that port + r.

    A taken port costs the metrics, and nothing else.
    """
    try:
        serve_metrics(base + rank, read)
    except OSError as error:
        warnings.warn(
            f"Worker {rank} serves no metrics: port {base + rank} cannot be had ({error}). Training goes on.",
            stacklevel=3,
        )


class _Collector:
    """Answers a scrape; see ``prometheus_client.registry.Collector``."""

    def __init__(self, read: Callable[[], SessionMetrics]) -> None:
        self._read = read

    def collect(self) -> Iterator[Any]:
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
}
_LOG = {
    "memory_budget_bytes": "Memory that the worker's log may take.",
    "disk_budget_bytes": "Disk that the worker's log may take.",
    "store_bytes_per_s": "What the store takes of shipped segments.",
    "packing": "1 while messages are packed.",
}
_READ = {
    "read_from_peers_bytes": "Segments that replays got from the workers that wrote them.",
    "read_from_store_bytes": "Segments that replays got from the store.",
}
_ACCOUNT = {
    "messages": "Messages logged.",
    "bytes": "Payload of the messages logged.",
    "step_s": "Time in steps.",
    "bubble_s": "Time that the worker waited for messages.",
    "copied_in_bubbles_s": "Copies from the device to the host while the worker waited anyway.",
    "copied_outside_s": "Copies from the device to the host beside computation.",
    "held_back_s": "Time that training waited for room in the log's budget.",
    "queue_high_water_bytes": "Most payload that waited to be written, in the last iteration.",
    "pool_high_water_bytes": "Most page-locked memory in use, in the last iteration.",
}
_WRITTEN = {
    "bytes": ("written_bytes", "Bytes of segments, framing included."),
    "records": ("records", "Messages and receipts written."),
    "segments": ("segments", "Segments completed."),
    "disk_bytes": ("disk_bytes", "Bytes of segments on the tier that is written to."),
    "waiting_segments": ("waiting_segments", "Segments that are not in the store yet."),
}
