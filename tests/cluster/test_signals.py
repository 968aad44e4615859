"""Signals: a worker's are its failure, a launcher's take its machine out of the run, and Ctrl-C ends it."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import (
    EXAMPLES,
    SLOW_UNTIL_TOLD,
    ClusterRun,
    assert_identical,
    run_cluster,
    training,
)
from tests.support.hosts import Hosts

SENDS_SIGNALS = Path(__file__).parent / "scripts" / "sends_signals.py"


def test_signals_to_a_worker_and_to_an_agent(
    tmp_path: Path, references: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both machines are replaced, and nothing else happens."""
    monkeypatch.setenv("PYTHONPATH", f"{EXAMPLES}:{os.environ.get('PYTHONPATH', '')}")
    orders = [
        {"rank": 1, "iteration": 4, "signal": "SIGINT", "to": "worker"},
        {"rank": 2, "iteration": 6, "signal": "SIGTERM", "to": "agent"},
    ]
    monkeypatch.setenv("SIGNALS", json.dumps(orders))
    run = run_cluster(tmp_path, script=training(tmp_path, SENDS_SIGNALS))
    assert_identical(run, references())
    assert [recovery["reasons"] for recovery in run.recoveries] == [
        ["worker 1 was killed by SIGINT"],
        ["stopped by SIGTERM"],
    ]
    assert "Traceback" not in run.output
    assert "KeyboardInterrupt" not in run.output


@pytest.mark.thorough
def test_a_stopped_launcher_hands_over_and_a_frozen_one_comes_back(
    hosts: Hosts, tmp_path_factory: pytest.TempPathFactory
) -> None:
    first, second = hosts.start("first", 0), hosts.start("second", 1)
    hosts.wait_for("iteration 10:", "second")
    hosts.start("third", 1)
    second.send_signal(signal.SIGTERM)
    hosts.wait_for("all are live, and go on with", "first")
    assert second.wait(timeout=60) == 128 + signal.SIGTERM
    assert hosts.output("second").endswith("\nswift-run: this machine left the run: stopped by SIGTERM\n")
    hosts.start("fourth", 0)
    os.killpg(first.pid, signal.SIGSTOP)
    hosts.wait_for("] machine 0 is lost: ", "third")
    os.killpg(first.pid, signal.SIGCONT)
    assert hosts.end() == {"first": 0, "second": 143, "third": 0, "fourth": 0}
    assert "] machine 1 is lost: stopped by SIGTERM" in hosts.output("first")
    folder = tmp_path_factory.mktemp("undisturbed")
    reference = run_cluster(folder, machines=2, script=training(folder, iterations=60))
    assert_identical(ClusterRun(hosts.folder, 0, "", {}), reference)


def test_ctrl_c_ends_the_run_on_all_hosts(hosts: Hosts) -> None:
    """In a terminal the whole process group gets the signal, the workers among it."""
    for node, name in enumerate(("first", "second")):
        hosts.start(name, node)
    hosts.wait_for("iteration 2:", "second")
    os.killpg(hosts.processes["first"].pid, signal.SIGINT)
    assert hosts.end() == {"first": 130, "second": 130}
    for name in ("first", "second"):
        assert hosts.output(name).splitlines()[-1] == "swift-run: stopped by SIGINT"
        assert hosts.output(name).count("SIGINT") == 1


def test_another_ctrl_c_on_all_hosts_leaves_no_store(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launchers end at once, while their workers do not end, and say nothing to the store."""
    monkeypatch.setenv("EXAMPLE", "outlives_signals")
    hosts.script = training(hosts.folder, SLOW_UNTIL_TOLD, iterations=60)
    for node, name in enumerate(("first", "second")):
        hosts.start(name, node)
    hosts.wait_for("iteration 2:", "second")
    viewer = ["--status", "hosts", "--rdzv-endpoint", hosts.endpoint]
    status = hosts.start_command("status", "swift_ft.cli.run", *viewer)
    hosts.wait_for("all workers start", "status")
    hosts.processes["first"].send_signal(signal.SIGINT)
    assert status.wait(60) == 0  # the journal says that the run has ended
    for name in ("first", "second"):
        hosts.processes[name].send_signal(signal.SIGINT)
    assert hosts.end() == {"first": 130, "second": 130, "status": 0}


@pytest.mark.thorough
def test_the_last_stopped_launcher_ends_the_run(hosts: Hosts) -> None:
    """A scheduler stops all of them: no store is left that waits for more machines."""
    for node, name in enumerate(("first", "second")):
        hosts.start(name, node)
    hosts.wait_for("iteration 2:", "second")
    for process in hosts.processes.values():
        process.send_signal(signal.SIGTERM)
    assert hosts.end() == {"first": 143, "second": 143}
