"""Where the log is of no use, everybody returns to the last checkpoint, and the report says why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness import CHECKPOINT_EVERY, ClusterRun, assert_clean, assert_identical, run_cluster, training

DAMAGED = Path(__file__).parent / "scripts" / "damaged_log.py"
TALKATIVE = Path(__file__).parent / "scripts" / "talkative.py"
FAULT = "kill machine=1 iteration=5 point=forward microbatch=3"


def run_damaged(folder: Path, damage: str, monkeypatch: pytest.MonkeyPatch) -> ClusterRun:
    monkeypatch.setenv("DAMAGE", damage)
    return run_cluster(folder, inject=FAULT, script=training(folder, DAMAGED))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ("flip", "does not match its checksum"),
        ("truncate", "has no footer"),
        ("delete", "is not in the log"),
        ("double", "it was renamed"),
        ("foreign", "belongs to run 'another run'"),
        ("diverge", "The replay diverged at iteration 3, microbatch 0"),
    ],
)
def test_damaged_log(
    damage: str, reason: str, tmp_path: Path, references: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_damaged(tmp_path, damage, monkeypatch)
    assert_identical(run, references())
    assert_clean(run)
    (recovery,) = run.recoveries
    assert recovery["way"] == "fallback"
    assert recovery["resume"] == CHECKPOINT_EVERY
    assert reason in recovery["reason"]
    assert "worker 1 cannot replay" in recovery["reason"]
    assert any(recovery["iterations_lost"].values())


def test_a_log_that_cannot_be_written_any_more(
    tmp_path: Path, references: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its worker ends and is replaced; what it had not written is sent, and logged, again."""
    monkeypatch.setenv("DAMAGE", "writer")
    second = "kill machine=2 iteration=6 point=backward microbatch=3"  # which the log of worker 1 serves
    run = run_cluster(tmp_path, inject=second, script=training(tmp_path, DAMAGED))
    assert_identical(run, references())
    assert_clean(run)
    assert "worker 1 ends here, to be replaced: its log could not be written (OSError" in run.output
    assert [recovery["way"] for recovery in run.recoveries] == ["replay", "replay"]
    assert [recovery["slots"] for recovery in run.recoveries] == [[1], [2]]


def test_a_part_of_the_checkpoint_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No way is left; the job says so, and ends."""
    run = run_damaged(tmp_path, "part", monkeypatch)
    assert run.code == 1
    assert "cannot load the checkpoint of iteration 3" in run.output
    assert "Traceback" not in run.output


def test_communication_after_the_update(tmp_path: Path, references: Any) -> None:
    """A step that was cut off between its update and its end is neither done nor undone; nor can it be
    replayed without peers."""
    run = run_cluster(
        tmp_path,
        inject="kill machine=1 iteration=5 point=optimizer",
        script=training(tmp_path, TALKATIVE),
    )
    assert_identical(run, references())
    assert run.recoveries[0]["way"] == "fallback"
    assert "keep communication before the optimizer's step" in run.recoveries[0]["reason"]
