"""What a commit makes deletable: logs before the newest checkpoint, or before the oldest one that is kept."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from immutables import Map

from swift_ft.checkpoint import store_claim
from swift_ft.checkpoint.folder import CheckpointFolder
from swift_ft.checkpoint.run_record import write_record
from swift_ft.config.run_config import RunConfig
from swift_ft.errors import StoreInUseError
from swift_ft.recovery import events as ev
from swift_ft.recovery.handlers.audits import checkpoints_doubted
from swift_ft.recovery.job_state import Checkpoints, JobShape, Phase, SavedPart, State
from swift_ft.recovery.membership import Membership
from swift_ft.recovery.orders import WorkerOrder
from swift_ft.runtime.checkpoints.commits import Commits
from swift_ft.runtime.checkpoints.housekeeping import Housekeeping, KeepLogs
from swift_ft.runtime.checkpoints.ownership import end_if_taken_over
from swift_ft.runtime.checkpoints.part import CheckpointsPart
from swift_ft.storage.store import Store


class Log:
    """Notes before which iteration and up to which generation it is dropped."""

    def __init__(self) -> None:
        self.dropped: list[tuple[int, int]] = []

    def drop_before(self, iteration: int, generation: int) -> None:
        self.dropped.append((iteration, generation))


@pytest.mark.parametrize(("keep", "oldest"), [(KeepLogs.NEWEST, 30), (KeepLogs.ALL, 10)])
def test_which_logs_stay(keep: KeepLogs, oldest: int) -> None:
    state = State(phase=Phase.LIVE, generation=4)
    state = replace(state, checkpoints=replace(state.checkpoints, committed=30, earlier=(10, 20)))
    log = Log()
    with ThreadPoolExecutor(1) as background:
        housekeeping = Housekeeping(1, "run", *cast(Any, (None, log)), keep_logs=keep, background=background)
        housekeeping.on_change(state)
    assert log.dropped == [(oldest, 4)]


@pytest.mark.parametrize("keep", list(KeepLogs))
def test_logs_of_ranks_that_the_job_has_no_longer_are_tidied_up(keep: KeepLogs, tmp_path: Path) -> None:
    """A world that was larger had them, and its workers ended while they wrote."""
    store = Store(tmp_path)
    for rank in (1, 2, 10):
        for name in ("g00001-s000000-i00000000-00000003.arrow", "g00001-s000001.01.tmp"):
            store.write_json(f"log/rank-{rank:05d}/{name}", {})
    shape, membership = (
        JobShape(machines=2),
        Membership(members=Map({0: "a", 1: "b"}), started_in=Map({0: 1, 1: 1})),
    )
    with ThreadPoolExecutor(1) as background:
        parts = cast(Any, (CheckpointFolder(store), Log()))
        housekeeping = Housekeeping(0, "A", *parts, keep_logs=keep, background=background)
        housekeeping.on_change(State(shape=shape, membership=membership))
        housekeeping.drain(60.0)
    whole = ["g00001-s000000-i00000000-00000003.arrow"] if keep is KeepLogs.ALL else []
    assert [store.list(f"log/rank-{rank:05d}") for rank in (2, 10)] == [whole, whole]
    assert len(store.list("log/rank-00001")) == 2, "its worker may be writing"


# ------------------------------------------------------------------------------------- what may be wrong


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    """Of run A, with checkpoints that were saved in generation 2."""
    folder = CheckpointFolder(Store(str(tmp_path / "store")))
    write_record(folder.store, {"run_id": "A", "topology": {}, "earlier": []})
    for iteration in (10, 20, 30):
        save(folder, iteration)
    return folder


def save(folder: CheckpointFolder, iteration: int, generation: int = 2, run_id: str = "A") -> None:
    part = folder.part(iteration, 0, generation)
    folder.store.write_json(f"{part}/data.json", {})
    folder.commit(iteration, {0: part}, run_id, {})


LIVE = State(phase=Phase.LIVE, generation=2, checkpoints=Checkpoints(committed=30, earlier=(10, 20), epoch=1))


def by_an_audit(state: State) -> State:
    return checkpoints_doubted(state, ev.CheckpointsDoubted(generation=2, iteration=10, reason="wrong"))


def told(folder: CheckpointFolder, *states: State, rank: int = 0) -> None:
    """Housekeeping learns of states, and does all that it has to do."""
    with ThreadPoolExecutor(1) as background:
        parts = cast(Any, (folder, Log()))
        housekeeping = Housekeeping(rank, "A", *parts, background=background)
        for state in states:
            housekeeping.on_change(state)
            background.submit(lambda: None).result()


@pytest.mark.parametrize("live", [False, True])
def test_what_may_be_wrong_is_nothing_to_resume_from(live: bool, folder: CheckpointFolder) -> None:
    """Only the journal knew of it. A run that is resumed reads no journal of an earlier one."""
    state = by_an_audit(LIVE)
    assert state.checkpoints.committed == 10
    told(folder, replace(state, phase=Phase.LIVE) if live else state)
    assert folder.committed() == [10]


def test_only_worker_0_takes_markers_back(folder: CheckpointFolder) -> None:
    told(folder, by_an_audit(LIVE), rank=1)
    assert folder.committed() == [10, 20, 30]


def test_what_is_saved_since_counts(folder: CheckpointFolder) -> None:
    """A worker that was frozen deletes late. What an earlier run has saved is no newer for its generation."""
    save(folder, 20, generation=3)
    save(folder, 25, generation=9, run_id="before A")
    told(folder, by_an_audit(LIVE))
    assert folder.committed() == [10, 20]


def test_a_store_that_fails_is_asked_again(
    folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failures, delete = [OSError("down")], Store.delete

    def failing(store: Store, path: str, recursive: bool = False) -> None:
        if failures and path.endswith("committed.json"):
            raise failures.pop()
        delete(store, path, recursive)

    monkeypatch.setattr(Store, "delete", failing)
    told(folder, by_an_audit(LIVE), by_an_audit(LIVE))
    assert not failures
    assert "do not --resume this run" in caplog.text
    assert folder.committed() == [10]


def test_a_loading_worker_waits_for_it(folder: CheckpointFolder, caplog: pytest.LogCaptureFixture) -> None:
    """Before anything is computed again."""
    with ThreadPoolExecutor(1) as background:
        housekeeping = Housekeeping(0, "A", *cast(Any, (folder, Log())), background=background)
        housekeeping.withdraw(LIVE, 60.0)
        assert folder.committed() == [10, 20, 30]
        housekeeping.withdraw(by_an_audit(LIVE), 60.0)
        assert folder.committed() == [10]
    assert not caplog.records


# ------------------------------------------------------------------------------------- commits that are late


class Job:
    """A job of run A, as a commit meets it."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.context = SimpleNamespace(rank=0, run_id="A", config=RunConfig())
        self.journal: list[ev.Event] = []

    def order(self, state: State) -> WorkerOrder:
        return WorkerOrder.HOLD

    def append(self, event: ev.Event) -> None:
        self.journal.append(event)


