"""The moves of layers in a run, their times and sizes, read from the journal. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from swift_ft.recovery import events as ev
from swift_ft.recovery.entries import Entry
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.layout.stage_layers import (
    LayerMove,
    StageLayers,
    layers_by_rank,
    moves_between,
    pipelines_in,
)
from swift_ft.recovery.protocol import step


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


def layout_changes(entries: Iterable[Entry], began: State | None = None) -> list[LayoutChange]:
    """All changes of a run, in their order.

    Args:
        began: the state before the first of them, if that is not the journal's first.
    """
    found: list[LayoutChange] = []
    state, stopped, received = began or State(), 0.0, dict[int, int]()
    for entry in entries:
        before, state = state, step(state, entry.event)
        if isinstance(entry.event, ev.LayoutBoundaryReached) and not before.round.stopped:
            stopped = entry.at
        if isinstance(entry.event, ev.WorkerReady) and entry.event.received:
            received[entry.event.rank] = entry.event.received
        if state.generation != before.generation:
            received = {}
        if state.layouts.changes > before.layouts.changes and state.phase == Phase.LIVE:
            statuses = state.round.statuses
            moves = moves_between(
                layers_by_rank(statuses, before.layouts.current),
                layers_by_rank(statuses, state.layouts.current),
                pipelines_in(statuses),
            )
            change = LayoutChange(state.layouts.since, state.layouts.current, moves, received)
            change.stopped, change.live = stopped, entry.at
            found.append(change)
    return found
