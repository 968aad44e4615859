"""A journal with a gap: what is known after it is used, and what is not is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from swift_ft.cli.recover.main import main
from swift_ft.coordination.archive import JournalArchive
from swift_ft.offline.archive import ArchivedJournal, read_journal
from swift_ft.offline.garbage import find_garbage
from swift_ft.offline.loss import LossPlanner
from swift_ft.offline.run_store import open_run_store
from swift_ft.recovery import events as ev
from swift_ft.recovery.entries import Entry
from swift_ft.recovery.events import Event
from tests.support.journals import RUN, checkpoint, entries_of, opening, store_with

BEFORE: list[Event] = [*opening(3), *checkpoint(3, 0), *checkpoint(3, 10)]
MISSING = 7
"""Entries in the gap."""


def parts(iteration: int, *, epoch: int, generation: int) -> list[Event]:
    saved: list[Event] = [
        ev.PartPersisted(rank=rank, path="p", iteration=iteration, epoch=epoch, generation=generation)
        for rank in range(3)
    ]
    return [*saved, ev.CheckpointCommitted(iteration=iteration, epoch=epoch, keep=2)]


def with_gap(after: list[Event]) -> list[Entry]:
    """The journal, with entries after it whose predecessors are missing."""
    entries = entries_of([*BEFORE, *[ev.FaultInjected(fault="?")] * MISSING, *after])
    return [*entries[: len(BEFORE)], *entries[len(BEFORE) + MISSING :]]


def journal(after: list[Event]) -> ArchivedJournal:
    return ArchivedJournal(RUN, tuple(with_gap(after)))


def test_no_gap_is_no_gap() -> None:
    whole = ArchivedJournal(RUN, entries_of(BEFORE))
    assert (whole.gaps, whole.after_gaps(), whole.problems) == ((), None, ())


def test_without_a_return_to_a_checkpoint_the_log_goes_on() -> None:
    found = journal(parts(20, epoch=1, generation=4))
    later, before = found.after_gaps(), found.last_state()
    assert later is not None
    assert before.checkpoints.epoch == 1
    assert (later.generation, later.committed) == (4, 20)
    assert later.log_since(before, 10) == later.log_since(before, 20) == before.checkpoints.log_since


def test_after_a_return_only_newer_checkpoints_begin_a_replay() -> None:
    """Another history began within the gap: what was logged before a later checkpoint may be of either."""
    found = journal([*parts(20, epoch=2, generation=4), *parts(30, epoch=2, generation=6)])
    later, before = found.after_gaps(), found.last_state()
    assert later is not None
    assert later.log_since(before, 10) is None
    assert (later.log_since(before, 20), later.log_since(before, 30)) == (4, 6)


def test_a_return_after_the_gap_counts_as_well() -> None:
    found = journal([*parts(20, epoch=2, generation=4), *parts(20, epoch=3, generation=7)])
    later = found.after_gaps()
    assert later is not None
    assert later.log_since(found.last_state(), 20) == 7


def test_a_generation_that_saved_nothing_may_have_returned() -> None:
    """The plan of a recovery is in no entry, so only the parts that follow show its epoch."""
    later_one = ev.CommunicationFailed(rank=0, generation=5, reason="?")
    found = journal([*parts(20, epoch=1, generation=4), later_one])
    later = found.after_gaps()
    assert later is not None
    assert later.log_since(found.last_state(), 20) is None


def test_nothing_after_the_gap_tells() -> None:
    found = journal([ev.CommunicationFailed(rank=0, generation=5, reason="?")])
    later = found.after_gaps()
    assert later is not None
    assert (later.generation, later.committed, later.verdict) == (5, None, None)
    assert later.log_since(found.last_state(), 10) is None


@pytest.mark.parametrize("after", [[], [ev.JobClosed(reason="enough")]], ids=["none", "closed"])
def test_the_verdict_may_be_known_in_spite_of_a_gap(after: list[Event]) -> None:
    whole = ArchivedJournal(RUN, entries_of([*BEFORE, *after]))
    for found in (whole, journal([*parts(20, epoch=1, generation=4), *after])):
        assert (found.verdict and found.verdict.reason) == ("enough" if after else None)


def test_plans_use_the_newer_checkpoint() -> None:
    planner = LossPlanner(journal(parts(20, epoch=1, generation=4)), {})
    plan = planner.plan([1], iteration=23)
    assert (plan.committed, plan.iterations_again) == (20, 3)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    kept = store_with(str(tmp_path), BEFORE, machines=3)
    after = [*parts(20, epoch=1, generation=4), ev.JobClosed(reason="the user asked for it")]
    JournalArchive(kept, RUN).write(with_gap(after)[len(BEFORE) :])
    return tmp_path


def test_status_says_what_it_knows(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(store), "--json"]) == 1
    status: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (status["phase"], status["ok"], status["generation"]) == ("ended", False, 4)
    assert status["reason"] == "the user asked for it"
    first, last = len(BEFORE), len(BEFORE) + MISSING - 1
    (problem,) = status["problems"]
    assert problem.startswith(
        f"the entries {first} to {last} of the journal are missing (from 1970-01-12 13:46:"
    )
    assert problem.endswith("who joined, who was lost, and how the run recovered then is unknown")


def test_gc_sees_the_end(store: Path) -> None:
    run = open_run_store(str(store))
    assert find_garbage(run).may_be_alive == ""
    archive = JournalArchive(store_with(str(store), [], machines=3), RUN)
    archive.delete(archive.spans()[-1])
    assert not read_journal(run.store, RUN).gaps
    assert "has no end" in find_garbage(run).may_be_alive