def commit(folder: CheckpointFolder, job: Job, state: State) -> None:
    parts = Map({40: Map({0: SavedPart(folder.part(40, 0, 2))})})
    state = replace(state, checkpoints=replace(state.checkpoints, parts=parts))
    Commits(*cast(Any, (job, folder, None)), keep=2)._commit(40, state)


def test_a_marker_of_another_epoch_is_not_written(folder: CheckpointFolder) -> None:
    """The store was down, or the worker frozen, and all have gone back meanwhile."""
    job = Job(by_an_audit(LIVE))
    commit(folder, job, LIVE)
    assert folder.committed() == [10, 20, 30]
    assert job.journal == []


def test_a_doubt_begins_an_epoch_though_no_checkpoint_is_given_up(folder: CheckpointFolder) -> None:
    newest = ev.CheckpointsDoubted(generation=2, iteration=30, reason="wrong")
    job = Job(checkpoints_doubted(LIVE, newest))
    assert job.state.checkpoints.committed == 30
    commit(folder, job, LIVE)
    assert folder.committed() == [10, 20, 30]


# ------------------------------------------------------------------------------------- the end


@pytest.mark.parametrize("others_train", [False, True])
def test_who_leaves_the_loop_deletes_only_what_killed_processes_have_left(
    others_train: bool, folder: CheckpointFolder
) -> None:
    """Others may be writing all else."""
    dead, living = folder.part(40, rank=1, generation=1), folder.part(40, rank=0, generation=1)
    writing = ("workers/rank-00001.json.01.tmp", "runs/A/workers/rank-00001.g0001.json.01.tmp")
    for path in (f"{dead}/data.json.01.tmp", f"{living}/data.json.01.tmp", *writing):
        folder.store.write_json(path, {})
    job = JobShape(machines=2)
    state = replace(
        LIVE, shape=job, membership=Membership(started_in=Map({0: 1, 1: 2}), members=Map({0: "a", 1: "b"}))
    )
    with ThreadPoolExecutor(1) as background:
        housekeeping = Housekeeping(0, "A", *cast(Any, (folder, Log())), background=background)
        housekeeping.on_change(state)
        checkpoints = CheckpointsPart.__new__(CheckpointsPart)
        context = SimpleNamespace(config=RunConfig())
        saver = SimpleNamespace(leave=lambda _: None, finish=lambda _: None)
        vars(checkpoints).update(_saver=saver, _housekeeping=housekeeping, _context=context)
        vars(checkpoints).update(_archiver=None, _status=SimpleNamespace(iteration=41))
        if others_train:
            checkpoints.leave(41)
        else:
            checkpoints.close()
    assert not folder.store.exists(dead)
    assert folder.store.exists(living)
    assert [folder.store.exists(path) for path in writing] == [others_train] * 2


