"""An agent's metrics and its answer to probes, scraped over HTTP."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from docs.reference import agent_metrics
from swift_ft.coordination.store_client import connect
from swift_ft.launch.agent.endpoint import AgentEndpoint
from swift_ft.launch.agent.status import AgentStatus, WorkerFacts
from swift_ft.launch.detection.store_watch import StoreWatch
from swift_ft.recovery import events as ev
from swift_ft.recovery.entries import Entry
from tests.support.clean_fork import CLEAN_FORK
from tests.support.store_processes import store_process

DEPLOY = Path(__file__).parents[4] / "deploy"
_DEADLINE_S = 60.0


class Agent:
    """The status of an agent that nobody runs, behind a real endpoint."""

    def __init__(self) -> None:
        self.status = AgentStatus(loop_limit_s=5.0)
        self.endpoint = AgentEndpoint("127.0.0.1", 0, self.status)
        self.position = 0

    def read(self, *events: ev.Event) -> None:
        for event in events:
            self.status.on_entries([Entry(self.position, event, 1000.0 + self.position, "test")])
            self.position += 1

    def get(self, path: str) -> tuple[int, str]:
        try:
            url = f"http://127.0.0.1:{self.endpoint.port}{path}"
            with urllib.request.urlopen(url, timeout=_DEADLINE_S) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def scrape(self) -> dict[str, float]:
        """Samples by name and labels."""
        code, text = self.get("/metrics")
        assert code == 200
        found = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
                found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
        return found


@pytest.fixture
def agent() -> Iterator[Agent]:
    """An agent of two machines that train, with one spare."""
    agent = Agent()
    agent.read(
        ev.JobOpened(machines=2, max_failures=9),
        *(ev.MachineJoined(machine=name) for name in "abc"),
        *(ev.StatusReported(rank=rank, generation=1, iteration=None) for rank in range(2)),
        *(ev.WorkerReady(rank=rank, generation=1) for rank in range(2)),
    )
    yield agent
    agent.endpoint.close()


def test_what_the_journal_says_is_counted(agent: Agent) -> None:
    before = agent.scrape()
    assert before["swift_ft_job_phase{phase=live}"] == 1.0
    assert before["swift_ft_job_spares"] == 1.0
    assert "swift_ft_job_checkpoint" not in before
    agent.read(
        ev.CheckpointCommitted(iteration=40, epoch=1),
        ev.MachineLost(machine="b", reason="gone"),
        ev.MachineLost(machine="b", reason="seen by another machine, too"),
        ev.StatusReported(rank=0, generation=2, iteration=47, live=True),
        ev.StatusReported(rank=1, generation=2, iteration=None),
    )
    during = agent.scrape()
    assert during["swift_ft_job_phase{phase=recovering}"] == 1.0
    assert during["swift_ft_job_phase{phase=live}"] == 0.0
    agent.read(*(ev.WorkerReady(rank=rank, generation=2) for rank in range(2)))
    after = agent.scrape()
    expected = {
        "generation": 2.0,
        "slots": 2.0,
        "members": 2.0,
        "spares": 0.0,
        "failures_total": 1.0,
        "checkpoint": 40.0,
        "recoveries_total{way=fallback}": 1.0,
        "recoveries_total{way=replay}": 0.0,
        "lost_seconds_total": 5.0,  # entries are one second apart, from the loss to the last worker
        "phase{phase=live}": 1.0,
    }
    assert {name: after[f"swift_ft_job_{name}"] for name in expected} == expected
    assert after["swift_ft_job_checkpoint_age_seconds"] > 1e9


def test_what_workers_say_is_served(agent: Agent) -> None:
    beat = {"iteration": 12, "log_bytes": 4096, "log_budget_share": 0.5}
    agent.status.turn(lambda: [WorkerFacts(4, 0.25, beat), WorkerFacts(5, 3.0)])
    found = agent.scrape()
    expected = {
        "heartbeat_age_seconds{rank=4}": 0.25,
        "heartbeat_age_seconds{rank=5}": 3.0,
        "iteration{rank=4}": 12.0,
        "log_bytes{rank=4}": 4096.0,
        "log_budget_share{rank=4}": 0.5,
    }
    workers = {name: value for name, value in found.items() if "worker" in name}
    assert workers == {f"swift_ft_agent_worker_{name}": value for name, value in expected.items()}


def test_a_loop_that_does_not_turn_is_not_healthy(agent: Agent) -> None:
    assert agent.get("/healthz") == (200, "ok\n"), "a machine that has not joined yet has no loop"
    agent.status.turn(list)
    assert agent.get("/healthz") == (200, "ok\n")
    agent.status._turned_at = time.monotonic() - 60.0
    assert agent.get("/healthz") == (503, "the agent's loop has not turned for 60 s\n")
    assert agent.scrape()["swift_ft_agent_healthy"] == 0.0
    agent.status.turn(list)
    assert agent.get("/healthz")[0] == 200


def test_a_frozen_store_is_not_healthy(agent: Agent) -> None:
    with (
        store_process() as service,
        closing(StoreWatch(connect(service.address, "job"), "the store", limit_s=_DEADLINE_S * 10)) as watch,
    ):
        agent.status.observe_store(watch.silence_s, 5.0)
        assert agent.get("/healthz") == (200, "ok\n")
        os.kill(service.pid, signal.SIGSTOP)
        _, text = becomes(503, partial(agent.get, "/healthz"))
        assert re.fullmatch(r"the rendezvous store has not answered for \d+ s\n", text)
        os.kill(service.pid, signal.SIGCONT)
        assert becomes(200, partial(agent.get, "/healthz")) == (200, "ok\n")


def becomes(code: int, get: Any) -> tuple[int, str]:
    deadline = time.monotonic() + _DEADLINE_S
    while (answer := get())[0] != code:
        assert time.monotonic() < deadline, f"still {answer}"
        time.sleep(0.1)
    return answer  # type: ignore[no-any-return]


def test_a_stopped_process_answers_no_probe() -> None:
    ours, theirs = CLEAN_FORK.Pipe()
    process = CLEAN_FORK.Process(target=_serve_an_endpoint, args=(theirs,), daemon=True)
    process.start()
    pid = process.pid
    assert pid is not None
    try:
        assert ours.poll(_DEADLINE_S)
        port = ours.recv()
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(TimeoutError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=1.0)
        os.kill(pid, signal.SIGCONT)
        url = f"http://127.0.0.1:{port}/healthz"
        assert urllib.request.urlopen(url, timeout=_DEADLINE_S).read() == b"ok\n"
    finally:
        process.kill()
        process.join()


def test_a_port_in_use_is_said_and_no_reason_to_stop(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        endpoint = AgentEndpoint("127.0.0.1", taken.getsockname()[1], AgentStatus(loop_limit_s=1.0))
    assert endpoint.port is None
    assert [vars(record)["event"] for record in caplog.records] == ["metrics_not_served"]
    endpoint.close()


def test_another_path_is_not_there(agent: Agent) -> None:
    assert agent.get("/") == (404, "/metrics or /healthz\n")


# -------------------------------------------------------------------------- the dashboard and the alert rules


def alert_rules() -> list[dict[str, Any]]:
    document = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yaml").read_text())
    return [rule for group in document["groups"] for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((DEPLOY / "grafana" / "swift_ft.json").read_text())["panels"]
    return found


EXPRESSIONS = [rule["expr"] for rule in alert_rules()] + [
    target["expr"].replace("$job", "job7") for panel in panels() for target in panel["targets"]
]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_query_is_promql_over_metrics_that_exist(expression: str) -> None:
    promql_parser.parse(expression)
    names = set(re.findall(r"swift_ft_\w+", expression))
    assert names
    assert names <= agent_metrics().keys()


def test_every_rule_says_how_bad_it_is_and_what_happened() -> None:
    for rule in alert_rules():
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert re.fullmatch(r"Swift[A-Za-z]+", rule["alert"])
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"]["summary"].endswith(".")
        assert re.fullmatch(r"\d+[mh]", rule.get("for", "1m"))


def test_panels_do_not_overlap() -> None:
    cells = [
        (x, y)
        for panel in panels()
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in panels()}) == len(panels())


def _serve_an_endpoint(told: Connection) -> None:
    told.send(Agent().endpoint.port)
    threading.Event().wait(_DEADLINE_S)
