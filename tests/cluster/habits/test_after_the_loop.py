"""What a script does after its loop: nobody judges it by heartbeats, and a loss there is said as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cluster import one_line
from tests.support.habits import run_habit

SCRIPT = Path(__file__).parent / "scripts" / "after_the_loop.py"


def exported(folder: Path) -> set[str]:
    return {path.name for path in (folder / "out").glob("*.pt")}


def test_a_loss_after_the_last_iteration_says_what_resume_does(tmp_path: Path) -> None:
    """And ``--resume`` does it, on all machines."""
    run = run_habit(tmp_path, SCRIPT, "dies")
    assert run.code == 1, run.output[-3000:]
    line = one_line(run)
    assert "worker 1 was killed by SIGKILL. Training is complete; what its script does after the" in line
    assert "--resume begins from the checkpoint at iteration " in line
    assert "rank1.pt" not in exported(tmp_path)
    again = run_habit(tmp_path, SCRIPT, "dies", flags=["--resume"])
    assert again.code == 0, again.output[-3000:]
    assert exported(tmp_path) == {"rank0.pt", "rank1.pt"}


@pytest.mark.parametrize("habit", ["holds", pytest.param("breaks", marks=pytest.mark.thorough)])
def test_who_has_left_the_loop_may_be_silent(habit: str, tmp_path: Path) -> None:
    run = run_habit(tmp_path, SCRIPT, habit, flags=["--heartbeat-timeout", "1"])
    assert run.code == 0, run.output[-3000:]
    assert not run.events("MachineLost")
    assert exported(tmp_path) == {"rank0.pt", "rank1.pt"}


@pytest.mark.parametrize("habit", ["leaves", pytest.param("exits", marks=pytest.mark.thorough)])
def test_a_checkpoint_that_is_on_its_way_is_committed(habit: str, tmp_path: Path) -> None:
    """The store is away as the script leaves its loop. The iteration that it leaves in does not count."""
    run = run_habit(tmp_path, SCRIPT, habit, inject="vanish worker=0 iteration=5 point=optimizer seconds=3")
    assert run.code == 0, run.output[-3000:]
    assert run.events("CheckpointCommitted")[-1]["iteration"] == 6
    assert run.output.count("has left its loop in iteration 6, which does not count") == 2
    assert "is not committed" not in run.output
