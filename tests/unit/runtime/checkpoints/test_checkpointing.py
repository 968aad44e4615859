"""When a worker saves, when it asks for an early checkpoint, and what it waits for at the end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from immutables import Map

from swift_ft.checkpoint.folder import CheckpointFolder
from swift_ft.config.run_config import RunConfig
from swift_ft.recovery import events as ev
from swift_ft.recovery.job_state import Checkpoints, JobShape, Phase, RecoveryRound, SavedPart, State
from swift_ft.recovery.membership import Membership
from swift_ft.runtime.checkpoints.checkpointing import Saver
from swift_ft.runtime.checkpoints.commits import Commits
from swift_ft.runtime.checkpoints.housekeeping import Housekeeping
from tests.support.writers import AtOnce

EVERY = 20
DIGESTS = {"model.weight": 7}


class Job:
    """A worker of a job that trains in generation 3: as much of it as a saver meets."""

    def __init__(self, **config: int) -> None:
        self.state = State(phase=Phase.LIVE, generation=3, checkpoints=Checkpoints(committed=20))
        self.journal: list[ev.Event] = []
        self.waited_for: list[object] = []
        self.idle = True
        self.looks_until_idle: int | None = None
        self.lost = False
        self.log = SimpleNamespace(generation=3)
        self.folder = CheckpointFolder(cast(Any, None))
        self.being_written: dict[str, Callable[[str], None]] = {}
        options = RunConfig(checkpoint_timeout_s=7.0, **cast(Any, config))
        self.context = SimpleNamespace(rank=1, config=options)
        commits = SimpleNamespace(wait=lambda iteration, _: self.waited_for.append(iteration))
        self.proof = SimpleNamespace(digests=lambda: DIGESTS, check=lambda *_, **__: None, failed=False)
        parts = (self, self, commits, self.log, self.proof, AtOnce(None))
        self.saver = Saver(*cast(Any, parts), every=EVERY)

    def append(self, event: ev.Event) -> None:
        self.journal.append(event)

    post = append

    def save(
        self, iteration: int, path: str, on_durable: Callable[[str], None], digests: dict[str, int]
    ) -> None:
        assert digests == DIGESTS
        self.being_written[path] = on_durable

    def wait(self, timeout_s: float) -> bool:
        if timeout_s:
            self.waited_for.append("the part")
            self.idle |= len(self.waited_for) == self.looks_until_idle
        return self.idle

    def is_cancelled(self) -> bool:
        return self.lost


@pytest.fixture
def job() -> Job:
    return Job()


def test_a_checkpoint_is_due_regularly_and_as_asked_for(job: Job) -> None:
    assert [i for i in range(20, 61) if job.saver.due(i)] == [20, 40, 60]
    job.state = State(checkpoints=Checkpoints(requested=33))
    assert [i for i in range(20, 61) if job.saver.due(i)] == [20, 33, 40, 60]


@pytest.mark.parametrize(
    ("at", "due", "last"),
    [(53, [20, 40, 53, 60], 53), (60, [20, 40, 60], 40), (33, [20, 33, 40, 60], 40), (40, [20, 40, 60], 40)],
)
def test_a_checkpoint_that_its_user_wants_is_as_a_regular_one(at: int, due: list[int], last: int) -> None:
    """The end of a training waits for it."""
    job = Job(checkpoint_at=at)
    assert [i for i in range(20, 61) if job.saver.regular(i)] == due
    job.saver.finish(53)
    assert job.waited_for == [last]


def test_a_request_leaves_an_iteration_to_learn_of_it(job: Job) -> None:
    job.saver.request(30, 3, "its log is nearly full")
    assert job.journal == [
        ev.CheckpointRequested(rank=1, iteration=32, generation=3, reason="its log is nearly full")
    ]


@pytest.mark.parametrize("iteration", [38, 39, 40])
def test_no_request_when_a_regular_checkpoint_is_near(job: Job, iteration: int) -> None:
    job.saver.request(iteration, 3, "")
    assert not job.journal


def test_no_request_while_a_part_is_being_written(job: Job) -> None:
    job.idle = False
    job.saver.request(30, 3, "")
    assert not job.journal


def test_no_request_in_a_recovery(job: Job) -> None:
    job.state = State(phase=Phase.AGREEING, generation=4)
    job.saver.request(30, 3, "")
    assert not job.journal


def test_a_request_is_repeated_once_all_have_passed_the_first(job: Job) -> None:
    job.state = State(phase=Phase.LIVE, checkpoints=Checkpoints(requested=32))
    for iteration in (30, 31, 32):
        job.saver.request(iteration, 3, "")
    assert not job.journal
    job.saver.request(33, 3, "")
    assert job.journal == [ev.CheckpointRequested(rank=1, iteration=35, generation=3, reason="")]


def test_an_iteration_that_is_repeated_is_saved_again_elsewhere(job: Job) -> None:
    """The first part is reported late, as a part of the generation before."""
    job.saver.save(40)
    job.log.generation = 4
    job.saver.save(40)
    old, new = sorted(job.being_written)
    for path in (old, new):
        job.being_written[path]("1")
    assert job.journal == [
        ev.PartPersisted(rank=1, iteration=40, epoch=0, generation=3, path=old, digest="1"),
        ev.PartPersisted(rank=1, iteration=40, epoch=0, generation=4, path=new, digest="1"),
    ]


def test_a_part_of_a_state_that_its_replicas_do_not_have_does_not_count(job: Job) -> None:
    job.saver.save(40)
    job.proof.failed = True  # the comparison ends before the part is durable
    for durable in job.being_written.values():
        durable("1")
    assert not job.journal


def test_a_worker_without_a_part_names_the_owners_part_at_once(job: Job) -> None:

    def reported(rank: int) -> ev.StatusReported:
        return ev.StatusReported(rank=rank, generation=3, iteration=20, live=True, holds=("the model",))

    job.state = replace(job.state, round=RecoveryRound(statuses=Map({r: reported(r) for r in range(3)})))
    job.saver.save(40)
    assert not job.being_written
    assert job.journal == [
        ev.PartPersisted(rank=1, iteration=40, epoch=0, generation=3, path=job.folder.part(40, 0, 3))
    ]


def test_what_is_committed_is_not_saved(job: Job) -> None:
    job.saver.save(20)
    assert not job.being_written


def test_the_commit_of_the_last_regular_checkpoint_is_waited_for(job: Job) -> None:
    """One that was asked for may lack a part for ever."""
    job.state = State(checkpoints=Checkpoints(requested=33))
    job.saver.finish(33)
    job.saver.finish(40)
    assert job.waited_for == [20, 40]


def test_a_part_that_is_being_written_is_waited_for(job: Job) -> None:
    job.idle = False
    job.looks_until_idle = 3
    job.saver.wait_for_part()
    assert job.waited_for == ["the part"] * 3


def test_a_loss_ends_the_wait_for_a_part(job: Job) -> None:
    job.idle, job.lost = False, True
    job.saver.wait_for_part()
    assert job.waited_for == ["the part"]


class Participant:
    """Of a job whose state is known."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.waiting = False

    def wait_for(self, condition: Callable[[State], bool], timeout_s: float) -> State | None:
        self.waiting = not condition(self.state)
        return None if self.waiting else self.state


