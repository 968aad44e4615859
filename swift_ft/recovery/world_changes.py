"""Changes to other worlds, as the journal tells them: when each was planned, prepared and live. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from swift_ft.recovery import events as ev
from swift_ft.recovery.entries import Entry
from swift_ft.recovery.handlers.worlds import all_offered, all_prepared
from swift_ft.recovery.job_state import Phase, State


@dataclass(slots=True)
class WorldChange:
    """One change to another world. Times are Unix seconds; None for what it has not come to.

    Attributes:
        world: the number of the next world.
        machines: of its slots, by name.
        reason: why, in words.
        asked_by: who asked for it.
        planned: when it was asked for.
        prepared: when all workers of the next world waited for their state.
        iteration: completed iterations at which all stopped for it; None before that was known.
        stopped: when the first worker had stopped, and had a copy of its state to offer.
        offered: when all had.
        switched: when all workers of the next world had their state, and it took over.
        live: when all of them could train.
        ended: when it was given up.
        given_up: why; empty if it was not.
        own: bytes of state that each worker of the next world read from its own machine's memory, by rank.
        peers: bytes that came from other machines.
    """

    world: int
    machines: tuple[str, ...]
    reason: str
    asked_by: str
    planned: float
    prepared: float | None = None
    iteration: int | None = None
    stopped: float | None = None
    offered: float | None = None
    switched: float | None = None
    live: float | None = None
    ended: float | None = None
    given_up: str = ""
    own: dict[int, int] = field(default_factory=dict)
    peers: dict[int, int] = field(default_factory=dict)

    @property
    def pause_s(self) -> float | None:
        """Seconds from the first worker that had stopped to training in the next world; None if it is not."""
        return None if self.live is None or self.stopped is None else self.live - self.stopped

    @property
    def is_open(self) -> bool:
        """Whether it is under way: neither do all train in the next world, nor was it given up."""
        return self.live is None and self.ended is None

    def apply(self, before: State, state: State, entry: Entry) -> None:
        """Note an entry after the one that planned it, with the state before and after it."""
        if before.worlds.change is not None:
            self._note_progress(state, entry)
        if self.switched is not None and state.phase == Phase.LIVE:
            self.live = entry.at
        elif state.phase == Phase.ENDED:
            self.ended, self.given_up = entry.at, "the run has ended"

    def _note_progress(self, state: State, entry: Entry) -> None:
        change, event = state.worlds.change, entry.event
        if isinstance(event, ev.StateTaken) and event.world == self.world:
            self.own[event.rank], self.peers[event.rank] = event.own, event.peers
        if state.worlds.present.number == self.world:
            self.switched = entry.at
            return
        if change is None:
            self.ended, self.given_up = entry.at, state.worlds.given_up
            return
        if self.prepared is None and all_prepared(state, change):
            self.prepared = entry.at
        if state.layouts.pending is not None and state.layouts.pending.world:
            self.iteration = state.layouts.pending.iteration
        if self.stopped is None and change.offered:
            self.stopped = entry.at
        if self.offered is None and all_offered(state, change):
            self.offered = entry.at

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        sizes = {
            name: {str(rank): size for rank, size in sorted(of.items())}
            for name, of in (("own", self.own), ("peers", self.peers))
        }
        return {**asdict(self), "machines": list(self.machines), "pause_s": self.pause_s, **sizes}


def planned_in(before: State, state: State, entry: Entry) -> WorldChange | None:
    """The change that begins with an entry, if one does."""
    event = entry.event
    if not isinstance(event, ev.ChangePlanned) or state.worlds.change is before.worlds.change:
        return None
    return WorldChange(event.world, event.machines, event.reason, event.asked_by, entry.at)
