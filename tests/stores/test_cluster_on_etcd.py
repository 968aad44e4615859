"""A run whose rendezvous is in etcd, with all that its operators do to it, on one host and on several."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lib.etcd import EtcdCluster
from swift_ft.cli.recover.main import main
from tests.cluster import test_compaction
from tests.cluster.conftest import references as references
from tests.cluster.test_drain import LONG, Running
from tests.support.cluster import (
    SLOW_UNTIL_TOLD,
    ClusterRun,
    assert_clean,
    assert_identical,
    kill_processes_of,
    run_cluster,
    training,
)
from tests.support.hosts import Hosts

ITERATIONS = 30
"""Of a run that waits for a test."""


@pytest.fixture
def hosts(tmp_path: Path, etcd: EtcdCluster) -> Iterator[Hosts]:
    made = Hosts(tmp_path, ITERATIONS)
    made.endpoint = f"etcd-v3://{etcd.endpoints}"
    yield made
    kill_processes_of(tmp_path)
    for process in made.processes.values():
        process.wait(timeout=30)


@pytest.mark.thorough
def test_operators_reach_a_run_in_etcd(
    tmp_path: Path, etcd: EtcdCluster, references: Any, hosts: Hosts, capfd: pytest.CaptureFixture[str]
) -> None:
    """A machine is drained, the job goes on with fewer, somebody watches, and a command hears of it."""
    name, paged = tmp_path.name, tmp_path / "paged"
    flags = ["--rdzv-backend", "etcd-v3", "--rdzv-endpoint", etcd.endpoints, "--rdzv-id", name]
    running = Running(tmp_path, 1, *flags, "--on-event", f"cat >> {paged}", "--elastic-wait", "0")
    assert running.endpoint == f"etcd-v3://{etcd.endpoints}"
    at = ["--rdzv-endpoint", running.endpoint, "--rdzv-id", name]
    viewer = ["--status", name, "--rdzv-endpoint", running.endpoint]
    status = hosts.start_command("status", "swift_ft.cli.run", *viewer)
    assert main(["drain", "1", *at]) == 0
    assert capfd.readouterr().out.splitlines()[-1].endswith(" fills its slot")
    assert main(["scale", "3", "--same-workers", *at]) == 0
    assert capfd.readouterr().out.splitlines()[-1].startswith("the job goes on with 3 machines: ")
    run = running.end()
    assert_identical(run, references(*LONG))
    assert_clean(run)
    assert [recovery["slots"] for recovery in run.recoveries] == [[1], [3]]
    assert not any(lost for recovery in run.recoveries for lost in recovery["iterations_lost"].values())

    assert status.wait(60) == 0
    shown = hosts.output("status")
    assert "machine 1 leaves: it was drained" in shown, shown
    heard = [json.loads(line)["event"] for line in paged.read_text().splitlines()]
    assert heard.count("run_ended") == 1
    assert len(heard) > 1
    assert main(["drain", "1", *at]) == 2
    assert "has ended" in capfd.readouterr().err


def test_the_first_of_several_hosts_dies(hosts: Hosts, tmp_path_factory: pytest.TempPathFactory) -> None:
    """With etcd it is a machine as any other."""
    hosts.script = training(hosts.folder, SLOW_UNTIL_TOLD, iterations=ITERATIONS)
    name = ["--rdzv-id", hosts.folder.name]
    hosts.start("first", 0, *name)
    hosts.start("second", 1, *name)
    hosts.wait_for("iteration 2:", "first", "second")
    hosts.start("spare", 2, *name)
    hosts.wait_for("iteration 5:", "first", "second")
    first = hosts.processes.pop("first")
    first.kill()
    first.wait()
    hosts.wait_for("all are live", "second", "spare")
    (hosts.folder / "go").touch()
    assert hosts.end() == {"second": 0, "spare": 0}
    assert "] machine 0 is lost: " in hosts.output("second")
    folder = tmp_path_factory.mktemp("undisturbed")
    reference = run_cluster(folder, machines=2, script=training(folder, iterations=ITERATIONS))
    assert_identical(ClusterRun(hosts.folder, 0, "", {}), reference)


@pytest.mark.thorough  # `make test` runs it with the embedded store: tests/cluster/test_compaction.py
def test_machines_come_and_go_while_events_are_deleted(
    hosts: Hosts, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = test_compaction.run_with_a_short_journal(hosts, monkeypatch)
    test_compaction.check_archive(run)
    folder = tmp_path_factory.mktemp("undisturbed")
    whole = training(folder, iterations=test_compaction.ITERATIONS)
    assert_identical(run, run_cluster(folder, machines=2, script=whole))
