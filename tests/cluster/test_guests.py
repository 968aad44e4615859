"""No machine comes for a lost slot: a survivor runs it, too, and not one bit of the result changes."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import (
    SLOW_UNTIL_TOLD,
    ClusterRun,
    assert_clean,
    assert_identical,
    run_cluster,
    run_launcher,
    training,
)
from tests.support.hosts import Hosts

DROPOUT = ("--dropout", "0.2")
ALONE = ["--spares", "0", "--no-replacement", "--elastic-wait", "0.2"]

LONG = 30
"""Iterations. Until a test says go, they last longer than the start of a machine and a drain."""


def run_alone(folder: Path, *args: str, inject: str) -> ClusterRun:
    """Four machines without a spare, in whose place no other one is started."""
    return run_cluster(folder, *args, inject=inject, flags=ALONE)


def ways(run: ClusterRun) -> list[tuple[str, tuple[int, ...]]]:
    """How each recovery went back, and which slots were lost."""
    return [(recovery["mode"], tuple(recovery["slots"])) for recovery in run.recoveries]


def test_a_pipeline_goes_on_with_fewer_and_fewer_machines(tmp_path: Path, references: Any) -> None:
    """In the end one machine runs all four stages. The last loss takes two stages at once."""
    faults = [
        "kill machine=1 iteration=4 point=forward microbatch=3",
        "kill machine=2 iteration=5 point=backward microbatch=2",
        "kill machine=3 iteration=7 point=optimizer",
    ]
    run = run_alone(tmp_path, *DROPOUT, inject="; ".join(faults))
    assert_identical(run, references(*DROPOUT))
    assert_clean(run)
    modes, slots = zip(*ways(run), strict=True)
    assert set(modes) == {"replay"}, run.output[-3000:]
    # A machine that starts a guest may be silent for a second on a busy host, and is one more loss then.
    lost = [set(each) for each in slots]
    assert lost in ([{1}, {2}, {2, 3}], [{1}, {2, 3}, {3}]), run.output[-3000:]
    assert "machine 0 runs the workers of machine 1, too" in run.output
    assert "machine 3 runs the workers of machine 2, too" in run.output
    assert "machine 0 runs the workers of machine 3, too" in run.output


def test_a_machine_that_was_lost_too_often_is_left_out(tmp_path: Path, references: Any) -> None:
    """It is started again, and refused. No other one is there, so another machine runs its workers."""
    fault = "kill machine=1 iteration=4 point=forward microbatch=3"
    flags = ["--spares", "0", "--elastic-wait", "0.2", "--max-machine-failures", "1"]
    run = run_cluster(tmp_path, inject=fault, flags=flags)
    assert_identical(run, references())
    assert ways(run) == [("replay", (1,))], run.output[-3000:]
    assert "machine 0 runs the workers of machine 1, too" in run.output
    joined = [event for event in run.events("MachineJoined") if not event["host"]]
    (left_out,) = {event["identity"] for event in joined if event["preferred_slot"] == 1}
    said = f"machine {left_out} is left out: it was lost once in this run by its own fault"
    (refused,) = run.last_state().membership.refused.values()
    assert refused.startswith(said)
    (incident,) = run.report["incidents"]
    assert said in incident["advice"]
    assert run.output.count(said) >= 2, "the console says so, and whoever starts it again hears it"


def test_a_guest_alone_is_lost(tmp_path: Path, references: Any) -> None:
    """Its worker is killed, and its host takes another one."""
    faults = "kill machine=1 iteration=4 point=forward; kill worker=1 iteration=6 point=backward"
    run = run_alone(tmp_path, inject=faults)
    assert_identical(run, references())
    assert ways(run) == [("replay", (1,)), ("replay", (1,))], run.output[-3000:]


def test_the_host_lets_its_guest_end(tmp_path: Path) -> None:
    """A guest that was killed in its last write would leave a begun file of the journal in the store."""
    inject = "kill machine=1 iteration=4 point=forward microbatch=3"
    run = run_launcher("tests.cluster.scripts.slow_guests", tmp_path, inject=inject, machines=2, flags=ALONE)
    assert "machine 0 runs the workers of machine 1, too" in run.output


@pytest.mark.thorough
def test_the_first_machine_is_lost(tmp_path: Path, references: Any) -> None:
    run = run_alone(tmp_path, inject="kill machine=0 iteration=5 point=backward microbatch=1")
    assert_identical(run, references())
    assert ways(run) == [("replay", (0,))], run.output[-3000:]


def reference_of(factory: pytest.TempPathFactory, machines: int) -> ClusterRun:
    folder = factory.mktemp("undisturbed")
    return run_cluster(folder, machines=machines, script=training(folder, iterations=LONG))


def test_a_guest_is_not_checked(tmp_path: Path) -> None:
    """Its host has passed, and the checks would take devices from survivors who wait for the guest."""
    checks = ["--health-checks", "tests.support.health:noted_and_good_twice"]
    fault = "kill machine=1 iteration=4 point=forward microbatch=1"
    run = run_cluster(tmp_path, machines=2, inject=fault, flags=[*ALONE, *checks])
    assert run.code == 0, run.output[-3000:]
    assert [slots for _, slots in ways(run)] == [(1,)]
    assert "machine 0 runs the workers of machine 1, too" in run.output
    assert len({*(tmp_path / "checked").read_text().splitlines()}) == 2
    assert not run.events("HealthCheckFailed")


def start(hosts: Hosts, name: str, node: int, nodes: str, *more: str) -> None:
    hosts.start(name, node, "--nnodes", nodes, "--elastic-wait", "0.5", *more)


def test_a_machine_that_comes_relieves_a_guest(
    hosts: Hosts, tmp_path_factory: pytest.TempPathFactory
) -> None:
    hosts.script = training(hosts.folder, SLOW_UNTIL_TOLD, iterations=LONG)
    events = hosts.folder / "events.json"
    start(hosts, "first", 0, "2", "--events-out", str(events))
    start(hosts, "second", 1, "2")
    hosts.wait_for("iteration 4:", "second")
    second = hosts.processes.pop("second")
    second.kill()
    second.wait()
    hosts.wait_for("machine 0 runs the workers of machine 1, too", "first")
    hosts.wait_for("all are live", "first")
    start(hosts, "third", 1, "2")
    hosts.wait_for("machine 1 leaves: it was a guest", "first")
    (hosts.folder / "go").touch()
    assert hosts.end() == {"first": 0, "third": 0}
    assert f"[machine 1] iteration {LONG - 1}:" in hosts.output("third")
    assert_identical(ClusterRun(hosts.folder, 0, "", {}), reference_of(tmp_path_factory, 2))


@pytest.mark.thorough
def test_a_job_begins_with_fewer_machines(hosts: Hosts) -> None:
    """Two to three are allowed, and two come. One of them is stopped later: fewer than two are too few."""
    hosts.script = training(hosts.folder, SLOW_UNTIL_TOLD, iterations=LONG)
    start(hosts, "first", 0, "2:3", "--join-timeout", "25")
    start(hosts, "second", 1, "2:3", "--join-timeout", "25")
    hosts.wait_for("iteration 5:", "first", "second")  # one of them hosts the last stage
    hosts.processes["second"].send_signal(signal.SIGTERM)
    assert hosts.end() == {"first": 1, "second": 143}
    output = hosts.output("first")
    assert "no machine joined for slots" in output
    assert "within 25 s, and fewer than 2 machines are left" in output
