"""Serves an agent's metrics to Prometheus at ``/metrics``, and answers probes at ``/healthz``."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from swift_ft.launch.agent_status import AgentStatus
from swift_ft.recovery.job_state import Phase
from swift_ft.recovery.plan import RecoveryMode

__all__ = ["AgentCollector", "AgentEndpoint"]

_logger = logging.getLogger(__name__)

_REQUEST_S = 10.0


class AgentEndpoint:
    """A server in threads of this process. If its port is taken, the run continues without it.

    Args:
        port: where it listens, on all addresses; 0 for any free one.
        status: what it serves.

    Attributes:
        port: where it listens; None if it does not.
    """

    def __init__(self, port: int, status: AgentStatus) -> None:
        self.port: int | None = None
        self._server: ThreadingHTTPServer | None = None
        handler = type("Handler", (_Handler,), {"status": status, "registry": _registry(status)})
        try:
            self._server = _Server(("", port), handler)
        except OSError as error:
            _logger.warning(
                "This machine serves no metrics and answers no probes: port %d is not available (%s). "
                "The run continues.",
                port,
                error,
                extra={"event": "metrics_not_served"},
            )
            return
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, name="swift-endpoint", daemon=True).start()

    def close(self) -> None:
        """Stop serving."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news."""


class _Handler(BaseHTTPRequestHandler):
    status: AgentStatus
    registry: Any
    timeout = _REQUEST_S

    def do_GET(self) -> None:
        """Answer one request."""
        match self.path.partition("?")[0]:
            case "/healthz":
                trouble = self.status.trouble()
                self._answer(503 if trouble else 200, f"{trouble or 'ok'}\n".encode())
            case "/metrics":
                from prometheus_client import generate_latest
                from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

                self._answer(200, generate_latest(self.registry), CONTENT_TYPE_PLAIN_0_0_4)
            case _:
                self._answer(404, b"/metrics or /healthz\n")

    def _answer(self, code: int, body: bytes, kind: str = "text/plain; charset=utf-8") -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""


def _registry(status: AgentStatus) -> Any:
    from prometheus_client import CollectorRegistry

    registry = CollectorRegistry(auto_describe=False)
    registry.register(AgentCollector(status))
    return registry


_JOB_GAUGES = {
    "generation": "Number of the current membership. Grows by one with every recovery.",
    "slots": "Machines that the job needs.",
    "members": "Machines that fill a slot.",
    "spares": "Machines that wait for a slot.",
    "checkpoint": "Iteration of the last committed checkpoint.",
    "checkpoint_age_seconds": "Time since the last checkpoint was committed.",
}
_WORKER_FACTS = {
    "iteration": "Iterations that the worker has completed.",
    "log_bytes": "Payload of the messages that the worker has logged.",
    "log_budget_share": "Share of the log's disk budget that is in use.",
}


class AgentCollector:
    """Answers a scrape; see ``prometheus_client.registry.Collector``.

    Args:
        status: what is read at each scrape.
    """

    def __init__(self, status: AgentStatus) -> None:
        self._status = status

    def collect(self) -> Iterator[Any]:
        """One family per metric, with the values of now."""
        yield from self._of_job()
        yield from self._of_agent()

    def _of_job(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        job = self._status.job()
        for name, words in _JOB_GAUGES.items():
            family = GaugeMetricFamily(f"swift_ft_job_{name}", words)
            if (value := getattr(job, name)) is not None:
                family.add_metric([], float(value))
            yield family
        phase = GaugeMetricFamily("swift_ft_job_phase", "1 for the phase of the job.", labels=["phase"])
        for one in Phase:
            phase.add_metric([one.value], float(one == job.phase))
        yield phase
        words = "Machines with workers that were lost."
        yield CounterMetricFamily("swift_ft_job_failures", words, value=job.failures)
        words = "Recoveries that have ended, by way."
        recoveries = CounterMetricFamily("swift_ft_job_recoveries", words, labels=["way"])
        for way in RecoveryMode:
            recoveries.add_metric([way.value], job.recoveries.get(way.value, 0))
        yield recoveries
        words = "Time from losses to live training, together."
        yield CounterMetricFamily("swift_ft_job_lost_seconds", words, value=job.lost_seconds)

    def _of_agent(self) -> Iterator[Any]:
        from prometheus_client.core import GaugeMetricFamily

        words = "1 while /healthz answers 200."
        yield GaugeMetricFamily("swift_ft_agent_healthy", words, value=float(not self._status.trouble()))
        words, silent_s = "Time since the rendezvous store answered.", self._status.store_silent_s()
        yield GaugeMetricFamily("swift_ft_agent_store_silent_seconds", words, value=silent_s)
        workers = self._status.workers()
        words = "Time since the worker was heard last."
        ages = GaugeMetricFamily("swift_ft_agent_worker_heartbeat_age_seconds", words, labels=["rank"])
        for worker in workers:
            ages.add_metric([str(worker.rank)], worker.heartbeat_age_seconds)
        yield ages
        for name, words in _WORKER_FACTS.items():
            family = GaugeMetricFamily(f"swift_ft_agent_worker_{name}", words, labels=["rank"])
            for worker in workers:
                if (value := worker.beat.get(name)) is not None:
                    family.add_metric([str(worker.rank)], float(value))
            yield family
