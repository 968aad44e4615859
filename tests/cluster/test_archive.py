"""The archive of the journal has all events of a run, whoever is lost and however it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from swift_ft.errors import UsageError
from swift_ft.offline.archive import ArchivedJournal, read_journal
from swift_ft.offline.loss import LossPlanner
from swift_ft.offline.run_store import open_run_store
from swift_ft.offline.status import run_status
from swift_ft.recovery import events as ev
from swift_ft.recovery.entries import Entry, entry_from_dict
from swift_ft.recovery.job_state import Phase
from tests.support.cluster import (
    CHECKPOINT_EVERY,
    DEADLINE_S,
    ClusterRun,
    command,
    processes_of,
    run_cluster,
    training,
)
from tests.support.waiting import wait_until


def archived(run: ClusterRun) -> ArchivedJournal:
    opened = open_run_store(str(run.store))
    return read_journal(opened.store, opened.run_id)


def up_to_the_end(run: ClusterRun) -> tuple[Entry, ...]:
    """The events up to the one that ends the job. Agents may add some that change nothing."""
    entries = tuple(entry_from_dict(data) for data in run.report["events"])
    changes = ArchivedJournal("", entries, ()).changes()
    last = next(change.entry.position for change in changes if change.after.verdict)
    return entries[: last + 1]


@pytest.mark.parametrize("victim", [1, 0])
def test_a_machine_is_killed(victim: int, tmp_path: Path) -> None:
    """Worker 0 archives, and so does its replacement."""
    run = run_cluster(tmp_path, inject=f"kill machine={victim} iteration=5 point=forward microbatch=3")
    assert run.code == 0, run.output[-6000:]
    assert len(run.recoveries) == 1
    found, expected = archived(run), up_to_the_end(run)
    assert (found.entries[: len(expected)], found.problems) == (expected, ())
    assert found.last_state().phase == Phase.ENDED
    check_prediction(found, victim)


def check_prediction(journal: ArchivedJournal, victim: int) -> None:
    """Before the loss, ``plan`` says what the run then did."""
    lost = next(e.position for e in journal.entries if isinstance(e.event, ev.MachineLost))
    plans = (change.after.plan for change in journal.changes() if change.entry.position > lost)
    made = next(plan for plan in plans if plan is not None)
    before = replace(journal, entries=journal.entries[:lost])
    foretold = LossPlanner(before, {}).plan([victim], iteration=made.resume)
    assert (foretold.outcome, foretold.mode, foretold.resume) == ("recovers", made.mode, made.resume)
    assert {part.rank: (part.loads, part.replays) for part in foretold.workers} == {
        rank: (task.load, task.replay_until - task.begin) for rank, task in made.tasks.items()
    }
    assert foretold.iterations_again == 2  # of the checkpoint of iteration 3


def test_a_job_ends_with_an_error(tmp_path: Path) -> None:
    """The machine that would archive is the one that is lost, and nothing is replaced."""
    flags = ["--max-failures", "0"]
    run = run_cluster(tmp_path, inject="kill machine=0 iteration=5 point=forward", flags=flags)
    assert run.code == 1, run.output[-6000:]
    found, expected = archived(run), up_to_the_end(run)
    assert (found.entries[: len(expected)], found.problems) == (expected, ())
    verdict = found.last_state().verdict
    assert verdict is not None
    assert verdict.reason in run.output


def test_everything_stops_at_once(tmp_path: Path) -> None:
    """The power fails: what was archived before says where the run stood. A resumed run keeps it."""
    environment = {**os.environ, "SWIFT_TEST_FOLDER": str(tmp_path), "OMP_NUM_THREADS": "1"}
    with (tmp_path / "output").open("w") as output:
        process = subprocess.Popen(
            command(tmp_path, script=training(tmp_path, iterations=2000)),
            stdout=output,
            stderr=output,
            env=environment,
            start_new_session=True,
        )
    try:
        wait_until(lambda: (committed(tmp_path) or 0) >= CHECKPOINT_EVERY, "a commit", DEADLINE_S)
    finally:
        for pid in (line.partition(":")[0] for line in processes_of(tmp_path)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        process.wait(60)
    opened = open_run_store(str(tmp_path / "store"))
    status = run_status(opened)
    assert (status.phase, status.ok, status.problems) == ("live", None, ())
    assert status.sign_of_life_s is not None
    assert status.checkpoint_every == CHECKPOINT_EVERY
    assert [machine.way for machine in status.machines] == ["replay"] * 4
    before = read_journal(opened.store, opened.run_id)
    last = status.checkpoints[-1] + CHECKPOINT_EVERY
    resumed = run_cluster(tmp_path, flags=["--resume"], script=training(tmp_path, iterations=last))
    assert resumed.code == 0, resumed.output[-6000:]
    again = open_run_store(str(tmp_path / "store"))
    assert again.earlier == (opened.run_id,)
    assert read_journal(again.store, opened.run_id) == before
    assert run_status(again).ok


def committed(folder: Path) -> int | None:
    """The newest checkpoint that the archive knows of."""
    try:
        opened = open_run_store(str(folder / "store"))
    except UsageError:  # not yet
        return None
    return read_journal(opened.store, opened.run_id).last_state().checkpoints.committed