# ------------------------------------------------------------------------------------- two runs in one store


def claim(folder: CheckpointFolder, run_id: str, mode: str) -> None:
    options = {mode: True} if mode else {}
    context = SimpleNamespace(rank=0, started_in=1, run_id=run_id, config=RunConfig(**cast(Any, options)))
    rendezvous = cast(Any, SimpleNamespace(check=lambda _: False, set=lambda *_: None))
    store_claim.claim_store(Store(folder.store.url), cast(Any, context), rendezvous, {}, 1.0)


@pytest.mark.parametrize("mode", ["resume", "auto_resume", "fresh"])
def test_a_run_whose_store_was_taken_over_ends(mode: str, folder: CheckpointFolder) -> None:
    claim(folder, "B", mode)
    save(folder, 50, run_id="B")
    before = folder.store.find("")
    job = Job(LIVE)
    commit(folder, job, LIVE)
    with ThreadPoolExecutor(1) as background:
        check = lambda: end_if_taken_over(folder.store, cast(Any, job))  # noqa: E731
        parts = cast(Any, (folder, log := Log()))
        housekeeping = Housekeeping(0, "A", *parts, end_if_taken_over=check, background=background)
        housekeeping.on_change(replace(LIVE, checkpoints=Checkpoints(committed=60)))
        housekeeping.on_change(by_an_audit(LIVE))
        housekeeping.drain(60.0)
    assert folder.store.find("") == before
    assert log.dropped == []
    closed, *more = {event for event in job.journal if isinstance(event, ev.JobClosed)}
    assert not more
    assert len(job.journal) == 4
    assert closed.exit_code
    assert closed.reason.startswith(f"run B has taken over {folder.store.url}, so run A ends here")
    assert "\n" not in closed.reason


def test_a_run_that_has_its_store_goes_on(folder: CheckpointFolder) -> None:
    job = Job(LIVE)
    commit(folder, job, LIVE)
    assert job.journal == [ev.CheckpointCommitted(iteration=40, epoch=1, keep=2)]
    folder.store.delete("run.json")  # whose it is cannot be known, and nobody else has claimed it
    end_if_taken_over(folder.store, cast(Any, job))
    write_record(folder.store, {"run_id": "B", "topology": {}, "earlier": ["A"]})
    with pytest.raises(StoreInUseError, match="run B has taken over"):
        end_if_taken_over(folder.store, cast(Any, job))
