"""The plan that turns one layout into another: split, move, merge (Tenplex §4.3, Algorithm 1). Pure.

Only what a device lacks crosses a link. Unlike Tenplex the plan also chooses which device takes which slot of
the new layout, so that most stays where it is, and takes each piece from the nearest holder, among equally
near ones from the one that has sent least.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

from swift_ft.errors import UsageError
from swift_ft.recovery.layout.mesh import Layout, Tiles, tiles_of
from swift_ft.recovery.layout.tensors import Ranges, StateTensor
from swift_ft.recovery.moves.overlaps import Group, groups_of
from swift_ft.recovery.moves.placement import place
from swift_ft.recovery.moves.sources import Location, Sources, distance

_SENDERS = 8
"""What a device receives of tensors that are cut alike comes from so many senders at most."""


class Move(NamedTuple):
    """The same slice of some tensors of one shape, that a device receives.

    Attributes:
        tensors: their names.
        ranges: within each whole tensor.
        source: the device that sends it; None if no living device holds it, so that a checkpoint must.
        target: the device that receives it.
        nbytes: over all these slices.
    """

    tensors: tuple[str, ...]
    ranges: Ranges
    source: int | None
    target: int
    nbytes: int


@dataclass(frozen=True)
class MovePlan:
    """The moves of each device.

    A device allocates its new slices (padding is zero), copies what it holds of them, sends and receives its
    moves. Moves of one slice never overlap with each other, nor with what the device holds.

    Attributes:
        placement: by slot of the new layout, the device that takes it.
        moves: tensors that are divided alike follow each other.
        kept_bytes: what devices hold already of their new slices.
    """

    placement: tuple[int, ...]
    moves: tuple[Move, ...]
    kept_bytes: int

    @property
    def moved_bytes(self) -> int:
        """All bytes that devices receive, from each other or from a checkpoint."""
        return sum(move.nbytes for move in self.moves)

    def bytes_by_source(self) -> dict[int | None, int]:
        """Bytes that each device sends; None stands for the checkpoint."""
        sent: Counter[int | None] = Counter()
        for move in self.moves:
            sent[move.source] += move.nbytes
        return dict(sent)

    def bytes_by_distance(self, locations: Mapping[int, Location]) -> dict[int, int]:
        """Bytes by the number of levels between source and target, without those from a checkpoint."""
        crossed: Counter[int] = Counter()
        for move in self.moves:
            if move.source is not None:
                crossed[distance(locations.get(move.source, ()), locations.get(move.target, ()))] += (
                    move.nbytes
                )
        return dict(crossed)


def plan_moves(
    tensors: Sequence[StateTensor],
    old: tuple[Layout, Sequence[int]],
    new: tuple[Layout, Sequence[int]],
    *,
    lost: Sequence[int] = (),
    locations: Mapping[int, Location] | None = None,
    in_order: bool = False,
) -> MovePlan:
    """The plan from an old layout to a new one.

    Args:
        tensors: the whole state.
        old: the layout, and the device of each of its slots.
        new: the layout, and the devices that may take its slots, at least as many.
        lost: devices that hold nothing any more.
        locations: where each device is, outermost first: ``(rack, machine)``. Without, all are equally far.
        in_order: whether slot i goes to the i-th device, instead of where most stays.

    Raises:
        UsageError: if the devices do not fit the layouts.
    """
    (old_layout, old_devices), (new_layout, devices) = old, new
    if len(old_devices) != old_layout.size or len(set(old_devices)) != len(old_devices):
        raise UsageError(f"the old layout has {old_layout.size} slots: name as many different devices")
    if len(devices) < new_layout.size or len(set(devices)) != len(devices) or set(devices) & set(lost):
        raise UsageError(f"the new layout has {new_layout.size} slots: name as many different living devices")
    wanted = tiles_of(tensors, new_layout)
    held = _on_devices(tiles_of(tensors, old_layout), old_devices, set(lost))
    groups, where = groups_of(tensors, held, wanted), locations or {}
    placement = tuple(devices[: new_layout.size])
    if not in_order:
        placement = place(groups, devices, new_layout.size, where)
    moves, kept = _moves(groups, placement, Sources(where))
    return MovePlan(placement, moves, kept)


def _on_devices(tiles: Sequence[Tiles], devices: Sequence[int], lost: Set[int]) -> list[Tiles]:
    """Slices with the living devices that hold them, instead of slots. What was one object stays one."""
    made: dict[int, Tiles] = {}
    for slices in tiles:
        if id(slices) not in made:
            made[id(slices)] = tuple(
                (ranges, tuple(devices[slot] for slot in slots if devices[slot] not in lost))
                for ranges, slots in slices
            )
    return [made[id(slices)] for slices in tiles]


def _moves(
    groups: Sequence[Group], placement: Sequence[int], sources: Sources
) -> tuple[tuple[Move, ...], int]:
    """All moves, and the bytes that stay where they are."""
    moves, kept = [], 0
    for group in groups:
        holders = [frozenset(held) for _, held in group.held]
        targets = [[placement[slot] for slot in slots] for _, slots in group.wanted]
        for old, new, ranges, nbytes in group.overlaps:
            have, held = holders[old], group.held[old][1]
            kept += nbytes * len(group.names) * sum(target in have for target in targets[new])
            shares = _shares(group.names, min(len(held), _SENDERS))
            for target in targets[new]:
                if target not in have:
                    for names in shares:
                        size = nbytes * len(names)
                        moves.append(Move(names, ranges, sources.choose(held, target, size), target, size))
    return tuple(moves), kept


def _shares(names: Sequence[str], parts: int) -> list[tuple[str, ...]]:
    """The names in up to so many parts, each of which another device can send."""
    size = -(-len(names) // max(parts, 1))
    return [tuple(names[i : i + size]) for i in range(0, len(names), size)]
