"""What every participant of a job knows: the state that the protocol steps from event to event. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from swift_ft.recovery import events as ev
from swift_ft.recovery.plan import Plan

__all__ = ["Phase", "State", "Verdict"]


class Phase(StrEnum):
    """Where the job stands."""

    FORMING = "forming"
    AGREEING = "agreeing"
    RECOVERING = "recovering"
    LIVE = "live"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Verdict:
    """How the job ended."""

    ok: bool
    reason: str
    exit_code: int = 0


@dataclass(frozen=True, slots=True)
class State:
    """What every participant knows. Never changed in place.

    Invariants:
        a machine is in at most one of ``members``, ``spares``, ``fenced``;
        ``launched[slot] <= generation``; ``committed`` never decreases;
        ``plan`` is set exactly in RECOVERING and LIVE;
        log segments of generations before ``log_since`` belong to a history that was given up;
        ``must_fall_back`` stays until a fallback is done: in the middle of it, states are of two histories;
        ``wanted``, an early checkpoint that was asked for, is of this generation, and after ``committed``;
        a part of an iteration that its worker took back counts only if it was saved in the generation that
        ``taken_back`` names, by iteration and rank, or later; all these iterations are after ``committed``;
        ``rebuilding`` says up to where the last plan replays, by rank, until everybody is live;
        ``unaided`` says why nobody helps in replays, until everybody is live;
        ``restored`` are iterations, by rank, before which a worker's log has gaps, since a replica gave it
        its state; all of them are after ``committed``;
        ``sessions`` is set once any worker has reported: the script is the same for all.
    """

    machines: int = 0
    workers: int = 1
    restarts_left: int = 0
    max_failures: int | None = None
    phase: Phase = Phase.FORMING
    generation: int = 0
    epoch: int = 0
    log_since: int = 0
    members: tuple[str | None, ...] = ()
    launched: tuple[int, ...] = ()
    spares: tuple[tuple[str, int | None], ...] = ()
    addresses: Mapping[str, str] = field(default_factory=dict)
    fenced: frozenset[str] = frozenset()
    restart_all: bool = False
    injected: frozenset[str] = frozenset()
    reports: Mapping[int, ev.Reported] = field(default_factory=dict)
    rebuilding: Mapping[int, int] = field(default_factory=dict)
    restored: Mapping[int, int] = field(default_factory=dict)
    sessions: bool = False
    bare: frozenset[int] = frozenset()
    plan: Plan | None = None
    ready: frozenset[int] = frozenset()
    must_fall_back: str | None = None
    unaided: str | None = None
    committed: int | None = None
    wanted: int | None = None
    durable: Mapping[int, Mapping[int, str]] = field(default_factory=dict)
    taken_back: Mapping[tuple[int, int], int] = field(default_factory=dict)
    finished: frozenset[int] = frozenset()
    exited: frozenset[int] = frozenset()
    failures: int = 0
    resumed: int = 0
    interruptions: int = 0
    failed_fallbacks: int = 0
    verdict: Verdict | None = None

    @property
    def world(self) -> int:
        """Number of workers."""
        return self.machines * self.workers

    def slot_of(self, machine: str) -> int | None:
        """The slot that a machine fills, or None."""
        return self.members.index(machine) if machine in self.members else None

    def ranks_of(self, slot: int) -> range:
        """The ranks of the workers on a slot's machine."""
        return range(slot * self.workers, (slot + 1) * self.workers)

    def missing(self) -> tuple[str, ...]:
        """Machines whose answer the current phase waits for."""
        if self.phase == Phase.AGREEING:
            open_ranks = set(range(self.world)) - set(self.reports)
            open_slots = {r // self.workers for r in open_ranks} - self.bare
        elif self.phase == Phase.RECOVERING:
            open_ranks = set(range(self.world)) - self.ready
            shared = self.plan.shared if self.plan is not None else ()
            helpers = {rank for replay in shared for rank in replay.helpers}
            # A helper is done when those are whom it helps.
            open_slots = {r // self.workers for r in open_ranks - helpers or open_ranks}
        else:
            return ()
        return tuple(m for slot in sorted(open_slots) if (m := self.members[slot]) is not None)
