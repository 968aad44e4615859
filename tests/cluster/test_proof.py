"""A flipped bit is found at the next checkpoint boundary, and not trained over (``verify="digest"``)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import ClusterRun, assert_identical, one_line, run_cluster, training

SCRIPT = Path(__file__).parent / "scripts" / "flipped_bit.py"
SMALL = ["--layers=4", "--microbatches=4"]
LONG = ["--iterations=30"]


def run_flipped(
    folder: Path, monkeypatch: pytest.MonkeyPatch, inject: str = "", *args: str, **flip: Any
) -> ClusterRun:
    monkeypatch.setenv("FLIP", json.dumps(flip))
    return run_cluster(folder, *SMALL, *args, inject=inject, machines=2, script=training(folder, SCRIPT))


@pytest.mark.parametrize("field", [None, "exp_avg_sq"])
def test_replicas_that_differ_end_the_run(
    field: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One bit in one replica, in iteration 4; checkpoints are after iterations 2 and 5."""
    run = run_flipped(tmp_path, monkeypatch, example="train_ddp", rank=1, iteration=4, field=field)
    assert run.code == 1
    line = one_line(run)
    assert "replicas differ after iteration 5" in line
    assert "worker 1" in line
    assert "worker 0" in line
    assert ("exp_avg_sq of model." if field else " model.") in line
    assert not any(event["iteration"] > 3 for event in run.events("CheckpointCommitted"))


def test_without_the_proof_nobody_notices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test above would be worth if replicas were compared some other way."""
    arguments = {"verify": "none"}
    run = run_flipped(tmp_path, monkeypatch, example="train_ddp", rank=1, iteration=4, arguments=arguments)
    assert run.code == 0, run.output[-3000:]


def test_a_recovered_replica_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is flipped (there is no worker 9); the state comes from a replica, and boundaries follow."""
    fault = "kill machine=0 iteration=4 point=reducing"
    run = run_flipped(tmp_path, monkeypatch, fault, example="train_ddp", rank=9, iteration=0)
    assert run.code == 0, run.output[-3000:]
    assert [recovery["mode"] for recovery in run.recoveries] == ["replica"]


@pytest.mark.parametrize("iteration", [8, 5])
def test_a_rebuilt_state_that_differs_is_given_up(
    iteration: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lost worker had saved iteration 6 and not reported it. The replay passes that boundary, or two.

    The bit flips after the last replayed message before a boundary, so that no receipt can show it.
    """
    fault = "kill machine=0 iteration=6 point=checkpoint"
    flip: dict[str, Any] = {
        "example": "train_swift",
        "rank": 0,
        "iteration": iteration,
        "replayed": True,
        "fault": 6,
    }
    run = run_flipped(tmp_path, monkeypatch, fault, *LONG, **flip)
    (failed,) = run.events("ReplayFailed")
    assert f"worker 0 after iteration {iteration} is not what the lost worker had saved" in failed["reason"]
    assert run.recoveries[0]["mode"] == "restart"
    undisturbed = run_flipped(tmp_path / "undisturbed", monkeypatch, "", *LONG, **{**flip, "rank": 9})
    assert_identical(run, undisturbed)
