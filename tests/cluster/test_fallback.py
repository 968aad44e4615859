"""Where the log is of no use, all workers return to the last checkpoint, and the report says why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from swift_ft.checkpoint.folder import CheckpointFolder
from swift_ft.offline.checkpoint_check import verify_checkpoint
from swift_ft.storage.store import Store
from tests.support.cluster import (
    CHECKPOINT_EVERY,
    ClusterRun,
    assert_clean,
    assert_identical,
    one_line,
    run_cluster,
    training,
)
from tests.support.damage import flip

DAMAGED = Path(__file__).parent / "scripts" / "damaged_log.py"
TALKATIVE = Path(__file__).parent / "scripts" / "talkative.py"
FAULT = "kill machine=1 iteration=5 point=forward microbatch=3"


def run_damaged(folder: Path, damage: str, monkeypatch: pytest.MonkeyPatch) -> ClusterRun:
    monkeypatch.setenv("DAMAGE", damage)
    alone = ["--helpers", "0"]  # a helper reads the same log, and may be the first to find the damage
    return run_cluster(folder, inject=FAULT, script=training(folder, DAMAGED), flags=alone)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ("flip", "does not match its checksum"),
        ("truncate", "has no footer"),
        ("delete", "is not in the log"),
        ("double", "it was renamed"),
        ("foreign", "belongs to run 'another run'"),
    ],
)
def test_damaged_log(
    damage: str, reason: str, tmp_path: Path, references: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_damaged(tmp_path, damage, monkeypatch)
    assert_identical(run, references())
    assert_clean(run)
    (recovery,) = run.recoveries
    assert recovery["mode"] == "fallback"
    assert recovery["resume"] == CHECKPOINT_EVERY
    assert reason in recovery["reason"]
    assert "worker 1 cannot replay" in recovery["reason"]
    assert any(recovery["iterations_lost"].values())


def test_a_replay_that_diverges(tmp_path: Path, references: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What processes keep beside their states may be what differs: all begin anew."""
    run = run_damaged(tmp_path, "diverge", monkeypatch)
    assert_identical(run, references())
    assert_clean(run)
    (recovery,) = run.recoveries
    assert (recovery["mode"], recovery["resume"]) == ("restart", CHECKPOINT_EVERY)
    assert "worker 1 cannot replay: The replay diverged at iteration 3, microbatch 0" in recovery["reason"]
    assert any(recovery["iterations_lost"].values())
    assert run.last_plan().mode == "start"


