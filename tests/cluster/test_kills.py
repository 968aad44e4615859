"""A machine is killed anywhere in an iteration; the weights are an undisturbed run's (paper §3, §5.1)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import assert_clean, assert_identical, run_cluster

POINTS = {
    "warm-up forward": "iteration=5 point=forward microbatch=0",
    "steady state": "iteration=5 point=backward microbatch=3",
    "cooldown backward": "iteration=5 point=backward microbatch=7",
    "inside the optimizer": "iteration=5 point=optimizer",
    "between iterations": "iteration=4 point=between",
    "while a checkpoint is committed": "iteration=6 point=checkpoint",
}


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("point", POINTS)
def test_kill(point: str, stage: int, tmp_path: Path, references: Any) -> None:
    run = run_cluster(tmp_path, inject=f"kill machine={stage} {POINTS[point]}")
    assert_identical(run, references())
    assert_clean(run)
    assert len(run.events("FaultInjected")) == 1
    (recovery,) = run.recoveries
    assert recovery["mode"] == "replay"
    assert recovery["slots"] == [stage]
    assert not any(recovery["iterations_lost"].values())
    assert set(recovery["replayed_iterations"]) <= {str(stage)}


SCHEDULES = ["GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stage", [0, 2])
def test_schedules(schedule: str, stage: int, tmp_path: Path, references: Any) -> None:
    """Every schedule of torch; in all but GPipe each worker has two stages."""
    fault = f"kill machine={stage} iteration=5 point=forward microbatch=4"
    run = run_cluster(tmp_path, "--schedule", schedule, inject=fault)
    assert_identical(run, references("--schedule", schedule))
    assert run.recoveries[0]["mode"] == "replay"
    assert "Full Schedule" not in run.output


def test_dropout(tmp_path: Path, references: Any) -> None:
    """Random state is derived, so a replay draws what the original drew."""
    run = run_cluster(
        tmp_path, "--dropout", "0.2", inject="kill machine=1 iteration=5 point=backward microbatch=2"
    )
    assert_identical(run, references("--dropout", "0.2"))
    assert run.recoveries[0]["mode"] == "replay"
