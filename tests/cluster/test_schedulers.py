"""A run on several hosts gets a machine from a scheduler, and gives it back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from swift_ft.cli.recover.main import main
from tests.support.cluster import SLOW_UNTIL_TOLD, ClusterRun, assert_identical, run_cluster, training
from tests.support.hosts import Hosts
from tests.support.waiting import wait_until

ITERATIONS = 30
SCHEDULER = """#!/bin/sh
echo "$1 $SWIFT_COUNT $SWIFT_MACHINES" >>{folder}/calls
if [ "$1" = ask ]; then eval "$SWIFT_LAUNCH" >{folder}/asked.txt 2>&1 & fi
"""


def test_a_lost_machine_is_asked_for_and_a_drained_one_is_given_back(
    hosts: Hosts, tmp_path: Path, tmp_path_factory: Any
) -> None:
    tool = tmp_path / "scheduler"
    tool.write_text(SCHEDULER.format(folder=tmp_path))
    tool.chmod(0o755)
    hosts.script = training(tmp_path, SLOW_UNTIL_TOLD, iterations=ITERATIONS)
    flags = ["--scheduler", f"command:{tool}", "--elastic-wait", "600"]
    hosts.start("first", 0, *flags)
    hosts.start("second", 1, *flags)
    hosts.wait_for("iteration 2:", "first", "second")
    second = hosts.processes.pop("second")
    second.kill()
    second.wait()
    hosts.wait_for("] machine 0 asks the scheduler for 1 machine", "first")
    wait_until(
        lambda: "iteration 5:" in (tmp_path / "asked.txt").read_text(), "an iteration of what was asked for"
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
