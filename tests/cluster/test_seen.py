"""What an operator sees of a real run that loses a machine: events, the hook, metrics, probes."""

from __future__ import annotations

import json
import signal
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lib.ports import free_port
from tests.support.cluster import run_cluster
from tests.support.event_lines import checked_lines
from tests.support.hosts import Hosts


class Scraper:
    """Scrapes the first machine's agent again and again, as Prometheus does."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"
        self._over = threading.Event()
        self.health: set[str] = set()
        self.metrics: list[str] = []
        self._thread = threading.Thread(target=self._scrape)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def _scrape(self) -> None:
        while not self._over.wait(0.1):
            try:
                self.health.add(self._read("/healthz"))
                self.metrics.append(self._read("/metrics"))
            except OSError:  # the agent is not there yet, or not any more
                continue

    def _read(self, path: str) -> str:
        with urllib.request.urlopen(self._url + path, timeout=10) as answer:
            return str(answer.read().decode())


def test_a_loss_is_seen_everywhere(tmp_path: Path) -> None:
    log, paged, port = tmp_path / "events.jsonl", tmp_path / "paged", free_port(in_a_row=5)
    scraper = Scraper(port)
    try:
        run = run_cluster(
            tmp_path / "run",
            inject="kill machine=1 iteration=5 point=forward",
            flags=[
                *("--events-log", str(log), "--on-event", f"cat >> {paged}"),
                *("--metrics-port", str(port)),
            ],
        )
    finally:
        scraper.close()
    assert run.code == 0, run.output[-3000:]
    lines = checked_lines(log.read_text())
    [recovery] = run.recoveries
    finished = next(line for line in lines if line["event"] == "recovery_finished")
    assert finished["fields"]["way"] == recovery["mode"] == "replay"
    assert finished["fields"]["machines"] == [1]
    assert abs(finished["fields"]["seconds"] - (recovery["live"] - recovery["detected"])) < 0.001
    committed = [line["fields"]["iteration"] for line in lines if line["event"] == "checkpoint_committed"]
    assert set(committed) == {event["iteration"] for event in run.events("CheckpointCommitted")}
    assert [line["event"] for line in lines if line["source"] == "journal"][-1] == "run_ended"

    heard = [json.loads(line) for line in paged.read_text().splitlines()]
    wanted = [line for line in lines if line["level"] != "info" or line["event"] == "run_ended"]
    assert heard == wanted

    assert scraper.health == {"ok\n"}
    last = scraper.metrics[-1]
    for sample in (
        'swift_ft_job_recoveries_total{way="replay"} 1.0',
        "swift_ft_job_failures_total 1.0",
        "swift_ft_job_generation 2.0",
        "swift_ft_agent_healthy 1.0",
    ):
        assert sample in last
    assert any("swift_ft_agent_worker_log_bytes{" in text for text in scraper.metrics)


@pytest.mark.thorough
def test_one_of_several_launchers_runs_the_command_for_an_event_of_the_journal(hosts: Hosts) -> None:
    """Events of a launcher and of its log are known to it alone: it runs the command for each of them."""
    names = ("first", "second", "third")
    logs = {name: hosts.folder / f"{name}.jsonl" for name in names}
    paged = {name: hosts.folder / f"{name}.paged" for name in names}
    for number, name in enumerate(names):
        flags = ("--events-log", str(logs[name]), "--on-event", f"cat >> {paged[name]}")
        if name == "third":  # a spare
            hosts.wait_for("iteration 5:", "second")
        hosts.start(name, number, *flags)
    hosts.processes["second"].send_signal(signal.SIGTERM)
    assert hosts.end() == {"first": 0, "second": 143, "third": 0}

    told = {name: lines_of(logs[name]) for name in names}
    heard = {name: lines_of(paged[name]) for name in names}
    of_journal = [line_id(line) for name in names for line in heard[name] if line["source"] == "journal"]
    wanted = {line_id(line) for name in names for line in told[name] if is_wanted(line, "journal")}
    assert {"machine_lost", "recovery_finished", "run_ended"} <= {event for _, event in wanted}
    assert sorted(of_journal) == sorted(wanted)
    for name in names:
        own = [line for line in told[name] if is_wanted(line, "log") or is_wanted(line, "launcher")]
        assert [line for line in heard[name] if line["source"] != "journal"] == own


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The JSON lines of a file; none if it was never written."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def line_id(line: dict[str, Any]) -> tuple[int, str]:
    """What an event of the journal has in common everywhere."""
    return line["position"], line["event"]


def is_wanted(line: dict[str, Any], source: str) -> bool:
    """Whether the command is to run for a line."""
    return bool(line["source"] == source and (line["level"] != "info" or line["event"] == "run_ended"))
