"""Serves an agent's metrics to Prometheus at ``/metrics``, and answers probes at ``/healthz``."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from typing import Any

from swift_ft.launch.agent.status import AgentStatus
from swift_ft.network.page_server import Page, Pages, PageServer, metrics_page
from swift_ft.recovery.job_state import Phase
from swift_ft.recovery.plan import RecoveryMode

_logger = logging.getLogger(__name__)


class AgentEndpoint:
    """A server in threads of this process. If it cannot listen, the run continues without it.

    Args:
        address: where it listens; empty for all addresses of this host.
        port: its number; 0 for any free one.
        status: what it serves.

    Attributes:
        port: where it listens; None if it does not.
    """

    def __init__(self, address: str, port: int, status: AgentStatus) -> None:
        self.port: int | None = None
        self._server: PageServer | None = None
        pages: Pages = {
            "/metrics": metrics_page(AgentCollector(status)),
            "/healthz": partial(_health, status),
        }
        try:
            self._server = PageServer(address, port, pages, name="swift-endpoint")
        except OSError as error:
            _logger.warning(
                "This machine serves no metrics and answers no probes: %s is not available (%s). "
                "The run continues.",
                f"port {port} at {address}" if address else f"port {port}",
                error,
                extra={"event": "metrics_not_served"},
            )
            return
        self.port = self._server.server_port

    def close(self) -> None:
        """Stop serving."""
        if self._server is not None:
            self._server.close()


def _health(status: AgentStatus) -> Page:
    trouble = status.trouble()
    return Page(f"{trouble or 'ok'}\n".encode(), 503 if trouble else 200)


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
