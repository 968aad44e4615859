"""A run on several hosts gets a machine from a scheduler, and gives it back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from swift_ft.cli.recover.main import main
from tests.cluster.test_unlike_worlds import assert_same_state, options, train
from tests.support.cluster import (
    SLOW_UNTIL_TOLD,
    ClusterRun,
    assert_identical,
    processes_of,
    run_cluster,
    training,
)
from tests.support.hosts import Hosts
from tests.support.waiting import wait_until

ITERATIONS, LONG, LATE = 30, 100, 6
SCHEDULER = """#!/bin/sh
echo "$1 $SWIFT_COUNT $SWIFT_MACHINES" >>{folder}/calls
if [ "$1" != ask ]; then exit; fi
(
    exec >{folder}/asked.txt 2>&1
    until [ -e {folder}/come ]; do sleep 0.1; done
    eval "$SWIFT_LAUNCH"
) &
"""


def scheduler(folder: Path) -> Path:
    """A scheduler that gives the machines that it is asked for, once the file ``come`` is there."""
    tool = folder / "scheduler"
    tool.write_text(SCHEDULER.format(folder=folder))
    tool.chmod(0o755)
    return tool


def test_a_lost_machine_is_asked_for_and_a_drained_one_is_given_back(
    hosts: Hosts, tmp_path: Path, tmp_path_factory: Any
) -> None:
    tool = scheduler(tmp_path)
    (tmp_path / "come").touch()
    hosts.script = training(tmp_path, SLOW_UNTIL_TOLD, iterations=ITERATIONS)
    flags = ["--scheduler", f"command:{tool}", "--elastic-wait", "600"]
    hosts.start("first", 0, *flags)
    hosts.start("second", 1, *flags)
    hosts.wait_for("iteration 2:", "first", "second")
    second = hosts.processes.pop("second")
    second.kill()
    second.wait()
    hosts.wait_for("] machine 0 asks the scheduler for 1 machine", "first")
    asked_for = tmp_path / "asked.txt"  # the scheduler is called once that was announced
    wait_until(
        lambda: asked_for.exists() and "iteration 5:" in asked_for.read_text(),
        "an iteration of what was asked for",
    )
    hosts.start("spare", 2, *flags)
    at = ["--rdzv-endpoint", hosts.endpoint, "--rdzv-id", "hosts"]
    assert main(["drain", "1", *at]) == 0
    (tmp_path / "go").touch()
    assert hosts.end() == {"first": 0, "spare": 0}
    asked, given = (tmp_path / "calls").read_text().splitlines()
    assert asked == "ask 1 "
    assert given.startswith("give-back 1 m-")
    folder = tmp_path_factory.mktemp("undisturbed")
    reference = run_cluster(folder, machines=2, script=training(folder, iterations=ITERATIONS))
    assert_identical(ClusterRun(tmp_path, 0, "", {}), reference)


def test_a_job_that_a_loss_made_smaller_asks_once_and_grows_back(
    hosts: Hosts, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two pipelines of one stage, and one is lost. What is asked for comes once the other one goes on."""
    tool, samples = scheduler(tmp_path), tmp_path / "samples"
    monkeypatch.setenv("EXAMPLE", "shared_batches")
    monkeypatch.setenv("QUICK", str(LONG))
    monkeypatch.setenv("SAMPLE_LOG", str(samples))
    hosts.script = [str(SLOW_UNTIL_TOLD), *options(tmp_path, iterations=LONG)]
    flags = ["--scheduler", f"command:{tool}", "--elastic-wait", "1", "--on-loss", "shrink"]
    hosts.start("first", 0, *flags)
    hosts.start("second", 1, *flags)
    wait_until(lambda: any(f'"iteration": {LATE}' in log.read_text() for log in samples.glob("*")), "some")
    second = hosts.processes.pop("second")
    second.kill()
    second.wait()
    hosts.wait_for("] machine 0 asks the scheduler for 1 machine", "first")
    hosts.wait_for(": back after", "first")
    (tmp_path / "come").touch()
    hosts.wait_for("machines have come for lost ones: 2 train then", "first")
    hosts.wait_for("all are live in world 2", "first")
    (tmp_path / "go").touch()
    assert hosts.end() == {"first": 0}
    wait_until(lambda: not processes_of(tmp_path), "the end of what was asked for")
    assert (tmp_path / "calls").read_text().splitlines() == ["ask 1 "]
    undisturbed = train(tmp_path_factory.mktemp("undisturbed"), machines=2, iterations=LONG)
    assert_same_state(ClusterRun(tmp_path, 0, "", {}), undisturbed)
