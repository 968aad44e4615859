"""Failures during recoveries, many failures, too many failures, and their remains (paper, Appendix B)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import (
    KILLS_IN_TURN,
    ClusterRun,
    assert_identical,
    assert_reported_once,
    at_once,
    in_turn,
    one_line,
    run_cluster,
    training,
)

MID = "iteration=5 point=forward microbatch=3"
COUNTS = Path(__file__).parent / "scripts" / "counts.py"
LOSES_ITS_STORE = Path(__file__).parent / "scripts" / "loses_its_store.py"


def assert_replays(run: ClusterRun, slots: list[int], count: int) -> None:
    """So many recoveries, and no worker rolled back."""
    assert [recovery["mode"] for recovery in run.recoveries] == ["replay"] * count
    assert sorted(slot for recovery in run.recoveries for slot in recovery["slots"]) == slots
    assert not any(any(recovery["iterations_lost"].values()) for recovery in run.recoveries)
    assert not run.events("CommunicationFailed")  # no worker waited in vain


@pytest.mark.parametrize(
    ("slot", "point", "helpers", "recoveries"),
    [
        (0, "iteration=3 point=load", 9, 1),
        (1, "iteration=4 point=replay", 0, 1),
        (1, "iteration=5 point=join", 0, 2),  # the first one was complete when the group formed
    ],
)
def test_the_recovered_machine_fails_again(
    slot: int, point: str, helpers: int, recoveries: int, tmp_path: Path, references: Any
) -> None:
    """The same machine fails when it should report, and then when it loads, replays, or forms the new group.

    Also the machine of worker 0, which commits checkpoints, together with one of its helpers.
    """
    faults = [f"kill machine={slot} {point}" for point in (MID, "iteration=0 point=report", point)]
    faults += ["kill machine=3 iteration=4 point=help"] if helpers else []
    run = run_cluster(tmp_path, inject="; ".join(faults), flags=["--helpers", str(helpers)])
    assert_identical(run, references())
    assert len(run.events("FaultInjected")) == len(faults)
    assert_replays(run, [slot] * 3 + [3] * bool(helpers), recoveries)


@pytest.mark.thorough
def test_the_recovered_machine_fails_twice(tmp_path: Path, references: Any) -> None:
    """Then another way back is taken: all return to the checkpoint, and nothing is wrong."""
    points = (MID, "iteration=3 point=load", "iteration=4 point=replay")
    run = run_cluster(tmp_path, inject="; ".join(f"kill machine=1 {point}" for point in points))
    assert_identical(run, references())
    (recovery,) = run.recoveries
    assert recovery["mode"] == "fallback"
    assert "failed twice" in recovery["reason"]


def test_survivors_fail_in_each_phase(tmp_path: Path, references: Any) -> None:
    """One before there is a replacement, one before it has reported, one when all others form their group.

    In the end no machine is left that saw the first failure.
    """
    faults = [
        f"kill machine=1 {MID}",
        "kill machine=3 iteration=5 point=leave",
        "kill machine=2 iteration=5 point=report",
        "kill machine=0 iteration=5 point=join",
    ]
    run = run_cluster(tmp_path, inject="; ".join(faults), flags=["--spares", "0"])
    assert_identical(run, references())
    assert len(run.events("FaultInjected")) == len(faults)
    assert_replays(run, [0, 1, 2, 3], 2)


@pytest.mark.parametrize("spares", [3, 0])
def test_machines_that_are_lost_in_turn_cost_one_report_of_each_survivor(
    spares: int, tmp_path: Path, references: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of six machines, each when all survivors have reported the loss of the one before."""
    lost = (1, 2, 4)
    monkeypatch.setenv("KILLS", in_turn(*lost))
    script = training(tmp_path, KILLS_IN_TURN)
    run = run_cluster(tmp_path, machines=6, flags=["--spares", str(spares)], script=script)
    assert_identical(run, references(machines=6))
    assert_replays(run, [*lost], 1)
    assert_reported_once(run, 0, 3, 5)


@pytest.mark.thorough
def test_survivors_do_not_grow(tmp_path: Path, references: Any) -> None:
    """The same machine is lost five times, and the survivors help each time.

    After the last recovery they have as many descriptors and threads as after the second one.
    """
    faults = "; ".join(f"kill machine=1 iteration={i} point=forward microbatch=3" for i in range(2, 7))
    run = run_cluster(tmp_path, inject=faults, flags=["--helpers", "9"], script=training(tmp_path, COUNTS))
    assert_identical(run, references())
    assert [recovery["slots"] for recovery in run.recoveries] == [[1]] * 5
    assert [recovery["helpers"] for recovery in run.recoveries[2:4]] == [[0, 2, 3]] * 2
    for rank in (0, 2, 3):
        lines = [json.loads(line) for line in (tmp_path / f"counts{rank}.jsonl").read_text().splitlines()]
        assert len({line["pid"] for line in lines}) == 1
        assert {line["groups"] for line in lines} == {2}  # the script's handle, and the one beneath it
        for what in ("descriptors", "threads"):
            second, last = (
                min(line[what] for line in lines if line["generation"] == generation) for generation in (3, 6)
            )
            # A file that is being written adds one descriptor; a leak would have added three by now.
            assert last < second + 3, lines


def test_more_failures_than_allowed(tmp_path: Path, references: Any) -> None:
    """The job stops with a clear message, and --resume continues it.

    A commit in between would reset the count of losses; the third loss is one too many even then.
    """
    points = [MID, "iteration=0 point=report", "iteration=3 point=load"]
    faults = "; ".join(f"kill machine=1 {point}" for point in points)
    run = run_cluster(tmp_path, inject=faults, flags=["--max-failures", "1"])
    assert run.code == 1
    assert "2 machines were lost since the last checkpoint, more than the limit of 1" in one_line(run)
    (run.store / "probe.0123.tmp").touch()  # left by a worker that was killed while it tried the store
    resumed = run_cluster(tmp_path, flags=["--resume"])  # leaves no temporary file
    assert_identical(resumed, references())
    assert not resumed.recoveries


def test_a_replacement_needs_the_store_of_another_one_that_dies(
    tmp_path: Path, references: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch would try to reach the store for as long as the script's process group may take to form."""
    monkeypatch.setenv("KILLS", at_once(1, 2, by=0))
    run = run_cluster(tmp_path, flags=["--spares", "0"], script=training(tmp_path, LOSES_ITS_STORE))
    assert_identical(run, references())
    assert any(
        "init_process_group needs a store that was lost" in event["reason"]
        for event in run.events("MachineLost")
    )
