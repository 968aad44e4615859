"""Reconciling pipelines that are replicas of each other, layer by layer (paper §4; Oobleck §5). Pure.

Their cuts differ, so no worker holds what another one holds. But each layer is in every pipeline, and its
state comes from wherever it is whole. The first of these ways that is possible makes all equal again:

    nothing    all have completed the same iteration
    forward    for each layer somebody has completed the interrupted iteration, or can do so without others,
               since it has all averages of gradients: the others get its state
    back       for each layer somebody has not updated it: the others get that state
    undo       a layer that all have updated: one of them undoes its update, and the others get its state
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field

from swift_ft.recovery.events import StatusReported
from swift_ft.recovery.reconcile import Transfer


@dataclass(frozen=True, slots=True)
class LayerReconciliation:
    """The acts of workers that bring all layers to one iteration.

    Attributes:
        iteration: iterations that all have completed afterwards.
        completing: ranks that complete the interrupted iteration first.
        undo: by rank, parameters whose update is undone, before any transfer.
        transfers: of layers, in the order in which they are done.
    """

    iteration: int
    completing: frozenset[int] = frozenset()
    undo: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    transfers: tuple[Transfer, ...] = ()


def reconcile_layers(
    statuses: Mapping[int, StatusReported], placed: Mapping[int, Sequence[int]]
) -> LayerReconciliation | None:
    """Bring all layers to the latest iteration to which each of them can be brought.

    A worker that needs another state of one of its layers gets all of them: what belongs to no layer, such as
    a scheduler, comes with them.

    Args:
        statuses: one report per rank.
        placed: the layers of each rank.

    Returns:
        None if there is no such iteration (:func:`why_no_layers`).
    """
    latest = max((s.iteration for s in _whole(statuses).values() if s.iteration is not None), default=None)
    if latest is None:
        return None
    for iteration in (latest, latest - 1):
        if (found := _at(iteration, statuses, placed)) is not None:
            return found
    return None


def why_no_layers(statuses: Mapping[int, StatusReported], placed: Mapping[int, Sequence[int]]) -> str:
    """Why :func:`reconcile_layers` has found nothing."""
    whole = _whole(statuses)
    held = {layer for rank in whole for layer in placed[rank]}
    lost = sorted({layer for layers in placed.values() for layer in layers} - held)
    if lost:
        layers = ", ".join(map(str, lost))
        dirty = next((f": {s.dirty}" for s in statuses.values() if s.live and s.dirty), "")
        return f"no pipeline has a whole state of layer{'s' * (len(lost) > 1)} {layers}{dirty}"
    return "some layers have been updated everywhere, which cannot be undone, and others nowhere"


def _whole(statuses: Mapping[int, StatusReported]) -> dict[int, StatusReported]:
    return {r: s for r, s in statuses.items() if s.live and s.iteration is not None and not s.dirty}


def _at(
    iteration: int, statuses: Mapping[int, StatusReported], placed: Mapping[int, Sequence[int]]
) -> LayerReconciliation | None:
    """The undos and transfers that bring all workers to an iteration; None if a layer cannot get there."""
    whole = _whole(statuses)
    there = {rank for rank, s in whole.items() if s.iteration == iteration and not s.updated}
    undoable = {rank: undoes for rank, s in whole.items() if (undoes := _undoes(s, iteration)) is not None}
    holders: dict[int, list[int]] = {}
    for rank in sorted(placed):
        for layer in placed[rank]:
            holders.setdefault(layer, []).append(rank)
    completing = {rank for rank, s in whole.items() if s.completes and s.iteration == iteration - 1}
    needed: set[int] = set()
    undo: dict[int, tuple[int, ...]] = {}
    source: dict[int, int] = {}
    for layer, ranks in sorted(holders.items()):
        if (first := _first(ranks, there)) is not None:
            source[layer] = first
        elif (first := _first(ranks, completing)) is not None:
            source[layer] = first
            needed.add(first)
        elif (first := _first(ranks, undoable)) is not None:
            source[layer] = first
            undo[first] = undoable[first]
        else:
            return None
    transfers: dict[tuple[int, int], list[int]] = {}
    for rank in sorted(placed.keys() - there - needed):
        for layer in placed[rank]:
            if source[layer] != rank:
                transfers.setdefault((source[layer], rank), []).append(layer)
    return LayerReconciliation(iteration, frozenset(needed), undo, _joined(transfers))


def _first(ranks: Sequence[int], among: Container[int]) -> int | None:
    return next((rank for rank in ranks if rank in among), None)


def _undoes(status: StatusReported, iteration: int) -> tuple[int, ...] | None:
    """The parameters whose update a worker undoes to have the state of an iteration; None if it cannot."""
    if status.iteration == iteration:
        return status.updated or None
    return status.undoable if status.iteration == iteration + 1 and status.goes_back else None


def _joined(transfers: Mapping[tuple[int, int], Sequence[int]]) -> tuple[Transfer, ...]:
    """Transfers with one source and the same layers, joined: these are sent to all their targets at once."""
    targets: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for (source, target), layers in transfers.items():
        targets.setdefault((source, tuple(layers)), []).append(target)
    return tuple(
        Transfer(source, tuple(ranks), layers=layers) for (source, layers), ranks in sorted(targets.items())
    )
