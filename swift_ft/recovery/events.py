"""What can happen to a job: the vocabulary of the journal.

Every participant reads the same events in the same order (`recovery/journal.py`) and feeds them to the same
pure state machine (`recovery/protocol.py`). Events are facts, told by whoever saw them first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from swift_ft.errors import SwiftError

__all__ = [
    "EVENTS",
    "WANTED_AHEAD",
    "Bare",
    "CannotHelp",
    "CannotReplay",
    "CheckpointWanted",
    "Closed",
    "Committed",
    "Durable",
    "Entry",
    "Event",
    "Exited",
    "Failed",
    "Finished",
    "Injected",
    "Interrupted",
    "Joined",
    "Lost",
    "Opened",
    "Ready",
    "Reported",
    "TimedOut",
    "event_from_dict",
    "event_to_dict",
]


@dataclass(frozen=True, slots=True)
class Opened:
    """The job's shape. The first event of every journal.

    Attributes:
        machines: number of slots to be filled.
        workers: workers per machine; a worker's rank is ``slot * workers + local_rank``.
        restarts: how often a failing script may be started again (torchrun's ``--max-restarts``).
        max_failures: machines lost since the last committed checkpoint after which the job stops; None for no
            limit.
        checkpoint: iteration of the last committed global checkpoint in the store, if there is one.
    """

    machines: int
    workers: int = 1
    restarts: int = 0
    max_failures: int | None = None
    checkpoint: int | None = None


@dataclass(frozen=True, slots=True)
class Joined:
    """A machine offers itself, for the slot it prefers or for any.

    ``address`` (``host:port``) is where its neighbour watches it (`launch/sentinel.py`).
    """

    machine: str
    preferred_slot: int | None = None
    address: str = ""


@dataclass(frozen=True, slots=True)
class Lost:
    """A machine counts as failed, whatever showed it. It can come back only under another name.

    ``reporter`` is the machine that found it, empty for one that tells of itself: what a fenced machine says
    of others when it wakes up does not count.
    """

    machine: str
    reason: str
    reporter: str = ""


@dataclass(frozen=True, slots=True)
class Bare:
    """The workers of a machine run a script without a session: they can only be restarted."""

    machine: str
    generation: int


@dataclass(frozen=True, slots=True)
class Reported:
    """A worker has left its old groups and flushed its log, and says where it stands.

    Attributes:
        rank: the worker.
        generation: the generation that asked.
        iteration: iterations that its state has completed; None if it has no state yet.
        live: False while its state is still being replayed.
        stages: the pipeline stages on this worker.
        pipeline_known: the shapes of its stages' messages are known, so no live warm-up is needed.
        dirty: why its state is neither before nor after an iteration and cannot be brought back, if so.
        holds: names of the parts whose whole state is on this worker; who holds the same is a replica.
        undoable: indices of the parameters that the last completed iteration updated, where that can still be
            undone. Told in pipelines only, where stages may be apart.
        pipeline: tells the pipeline of its stages from the replicas of that pipeline.
        updated: indices of the parameters that the interrupted iteration has updated, and that can be undone.
        group: machines of one group recover together, and log no messages to each other; None where each
            machine is a group of its own.
        serves: it has all that it sent in its last completed iteration, in its log or in memory.
        linked: stages of other workers, besides the neighbouring ones, to which it also sends messages.
        parts: among how many workers a replay of its stages can be spread, and it can help another; 1 where
            it cannot.
    """

    rank: int
    generation: int
    iteration: int | None
    live: bool = False
    stages: tuple[int, ...] = ()
    pipeline_known: bool = False
    dirty: str | None = None
    holds: tuple[str, ...] = ()
    pipeline: int = 0
    undoable: tuple[int, ...] = ()
    updated: tuple[int, ...] = ()
    serves: bool = True
    group: int | None = None
    parts: int = 1
    linked: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Ready:
    """A worker has done its part of the plan and can go live.

    Attributes:
        rank: the worker.
        generation: of the plan.
        replayed: iterations that it has replayed.
        from_peers: bytes of segments that it got for that from those who wrote them.
        from_store: and from the store.
    """

    rank: int
    generation: int
    replayed: int = 0
    from_peers: int = 0
    from_store: int = 0


@dataclass(frozen=True, slots=True)
class CannotReplay:
    """A worker's replay is impossible: a log is missing, torn, corrupt, or diverged."""

    rank: int
    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class CannotHelp:
    """A survivor cannot take over microbatches of a replay: it goes on without helpers."""

    rank: int
    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class Interrupted:
    """Communication broke in a worker, and nobody was found dead within the deadline."""

    rank: int
    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class Durable:
    """A worker's part of a global checkpoint is in the store.

    ``epoch`` counts the fallbacks: parts of different histories never make one checkpoint. ``generation`` is
    the one that it was saved in, however long it took to be written: a part does not count if its worker was
    replaced since, or has taken the iteration back.
    """

    rank: int
    iteration: int
    epoch: int
    generation: int
    path: str


@dataclass(frozen=True, slots=True)
class Committed:
    """The marker of a global checkpoint is in the store."""

    iteration: int
    epoch: int


WANTED_AHEAD = 2
"""How far before its asker an early checkpoint is: the iteration in which all learn of it lies between."""


@dataclass(frozen=True, slots=True)
class CheckpointWanted:
    """A worker asks that everybody saves before the regular checkpoint is due: its log nears its budget.

    It asks between two steps, so all others have completed as many iterations as itself, or one less.

    Attributes:
        rank: who asks.
        iteration: completed iterations to save: :data:`WANTED_AHEAD` more than the asker has completed.
        generation: that it trains in.
        reason: why, in words.
    """

    rank: int
    iteration: int
    generation: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Finished:
    """A worker has completed its last iteration; it stays until everybody has."""

    rank: int
    generation: int


@dataclass(frozen=True, slots=True)
class Exited:
    """All workers of a machine, as started in generation ``launched``, ended with exit code 0."""

    machine: str
    launched: int


@dataclass(frozen=True, slots=True)
class Failed:
    """A script, as started in generation ``launched``, raised or exited with an error of its own.

    That is no machine's death.
    """

    machine: str
    launched: int
    reason: str
    exit_code: int = 1
    usage: bool = False


@dataclass(frozen=True, slots=True)
class TimedOut:
    """Machines did not answer before a deadline of a phase: in the next one they may be in time."""

    generation: int
    phase: str
    machines: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Closed:
    """The job ends by will (Ctrl-C, SIGTERM) or because no way on is left."""

    reason: str
    exit_code: int = 1


@dataclass(frozen=True, slots=True)
class Injected:
    """A fault of a test is about to happen; each happens once in a run."""

    fault: str


Event = (
    Opened
    | Joined
    | Lost
    | Bare
    | Reported
    | Ready
    | CannotReplay
    | CannotHelp
    | Interrupted
    | Durable
    | Committed
    | CheckpointWanted
    | Finished
    | Exited
    | Failed
    | TimedOut
    | Closed
    | Injected
)

EVENTS: dict[str, type[Event]] = {cls.__name__: cls for cls in Event.__args__}


def event_to_dict(event: Event) -> dict[str, Any]:
    """An event as a JSON-ready dictionary; ``event`` holds its name."""
    return {"event": type(event).__name__, **dataclasses.asdict(event)}


def event_from_dict(data: dict[str, Any]) -> Event:
    """The inverse of :func:`event_to_dict`; unknown keys (time, origin) are left to the caller.

    Raises:
        SwiftError: for an event that this version does not know.
    """
    cls = EVENTS.get(data["event"])
    if cls is None:
        raise SwiftError(
            f"The journal holds the unknown event {data['event']!r}: "
            "all machines of a job must run the same version of swift_ft."
        )
    fields = {f.name for f in dataclasses.fields(cls)}
    values: dict[str, Any] = {
        k: tuple(v) if isinstance(v, list) else v for k, v in data.items() if k in fields
    }
    make: Callable[..., Event] = cls
    return make(**values)


@dataclass(frozen=True, slots=True)
class Entry:
    """One event in its place.

    Attributes:
        position: 0 for the first.
        event: what happened.
        at: Unix time in seconds, by the clock of whoever wrote it.
        by: who wrote it.
    """

    position: int
    event: Event
    at: float
    by: str

    def to_dict(self) -> dict[str, object]:
        """A JSON-ready dictionary."""
        return {"position": self.position, "at": self.at, "by": self.by, **event_to_dict(self.event)}