@pytest.mark.parametrize(
    ("committed", "parts", "waits"),
    [
        (40, {}, False),
        (20, {0: "a", 1: "b"}, True),  # worker 0 is about to write the marker
        (20, {0: "a", 1: "named"}, False),  # the owner could not write what it saved again
        (20, {1: "b"}, False),  # its owner was lost
        (20, {}, False),
    ],
)
def test_a_commit_is_waited_for_while_it_can_come(
    committed: int, parts: dict[int, str], waits: bool, caplog: pytest.LogCaptureFixture
) -> None:
    saved = Map({rank: SavedPart(path, "" if path == "named" else "1") for rank, path in parts.items()})
    persisted = Map({40: saved}) if parts else Map()
    checkpoints = Checkpoints(committed=committed, parts=persisted)
    participant = Participant(State(shape=JobShape(machines=2), checkpoints=checkpoints))
    Commits(*cast(Any, (participant, None, None)), keep=2).wait(40, 7.0)
    assert participant.waiting == waits
    assert ("of iteration 40, is not committed" in caplog.text) == (committed < 40)


@pytest.mark.parametrize(
    ("state", "waits"),
    [
        (State(), True),
        (State(checkpoints=Checkpoints(committed=40)), False),
        (State(checkpoints=Checkpoints(parts=Map({40: Map({1: SavedPart("b")})}))), True),
        (State(membership=Membership(ended=Map({1: 39}))), False),  # its part never comes
        (
            State(
                membership=Membership(ended=Map({1: 40})),
                checkpoints=Checkpoints(parts=Map({40: Map({1: SavedPart("b")})})),
            ),
            True,
        ),
        (State(generation=4), False),
        (State(phase=Phase.ENDED), False),
    ],
)
def test_who_leaves_the_loop_waits_for_a_commit_that_can_come(
    state: State, waits: bool, caplog: pytest.LogCaptureFixture
) -> None:
    participant = Participant(replace(state, generation=state.generation or 3))
    commits = Commits(*cast(Any, (participant, None, None)), keep=2)
    commits.wait_while_others_save(40, 3, 7.0)
    assert participant.waiting == waits
    assert ("of iteration 40, is not committed" in caplog.text) == (state.checkpoints.committed != 40)


def test_a_marker_is_tried_for_as_long_as_it_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers would wait for one that nobody writes."""
    tried: list[float] = []
    monkeypatch.setattr("swift_ft.runtime.checkpoints.commits._COMMIT_S", 5.0)
    monkeypatch.setattr(
        "swift_ft.runtime.checkpoints.commits.retry",
        lambda action, patience_s, *args, **options: tried.append(patience_s),
    )
    folder = SimpleNamespace(store=SimpleNamespace(url="memory://store"))
    for timeout_s in (1.0, 60.0):
        context = SimpleNamespace(config=SimpleNamespace(checkpoint_timeout_s=timeout_s))
        participant = SimpleNamespace(context=context, append=lambda event: None)
        Commits(*cast(Any, (participant, folder, None)), keep=2)._commit(40, State())
    assert tried == [5.0, 60.0]


def test_a_store_that_is_slow_to_clean_does_not_fail_the_run(caplog: pytest.LogCaptureFixture) -> None:
    cleaned = threading.Event()
    with ThreadPoolExecutor(1) as background:
        housekeeping = Housekeeping(1, "run", *cast(Any, (None, None)), background=background)
        background.submit(cleaned.wait)
        housekeeping.drain(0.01)
        cleaned.set()
    assert "old files are left" in caplog.text
