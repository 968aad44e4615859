"""Failures during recoveries, many failures, too many, and what they leave behind (paper, Appendix B)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from harness import KILLS_OTHERS, ClusterRun, assert_identical, at_once, one_line, run_cluster, training

MID = "iteration=5 point=forward microbatch=3"
COUNTS = Path(__file__).parent / "scripts" / "counts.py"


def assert_replays(run: ClusterRun, slots: list[int]) -> None:
    """Two recoveries, since the first one was done when a group was to be formed; nobody went back."""
    assert [recovery["way"] for recovery in run.recoveries] == ["replay", "replay"]
    assert sorted(slot for recovery in run.recoveries for slot in recovery["slots"]) == slots
    assert not any(any(recovery["iterations_lost"].values()) for recovery in run.recoveries)
    assert not run.events("Interrupted")  # nobody waited in vain


@pytest.mark.parametrize(("slot", "helpers"), [(0, 9), (1, 0)])
def test_who_is_recovered_fails_in_each_phase(
    slot: int, helpers: int, tmp_path: Path, references: Any
) -> None:
    """The same machine again and again: when it should report, load, replay, and form the new group.

    As the machine of worker 0, who commits checkpoints, also together with one of its helpers.
    """
    points = ["iteration=0 point=report", "iteration=3 point=load", "iteration=4 point=replay"]
    faults = [f"kill machine={slot} {point}" for point in (MID, *points, "iteration=5 point=join")]
    faults += ["kill machine=3 iteration=4 point=help"] if helpers else []
    run = run_cluster(tmp_path, inject="; ".join(faults), flags=["--helpers", str(helpers)])
    assert_identical(run, references())
    assert len(run.events("Injected")) == len(faults)
    assert_replays(run, [slot] * 5 + [3] * bool(helpers))


def test_survivors_fail_in_each_phase(tmp_path: Path, references: Any) -> None:
    """One before there is a replacement, one before it has reported, one when all others form their group:
    in the end nobody is left of those who saw the first failure."""
    faults = [
        f"kill machine=1 {MID}",
        "kill machine=3 iteration=5 point=leave",
        "kill machine=2 iteration=5 point=report",
        "kill machine=0 iteration=5 point=join",
    ]
    run = run_cluster(tmp_path, inject="; ".join(faults), flags=["--spares", "0"])
    assert_identical(run, references())
    assert len(run.events("Injected")) == len(faults)
    assert_replays(run, [0, 1, 2, 3])


def test_survivors_do_not_grow(tmp_path: Path, references: Any) -> None:
    """The same machine is lost five times, and those who live help each time: after the last recovery they
    have open what they had after the second one."""
    faults = "; ".join(f"kill machine=1 iteration={i} point=forward microbatch=3" for i in range(2, 7))
    run = run_cluster(tmp_path, inject=faults, flags=["--helpers", "9"], script=training(tmp_path, COUNTS))
    assert_identical(run, references())
    assert [recovery["slots"] for recovery in run.recoveries] == [[1]] * 5
    assert [recovery["helpers"] for recovery in run.recoveries[2:4]] == [[0, 2, 3]] * 2
    for rank in (0, 2, 3):
        lines = [json.loads(line) for line in (tmp_path / f"counts{rank}.jsonl").read_text().splitlines()]
        assert len({line["pid"] for line in lines}) == 1
        assert {line["groups"] for line in lines} == {1}
        for what in ("descriptors", "threads"):
            second, last = (
                min(line[what] for line in lines if line["generation"] == generation) for generation in (3, 6)
            )
            # What is being written at the moment may have one more open; a leak would have three by now.
            assert last < second + 3, lines


def test_more_failures_than_allowed(tmp_path: Path, references: Any) -> None:
    """A clear stop, from which --resume goes on.

    A commit in between would forgive the first loss; the third one makes sure that it is too many then.
    """
    points = [MID, "iteration=0 point=report", "iteration=3 point=load"]
    faults = "; ".join(f"kill machine=1 {point}" for point in points)
    run = run_cluster(tmp_path, inject=faults, flags=["--max-failures", "1"])
    assert run.code == 1
    assert "2 machines were lost since the last checkpoint, more than the limit of 1" in one_line(run)
    (run.store / "probe.0123.tmp").touch()  # as a worker leaves it that is killed when it tries the store
    resumed = run_cluster(tmp_path, flags=["--resume"])  # which leaves no temporary file in the end
    assert_identical(resumed, references())
    assert not resumed.recoveries


def test_the_rendezvous_store_is_lost(
    tmp_path: Path, references: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What all agree through is outside of all machines; without it nobody can go on, and that is said."""
    monkeypatch.setenv("KILLS", at_once("store", by=2))
    run = run_cluster(tmp_path, script=training(tmp_path, KILLS_OTHERS))
    assert run.code == 1
    assert "The rendezvous store died" in run.output
    assert_identical(run_cluster(tmp_path, flags=["--resume"]), references())
