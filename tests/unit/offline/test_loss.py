"""What a run would do if machines were lost: the answers of its own protocol."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swift_ft.costs.job import Measured, Worker
from swift_ft.errors import UsageError
from swift_ft.offline.archive import ArchivedJournal
from swift_ft.offline.loss import LossPlanner, Outcome
from swift_ft.recovery import events as ev
from tests.support.journals import RUN, checkpoint, entries_of, machine, opening


def planner(*events: ev.Event, every_s: float = 1.0) -> LossPlanner:
    return LossPlanner(ArchivedJournal(RUN, entries_of([*events], every_s)), {})


def copying(machines: int, every: int = 5, domains: tuple[str, ...] = (), committed: int = 0) -> LossPlanner:
    """Workers hold nothing twice but copies in memory, and the store has one checkpoint."""
    events = [*opening(machines, spares=1), *checkpoint(machines, committed)]
    for at, event in enumerate(events):
        if isinstance(event, ev.StatusReported):
            events[at] = replace(event, stages=(), holds=())
        if isinstance(event, ev.MachineJoined) and domains:
            events[at] = replace(event, domain=domains[int(event.machine[2])])
    measured = Measured(iteration_s=2.0, state_bytes=600, link_bytes_per_s=200.0, snapshot_every=every)
    profiles = dict.fromkeys(range(machines), Worker((), measured=measured))
    return LossPlanner(ArchivedJournal(RUN, entries_of(events, 1.0)), profiles)


def trained(machines: int = 4, spares: int = 0, helpers: int = 1, replicas: bool = False) -> LossPlanner:
    """There are checkpoints of the iterations 0, 10 and 20."""
    saved = [event for iteration in (0, 10, 20) for event in checkpoint(machines, iteration)]
    events = opening(machines, spares=spares, helpers=helpers, replicas=replicas)
    return planner(*events, *saved, every_s=2.0)


def test_a_stage_is_replayed_by_the_spare() -> None:
    plan = trained(spares=1).plan([2], iteration=27)
    assert (plan.outcome, plan.mode, plan.resume, plan.committed) == (Outcome.RECOVERS, "replay", 27, 20)
    assert (plan.spares, plan.joining) == ({2: machine(4)}, ())
    assert [(part.loads, part.replays) for part in plan.workers] == [
        (None, 0),
        (None, 0),
        (20, 7),
        (None, 0),
    ]
    assert [part.rank for part in plan.workers if part.lost] == [2]
    assert plan.iterations_again == 7
    assert plan.estimate is not None
    (*_, replaying) = plan.estimate.parts
    assert replaying.seconds == pytest.approx(7.0)  # five events of 2 s for ten iterations
    assert replaying.source == "measured: the times of its checkpoints, with its waits"


def test_neighbours_are_replayed_together_and_one_has_to_join() -> None:
    plan = trained(spares=1).plan([2, 1], iteration=22)
    assert plan.failed == (1, 2)
    assert (plan.spares, plan.joining) == ({1: machine(4)}, (2,))
    assert [(part.loads, part.replays) for part in plan.workers[1:3]] == [(20, 2), (20, 2)]


def test_survivors_help() -> None:
    plan = trained(spares=1, helpers=4).plan([1], iteration=25)
    assert [part.rank for part in plan.workers if part.helps] == [0, 2, 3]
    assert {part.helps for part in plan.workers if part.helps} == {(1,)}


def test_a_replica_gives_its_state() -> None:
    plan = trained(machines=2, replicas=True).plan([1], iteration=27)
    assert (plan.mode, plan.iterations_again, plan.joining) == ("replica", 0, (1,))
    assert [part.receives_from for part in plan.workers] == [None, 0]


def test_all_return_to_copies_in_memory() -> None:
    plan = copying(3).plan([1], iteration=27)
    assert (plan.mode, plan.resume, plan.in_memory, plan.committed) == ("memory", 25, 25, 0)
    assert [(part.loads, part.holder, part.repeats) for part in plan.workers] == [
        (25, 0, 2),
        (25, 2, 2),
        (25, 2, 2),
    ]
    assert plan.estimate is not None
    seconds = {part.what: part.seconds for part in plan.estimate.parts}
    assert seconds["getting the lost state from the memory of another machine"] == 3.0
    assert seconds["training 2 iterations again"] == 4.0
    assert not any("checkpoint" in what for what in seconds)


@pytest.mark.parametrize(
    ("iteration", "committed", "mode", "resume"),
    [
        (25, 0, "memory", 20),  # that of iteration 25 may still be on its way
        (26, 0, "memory", 25),
        (3, 0, "memory", 0),  # all began with a copy
        (26, 26, "fallback", 26),  # the store has a newer one
    ],
)
def test_the_newest_copy(iteration: int, committed: int, mode: str, resume: int) -> None:
    plan = copying(3, committed=committed).plan([1], iteration=iteration)
    assert (plan.mode, plan.resume) == (mode, resume)


def test_a_worker_and_the_holder_of_its_copy() -> None:
    assert copying(4).plan([1, 2], iteration=27).mode == "fallback"
    assert copying(4).plan([0, 2], iteration=27).mode == "memory"
    apart = copying(4, domains=("a", "b", "b", "a", "c"))
    assert apart.plan([1, 2], iteration=27).mode == "memory"
    assert apart.plan([0, 3], iteration=27).mode == "memory"


def test_copies_after_a_return_to_memory() -> None:
    """They are those to which all returned, until there are newer ones."""
    report = ev.StatusReported(rank=0, generation=2, iteration=None, kept=(10,), held=(10,), held_of=1)
    events = [*opening(2, spares=1), *checkpoint(2, 0)]
    events[4:6] = [ev.StatusReported(rank=rank, generation=1, iteration=None) for rank in (0, 1)]
    lost = ev.MachineLost(machine=machine(1), reason="killed")
    events += [lost, replace(report, rank=1, kept=(), held=(), held_of=None), report]
    events += [ev.WorkerReady(rank=rank, generation=2) for rank in (0, 1)]
    profiles = {1: Worker((), measured=Measured(snapshot_every=5))}
    again = LossPlanner(ArchivedJournal(RUN, entries_of(events)), profiles)
    assert again.plan([1], iteration=13).resume == 10
    assert again.plan([1], iteration=16).resume == 15


def test_without_a_spare_another_machine_runs_the_slot() -> None:
    plan = trained(spares=1).plan([2], iteration=27, spare=False)
    assert (plan.outcome, plan.joining, plan.hosts) == (Outcome.RECOVERS, (2,), {2: 0})
    assert plan.workers == trained(spares=1).plan([2], iteration=27).workers


def test_with_too_few_machines_the_run_waits() -> None:
    first, *others = [*opening(4), *checkpoint(4, 0), *checkpoint(4, 20)]
    assert isinstance(first, ev.JobOpened)
    needs_all = planner(replace(first, min_machines=4), *others)
    plan = needs_all.plan([2], iteration=27, spare=False)
    assert (plan.outcome, plan.joining, plan.hosts) == (Outcome.WAITS, (2,), {})
    assert (plan.workers, plan.estimate) == ((), None)


def test_too_many_losses_end_the_run() -> None:
    plan = trained().plan([0, 1, 2, 3], iteration=27)
    assert plan.outcome == Outcome.ENDS
    assert "more than the limit of 3" in plan.reason


def test_without_a_checkpoint_all_begin_again() -> None:
    plan = planner(*opening(3, spares=1)).plan([1], iteration=4)
    assert plan.outcome == Outcome.RESTARTS
    assert plan.estimate is None


def test_a_run_that_is_over_is_asked_about_its_last_moment() -> None:
    done: list[ev.Event] = [ev.WorkerFinished(rank=rank, generation=1) for rank in range(2)]
    done += [ev.ScriptExited(machine=machine(r), started_in=1, rank=r, iteration=20) for r in range(2)]
    plan = planner(*opening(2, spares=1), *checkpoint(2, 10), *done).plan([1], iteration=20)
    assert (plan.mode, plan.resume, plan.workers[1].replays) == ("replay", 20, 10)


def test_a_question_that_has_no_answer() -> None:
    with pytest.raises(UsageError, match=r"there is no machine 7 in run .*: they are numbered 0 to 3"):
        trained().plan([1, 7], iteration=4)
    with pytest.raises(UsageError, match="no moment in which all workers trained"):
        planner(*opening(3)[:4]).plan([0], iteration=0)