def test_a_log_that_cannot_be_written_any_more(
    tmp_path: Path, references: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its worker trains on. The next replay does not count on that log: the worker goes back and joins in."""
    monkeypatch.setenv("DAMAGE", "writer")
    second = "kill machine=2 iteration=6 point=backward microbatch=3"  # its replay reads the log of worker 1
    run = run_cluster(tmp_path, inject=second, script=training(tmp_path, DAMAGED))
    assert_identical(run, references())
    assert_clean(run)
    assert "Worker 1 trains on without a log, which cannot be written (OSError: [Errno 5]" in run.output
    assert [recovery["mode"] for recovery in run.recoveries] == ["replay"]
    assert [recovery["slots"] for recovery in run.recoveries] == [[2]]


@pytest.mark.parametrize(("damage", "finder", "victim"), [("checkpoint", 1, 1), ("diverge-checkpoint", 2, 2)])
def test_a_damaged_checkpoint(
    damage: str, finder: int, victim: int, tmp_path: Path, references: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All workers return to the older one. That holds for survivors, too, which a divergence sends back."""
    run = run_damaged(tmp_path, damage, monkeypatch)
    assert_identical(run, references())
    named = f"the checkpoint of iteration {CHECKPOINT_EVERY} is damaged: the file __0_0.distcp does not match"
    assert named in run.output
    assert f"rank-{victim:05d}" in run.output
    (recovery,) = run.recoveries
    assert (recovery["mode"], recovery["resume"]) == ("fallback", 0)
    assert f"worker {finder}: {named}" in recovery["reason"]
    assert set(run.last_plan().tasks) == {0, 1, 2, 3}
    committed = CheckpointFolder(Store(str(run.store)))
    assert all(verify_checkpoint(committed, iteration).intact for iteration in committed.committed())


def test_no_intact_checkpoint_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else can restore the state: the job says so, and ends."""
    run = run_damaged(tmp_path, "part", monkeypatch)
    assert run.code == 1
    assert "the checkpoint of iteration 3 is damaged: the file digests.json is gone" in run.output
    assert "no intact checkpoint is left: worker 1: the checkpoint of iteration 0 is damaged" in one_line(run)
    incident = run.report["incidents"][-1]
    assert (incident["cause"], incident["way"]) == ("store", "the run ended")
    assert "(cause: store): " in run.output


def test_resume_with_damaged_checkpoints(tmp_path: Path, references: Any) -> None:
    """The newest is damaged: the older one is used. Both are: nobody trains from the beginning unasked."""
    assert run_cluster(tmp_path, "--iterations", "6").code == 0
    spoil(tmp_path, 6)
    resumed = run_cluster(tmp_path, flags=["--resume"])
    assert_identical(resumed, references())
    assert "the checkpoint of iteration 6 is damaged: the file __0_0.distcp does not match" in resumed.output
    (recovery,) = resumed.recoveries
    assert recovery["resume"] == CHECKPOINT_EVERY
    for iteration in (3, 6):
        spoil(tmp_path, iteration)
    ended = run_cluster(tmp_path, flags=["--resume"])
    assert ended.code == 1
    assert "the checkpoint of iteration 6 is damaged" in ended.output
    assert "no intact checkpoint is left: worker 2: the checkpoint of iteration 3 is damaged" in one_line(
        ended
    )


def spoil(folder: Path, iteration: int) -> None:
    """Flips one bit of worker 2's part of a committed checkpoint."""
    store = CheckpointFolder(Store(str(folder / "store")))
    flip(folder / "store" / store.part_of(iteration, 2).path / "__0_0.distcp")


def test_communication_after_the_update(tmp_path: Path, references: Any) -> None:
    """A step interrupted between its update and its end cannot be completed, undone or replayed alone."""
    run = run_cluster(
        tmp_path,
        inject="kill machine=1 iteration=5 point=optimizer",
        script=training(tmp_path, TALKATIVE),
    )
    assert_identical(run, references())
    assert run.recoveries[0]["mode"] == "restart"
    assert "keep communication before the optimizer's step" in run.recoveries[0]["reason"]


def test_an_undo_that_rounds(tmp_path: Path, references: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The iteration is in the logs twice, and unlike. Once a checkpoint covers it, logs count again."""
    monkeypatch.setenv("WRAPPED", "1")
    script = [*training(tmp_path, TALKATIVE), "--checkpoint-every", "20", "--iterations", "14"]
    first = "kill machine=1 iteration=5 point=optimizer"
    second = "kill machine=1 iteration=11 committed=6 point=forward microbatch=3"
    run = run_cluster(tmp_path, inject=f"{first}; {second}", script=script)
    assert run.code == 0, run.output[-3000:]
    assert any(
        "undone with other roundings" in event["reason"] for event in run.events("CheckpointRequested")
    )
    assert [recovery["mode"] for recovery in run.recoveries] == ["replay", "replay"]


def test_a_loss_soon_after_an_undo_that_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before that checkpoint, nobody replays what is in the logs twice: all go back in place."""
    monkeypatch.setenv("WRAPPED", "1")
    script = [*training(tmp_path, TALKATIVE), "--checkpoint-every", "20"]
    first = "kill machine=1 iteration=5 point=optimizer"
    second = "kill machine=1 iteration=6 point=forward microbatch=3"
    run = run_cluster(tmp_path, inject=f"{first}; {second}", script=script)
    assert run.code == 0, run.output[-3000:]
    assert [recovery["mode"] for recovery in run.recoveries] == ["replay", "fallback"]
