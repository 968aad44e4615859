"""The occupancy of workers: which machine they were on, what they did and when, and the job's phases. Pure.

Both are read from the journal. What a worker notes about its own steps (when the first one of a generation
began) makes them sharper, where it is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Self

from swift_ft.recovery import events as ev
from swift_ft.recovery.history import StateChange
from swift_ft.recovery.job_state import Phase, State


class Doing(StrEnum):
    """An activity of a worker, in the order of a legend.

    Attributes:
        meaning: what it is, in words.
    """

    meaning: str

    TRAINS = "trains", "trains"
    WAITS = "waits", "waits, keeps its state"
    ABSENT = "absent", "no machine"
    STARTS = "starts", "starts"
    LOADS = "loads", "loads a checkpoint"
    REPLAYS = "replays", "loads and replays"
    HELPS = "helps", "helps in a replay"
    JOINS = "joins", "forms groups, copies state"
    DONE = "done", "has finished"

    def __new__(cls, value: str, meaning: str) -> Self:
        """A member is equal to its value, as in JSON."""
        member = str.__new__(cls, value)
        member._value_, member.meaning = value, meaning
        return member


@dataclass(frozen=True, slots=True)
class WorkerSpan:
    """A stretch of time in which a worker did one thing. Times are Unix seconds.

    Attributes:
        rank: the worker.
        doing: what.
        since: when it began.
        until: when it ended.
        machine: on which; empty if the slot was.
        stages: pipeline stages on the worker, as it had last reported.
        holds: the parts whose whole state is on it. Workers that hold the same are replicas.
    """

    rank: int
    doing: Doing
    since: float
    until: float
    generation: int
    machine: str
    stages: tuple[int, ...] = ()
    holds: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Tenure:
    """The stay of a machine in a slot, or its wait for one. Times are Unix seconds.

    Attributes:
        machine: its name.
        slot: that it filled; None while it waited as a spare.
        since: when it joined, or got the slot.
        until: when it left, was lost, or got a slot; when the known journal ends, if it did neither.
        end: ``lost``, ``left`` (it was asked to), ``took slot N``, or empty if it was there to the end.
    """

    machine: str
    slot: int | None
    since: float
    until: float
    end: str


@dataclass(frozen=True, slots=True)
class PhaseSpan:
    """A stretch of time in which the job was in one phase.

    Attributes:
        since: Unix seconds.
        until: Unix seconds.
    """

    phase: Phase
    since: float
    until: float
    generation: int


@dataclass(frozen=True, slots=True)
class Occupancy:
    """The occupancy of a run: who was where and did what.

    Attributes:
        workers: spans of all workers, by rank and then by time.
        tenures: of all machines, by the time when they began.
        phases: of the job, in order.
        training_over: when all workers had completed the last iteration; None if they have not.
    """

    workers: tuple[WorkerSpan, ...]
    tenures: tuple[Tenure, ...]
    phases: tuple[PhaseSpan, ...]
    training_over: float | None


@dataclass(slots=True)
class _Reader:
    workers: list[WorkerSpan] = field(default_factory=list)
    tenures: list[Tenure] = field(default_factory=list)
    phases: list[PhaseSpan] = field(default_factory=list)
    training_over: float | None = None
    current: dict[int, WorkerSpan] = field(default_factory=dict)  # by rank
    places: dict[str, Tenure] = field(default_factory=dict)  # by machine
    reports: dict[int, ev.StatusReported] = field(default_factory=dict)  # the last one of each rank

    def apply(self, change: StateChange, at: float) -> None:
        before, state, event = change.before, change.after, change.entry.event
        if isinstance(event, ev.StatusReported):
            self.reports[event.rank] = event
        self._note_phase(state, at)
        if before.membership != state.membership:
            self._note_places(before, state, event, at)
        for rank in _concerned(before, state, event):
            self._note_worker(state, rank, at)
        for rank in range(state.world_size, before.world_size):  # a smaller world has taken over
            if (last := self.current.pop(rank, None)) is not None and at > last.since:
                self.workers.append(replace(last, until=at))
        finished = state.all_finished
        if not finished and state.phase != Phase.ENDED:
            self.training_over = None
        elif finished and self.training_over is None:
            self.training_over = at

    def _note_phase(self, state: State, at: float) -> None:
        now = PhaseSpan(state.phase, at, at, state.generation)
        if self.phases:
            last = self.phases[-1]
            self.phases[-1] = replace(last, until=at)
            if (last.phase, last.generation) == (now.phase, now.generation):
                return
        if state.phase != Phase.ENDED:
            self.phases.append(now)

    def _note_places(self, before: State, state: State, event: ev.Event, at: float) -> None:
        left = isinstance(event, ev.MachineLost) and event.on_request
        for machine in {*before.membership.slots, *before.membership.spares}:
            slot = state.membership.slots.get(machine)
            if slot is None and machine not in state.membership.spares:
                self._end_place(machine, at, "left" if left else "lost")
            elif slot != (was := self.places[machine].slot) and was is not None:  # in another world
                self._end_place(machine, at, "became a spare" if slot is None else f"took slot {slot}")
            elif slot is not None and was is None:
                forming = before.generation == 0  # for the first time: there was no spare yet
                self._end_place(machine, at, "" if forming else f"took slot {slot}", forget=forming)
        for machine in sorted({*state.membership.slots, *state.membership.spares} - self.places.keys()):
            slot = state.membership.slots.get(machine)
            self.places[machine] = Tenure(machine, slot, at, at, "")

    def _end_place(self, machine: str, at: float, end: str, *, forget: bool = False) -> None:
        if (place := self.places.pop(machine, None)) is not None and not forget:
            self.tenures.append(replace(place, until=at, end=end))

    def _note_worker(self, state: State, rank: int, at: float) -> None:
        report = self.reports.get(rank)
        machine = state.membership.members.get(state.slot_of_rank(rank), "")
        now = WorkerSpan(
            rank,
            _doing(state, rank),
            at,
            at,
            state.generation,
            machine,
            report.stages if report is not None and machine else (),
            report.holds if report is not None and machine else (),
        )
        last = self.current.get(rank)
        if last is not None:
            if replace(now, since=last.since, until=last.until) == last:
                return
            if at > last.since:
                self.workers.append(replace(last, until=at))
        self.current[rank] = now

    def close(self, at: float) -> None:
        self.workers += [replace(span, until=at) for span in self.current.values() if at > span.since]
        self.tenures += [replace(place, until=at) for place in self.places.values()]
        if self.phases:
            self.phases[-1] = replace(self.phases[-1], until=max(at, self.phases[-1].since))


def occupancy(
    changes: Iterable[StateChange],
    began: Mapping[tuple[int, int], float] | None = None,
    until: float = 0.0,
) -> Occupancy:
    """Read a journal.

    Args:
        changes: all entries, from the first one on.
        began: by rank and generation, when the worker's first live step began, as far as that is known.
        until: a later sign of life than the last entry, in Unix seconds. It does not count after the end.

    Returns:
        All spans, up to the last entry or the later sign of life.
    """
    reader, at, ended = _Reader(), 0.0, False
    for change in changes:
        at = max(at, change.entry.at)  # clocks of different writers differ a little
        reader.apply(change, at)
        if ended := change.after.phase == Phase.ENDED:
            break
    reader.close(at if ended else max(at, until))
    workers = sorted(reader.workers, key=lambda span: (span.rank, span.since))
    return Occupancy(
        tuple(part for span in workers for part in _sharpened(span, began or {})),
        tuple(sorted(reader.tenures, key=lambda place: (place.since, place.machine))),
        tuple(reader.phases),
        reader.training_over,
    )


def _concerned(before: State, state: State, event: ev.Event) -> Iterable[int]:
    """The workers that may do something else after an event: in a large job, most events concern one."""
    if (before.phase, before.generation) == (state.phase, state.generation):
        if isinstance(event, ev.StatusReported | ev.WorkerReady | ev.WorkerFinished):
            return (event.rank,)
        if before.membership is state.membership:
            return ()
    return range(state.world_size)


def _doing(state: State, rank: int) -> Doing:
    slot, membership = state.slot_of_rank(rank), state.membership
    if slot not in membership.members:
        return Doing.ABSENT if state.generation else Doing.STARTS
    if state.phase == Phase.LIVE:
        return Doing.DONE if rank in state.round.finished else Doing.TRAINS
    if state.phase == Phase.RECOVERING and state.plan is not None and rank not in state.round.ready:
        task, shared = state.plan.tasks.get(rank), state.plan.parallel_replay_of(rank)
        if shared is not None and rank in shared.helpers:
            return Doing.HELPS
        if task is not None and task.replays:
            return Doing.REPLAYS
        return Doing.LOADS if task is not None and task.load is not None else Doing.WAITS
    if state.phase == Phase.AGREEING and rank not in state.round.statuses:
        fresh = membership.started_in.get(slot, 0) >= state.round.asked_in
        return Doing.STARTS if fresh else Doing.WAITS
    return Doing.WAITS


def _sharpened(span: WorkerSpan, began: Mapping[tuple[int, int], float]) -> tuple[WorkerSpan, ...]:
    """What the journal calls training begins with the forming of groups."""
    first = began.get((span.rank, span.generation))
    if span.doing != Doing.TRAINS or first is None or not span.since < first < span.until:
        return (span,)
    return replace(span, doing=Doing.JOINS, until=first), replace(span, since=first)
