"""Waits of the job, as far as the journal shows them: a pure function of the state."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from swift_ft.recovery.handlers.worlds import world_size_of
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.plan import Plan
from swift_ft.recovery.worlds import Change
from swift_ft.units import named, some


class Limit(StrEnum):
    """The options of a run that end a wait of the whole job."""

    JOIN = "join_timeout_s"
    REPORT = "report_timeout_s"
    REPLAY = "replay_timeout_s"
    CHECKPOINT = "checkpoint_timeout_s"


@dataclass(frozen=True, slots=True)
class Wait:
    """One wait of the whole job.

    Attributes:
        step: identifies the wait: as long as it stays the same, the job has waited all the time.
        what: who is missing and for what, to complete "waits for".
        limit: what ends the wait; None if nothing does.
        until_progress: the limit counts from the last progress of those that are waited for.
    """

    step: tuple[int, Phase, str]
    what: str
    limit: Limit | None = None
    until_progress: bool = False


def limit_of_answers(state: State) -> Limit | None:
    """The option that ends the wait for late workers in the present phase; None while nobody waits for any.

    A script without a session never answers, and only workers with one wait.
    """
    match state.phase:
        case Phase.AGREEING if state.has_sessions:
            return Limit.REPORT
        case Phase.RECOVERING:
            return Limit.REPLAY
    return None


def waiting_for(state: State) -> Wait | None:
    """The event that all workers, or those that are done, wait for; None while all of them train.

    A script without a session reports nothing, so nothing is known about it.
    """
    match state.phase:
        case Phase.FORMING if state.shape.machines:
            return _for_machines(state)
        case Phase.AGREEING if state.has_sessions:
            return _for_reports(state)
        case Phase.RECOVERING:
            return _for_the_plan(state)
        case Phase.LIVE if state.round.finished:
            return _for_the_end(state)
        case Phase.LIVE if state.worlds.change is not None and state.worlds.change.offered:
            return _for_another_world(state, state.worlds.change)
    return None


def _for_machines(state: State) -> Wait:
    members, machines = state.membership.members, state.shape.machines
    empty = [slot for slot in range(machines) if slot not in members]
    step = (state.generation, state.phase, f"{len(empty)} empty")
    if state.generation == 0:
        here = len(state.membership.spares)
        return Wait(step, f"{machines - here} of {machines} machines to join", Limit.JOIN)
    spares = len(state.membership.spares)
    spare = f", {spares} of {len(empty)} are here" if spares else ""
    return Wait(step, f"a replacement for {named('machine', empty)}{spare}", Limit.JOIN)


def _for_reports(state: State) -> Wait | None:
    if not (late := state.missing_ranks()):
        return None
    step = (state.generation, state.phase, "")
    return Wait(step, f"{_workers(state, late)} to report", limit_of_answers(state))


def _for_the_plan(state: State) -> Wait | None:
    plan, late = state.plan, state.missing_ranks()
    if plan is None or not late:
        return None
    tasks = some(late, of="workers", word=lambda rank: f"worker {rank} to {_task_in_words(plan, rank)}")
    step = (state.generation, state.phase, "")
    return Wait(step, tasks, limit_of_answers(state), until_progress=True)


def _task_in_words(plan: Plan, rank: int) -> str:
    task = plan.tasks[rank]
    if task.replays:
        return f"replay iterations {task.begin} to {task.replay_until - 1}"
    if task.load is not None:
        return f"load the checkpoint of iteration {task.load}"
    return "get ready"


def _for_another_world(state: State, change: Change) -> Wait:
    step = (state.generation, state.phase, f"world {change.world.number}")
    if late := [rank for rank in range(state.world_size) if rank not in change.offered]:
        return Wait(step, f"{_workers(state, late)} to stop, since world {change.world.number} takes over")
    late = [rank for rank in range(world_size_of(state, change)) if rank not in change.taken]
    return Wait(
        step, f"{named('worker', late)} of world {change.world.number} to take its state", Limit.REPORT
    )


def _for_the_end(state: State) -> Wait | None:
    finished, parts = state.round.finished, state.checkpoints.parts
    late = {rank for rank in range(state.world_size) if rank not in finished}
    if late:
        what = f"{_workers(state, late)} to complete the last iteration"
        return Wait((state.generation, state.phase, "finish"), what)
    slots = [slot for slot in range(state.shape.machines) if slot not in state.membership.exited]
    if parts and len(slots) == state.shape.machines:
        iteration = max(parts)
        there = len(parts[iteration])
        what = f"the store: {there} of {state.world_size} parts of checkpoint {iteration} are there"
        if there == state.world_size:
            what = f"the store to take the marker of checkpoint {iteration}"
        return Wait((state.generation, state.phase, "checkpoint"), what, Limit.CHECKPOINT)
    what = f"the script to end on {named('machine', slots)}"
    return Wait((state.generation, state.phase, "exit"), what)


def _workers(state: State, ranks: Iterable[int]) -> str:
    """The workers, and the machines that they are on where these differ."""
    ranks = sorted(ranks)
    text = named("worker", ranks)
    if state.shape.workers_per_machine == 1:
        return text
    return f"{text} on {named('machine', {state.slot_of_rank(rank) for rank in ranks})}"
