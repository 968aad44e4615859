"""The history of a job: the one fold of its journal that all views share. Pure.

The console, the JSON lines, the live view, an agent's metrics, reports and `swift-recover` show parts of it,
so they cannot tell two stories of one journal.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from swift_ft.recovery import events as ev
from swift_ft.recovery.entries import Entry
from swift_ft.recovery.incidents import (
    ENDED,
    Incident,
    end_by_stop,
    incident_of,
    incident_of_end,
    incident_of_event,
)
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.layout.stage_layers import (
    LayerMove,
    StageLayers,
    layers_by_rank,
    moves_between,
    pipelines_in,
)
from swift_ft.recovery.protocol import step
from swift_ft.recovery.recoveries import INTERRUPTIONS, Course, Recovery, interrupts
from swift_ft.recovery.world_changes import WorldChange, planned_in


@dataclass(frozen=True, slots=True)
class StateChange:
    """One entry of the journal, and what it changed.

    Attributes:
        entry: the entry.
        before: the protocol's state before it.
        after: the state after it.
        ended: the recovery that ends with it, if one does. A restart of a script without a session is none:
            nobody knows what it recovers.
        world: the change to another world that it has planned, or brought further, if it has.
        incident: the incident that ends with it, if one does.
    """

    entry: Entry
    before: State
    after: State
    ended: Recovery | None = None
    world: WorldChange | None = None
    incident: Incident | None = None


@dataclass(slots=True)
class LayoutChange:
    """One change of the layout. Times are Unix seconds.

    Attributes:
        iteration: iterations that were completed.
        layers: of each stage, from then on.
        moves: what went from which worker to which.
        received: bytes of layers that each worker received, by rank.
        stopped: when the first worker had stopped for it.
        live: when all could train on.
    """

    iteration: int
    layers: StageLayers
    moves: tuple[LayerMove, ...]
    received: dict[int, int] = field(default_factory=dict)
    stopped: float = 0.0
    live: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        moves = [{"from": move.source, "to": move.target, "layers": list(move.layers)} for move in self.moves]
        received = {str(rank): size for rank, size in sorted(self.received.items())}
        return {**asdict(self), "layers": list(self.layers), "moves": moves, "received": received}


@dataclass(slots=True)
class CheckpointLoad:
    """Bytes that workers have loaded in one generation: of a run that is resumed, or in a recovery.

    Attributes:
        generation: its number.
        own_disk: bytes from the machine's own disk, by rank.
        peers: bytes from other machines' disks, by rank.
        store: bytes from the store, by rank.
    """

    generation: int
    own_disk: dict[int, int] = field(default_factory=dict)
    peers: dict[int, int] = field(default_factory=dict)
    store: dict[int, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


class History:
    """All that a journal tells, entry by entry. It grows with recoveries, not with entries.

    Args:
        began: the state before the first entry, if that is not the journal's first.

    Attributes:
        state: the protocol's state.
        started_at: Unix time of the first entry; None before it.
        steps: iterations that the workers' scripts ask for in all; None if that is unknown.
        failures: machines with workers that were lost.
        committed_at: Unix time since when the newest committed checkpoint counts; None if there is none.
        courses: of all recoveries so far; the last one may not have ended.
        layouts: all changes of the layout.
        worlds: all changes to other worlds that were planned.
        incidents: all failures that are over: training goes on, or the run has ended.
    """

    def __init__(self, began: State | None = None) -> None:
        self.state = began or State()
        self.started_at: float | None = None
        self.steps: int | None = None
        self.failures = 0
        self.committed_at: float | None = None
        self.courses: list[Course] = []
        self.layouts: list[LayoutChange] = []
        self.worlds: list[WorldChange] = []
        self.incidents: list[Incident] = []
        self._loads: dict[int, CheckpointLoad] = {}  # by generation
        self._fault: Entry | None = None  # the last one since all were live
        self._stop: Entry | None = None  # the last loss of a machine whose launcher a signal has stopped
        self._stopped_at = 0.0  # when the first worker stopped for the change of layout that is under way
        self._received: dict[int, int] = {}  # bytes of layers in this generation, by rank

    @classmethod
    def of(cls, entries: Iterable[Entry], began: State | None = None) -> History:
        """The history of a whole journal, or of a part of it."""
        history = cls(began)
        for entry in entries:
            history.apply(entry)
        return history

    @property
    def recoveries(self) -> list[Recovery]:
        """All recoveries so far. For one that has not ended, ``live`` is None."""
        return [course.recovery for course in self.courses]

    @property
    def loads(self) -> list[CheckpointLoad]:
        """Loads of checkpoints, by generation."""
        return [self._loads[generation] for generation in sorted(self._loads)]

    def lost_seconds(self, now: float | None = None) -> float:
        """From each loss to live training, all recoveries together.

        Args:
            now: up to then counts a recovery that goes on; by default it does not count.
        """
        seconds = sum(recovery.seconds for recovery in self.recoveries)
        if now is not None and self._current is not None and self.state.phase != Phase.ENDED:
            seconds += max(0.0, now - self._current.recovery.detected)
        return seconds

    def begin(self, state: State) -> None:
        """Go on from a state. What led to it is not known."""
        self.state = state

    def apply(self, entry: Entry) -> StateChange:
        """Apply the next entry; returns what it changed."""
        before, self.state = self.state, step(self.state, entry.event)
        self.started_at = entry.at if self.started_at is None else self.started_at
        if self.state.checkpoints.committed != before.checkpoints.committed:
            self.committed_at = entry.at
        match entry.event:
            case ev.MachineLost(machine=machine, starts_again=False):
                self.failures += before.slot_of(machine) is not None and before != self.state
            case ev.StatusReported(steps=steps):
                self.steps = steps or self.steps
            case ev.WorkerReady():
                self._note_load(entry.event)
            case ev.FaultInjected():
                self._fault = entry
        if self.state.tries.stopped != before.tries.stopped:
            self._stop = None if self.state.tries.stopped is None else entry
        self._note_layout(before, entry)
        world = self._note_world(before, entry)
        course = self._note_recovery(before, entry)
        incident = self._note_incident(before, entry, course)
        ended = course.recovery if course is not None and self.state.phase == Phase.LIVE else None
        return StateChange(entry, before, self.state, ended, world, incident)

    @property
    def _current(self) -> Course | None:
        return self.courses[-1] if self.courses and self.courses[-1].live is None else None

    def _note_recovery(self, before: State, entry: Entry) -> Course | None:
        """The course that ends with an entry."""
        lost = isinstance(entry.event, INTERRUPTIONS) and interrupts(before, self.state)
        if lost and self._current is None:
            self.courses.append(Course(Recovery(detected=entry.at), entry, self._fault))
            self._fault = None
        if (course := self._current) is None:
            return None
        course.apply(before, self.state, entry)
        if course.live is None:
            return None
        self._fault = None
        return course

    def _note_incident(self, before: State, entry: Entry, ended: Course | None) -> Incident | None:
        state, found = self.state, None
        over = state.phase == Phase.ENDED and before.phase != Phase.ENDED
        failed = over and state.verdict is not None and not state.verdict.ok
        # Whichever event was the last one. The end that a launcher declares says itself who has stopped it.
        if failed and state.verdict == state.tries.stopped and not isinstance(entry.event, ev.JobClosed):
            entry = end_by_stop(state, self._stop or entry)
        if ended is not None:
            found = incident_of(ended, state, self.incidents)
        elif failed and self._current is not None:
            found = incident_of_end(self._current, before, entry, self.incidents, state.verdict)
        elif over and self._current is not None:  # without a session, scripts may do without the lost one
            found = incident_of(self._current, state, self.incidents, ENDED)
        elif failed or (
            isinstance(entry.event, ev.ScriptFailed)
            and state.tries.restarts_left < before.tries.restarts_left
        ):
            found = incident_of_event(before, entry, self.incidents, state.verdict if failed else None)
        if found is not None:
            self.incidents.append(found)
        return found

    def _note_world(self, before: State, entry: Entry) -> WorldChange | None:
        if (planned := planned_in(before, self.state, entry)) is not None:
            self.worlds.append(planned)
            return planned
        current = self.worlds[-1] if self.worlds else None
        if current is None or not current.is_open or self.state is before:
            return None
        current.apply(before, self.state, entry)
        return current

    def _note_load(self, ready: ev.WorkerReady) -> None:
        if ready.loaded_own or ready.loaded_peers or ready.loaded_store:
            load = self._loads.setdefault(ready.generation, CheckpointLoad(ready.generation))
            load.own_disk[ready.rank] = ready.loaded_own
            load.peers[ready.rank] = ready.loaded_peers
            load.store[ready.rank] = ready.loaded_store

    def _note_layout(self, before: State, entry: Entry) -> None:
        event, state = entry.event, self.state
        if isinstance(event, ev.LayoutBoundaryReached) and not before.round.stopped:
            self._stopped_at = entry.at
        if isinstance(event, ev.WorkerReady) and event.received:
            self._received[event.rank] = event.received
        if state.generation != before.generation:
            self._received = {}
        if state.layouts.changes > before.layouts.changes and state.phase == Phase.LIVE:
            statuses = state.round.statuses
            moves = moves_between(
                layers_by_rank(statuses, before.layouts.current),
                layers_by_rank(statuses, state.layouts.current),
                pipelines_in(statuses),
            )
            since, layers = state.layouts.since, state.layouts.current
            times = {"stopped": self._stopped_at, "live": entry.at}
            self.layouts.append(LayoutChange(since, layers, moves, self._received, **times))
