"""The plan that turns one layout into another: split, move, merge (Tenplex §4.3, Algorithm 1). Pure.

Only what a device lacks crosses a link. Unlike Tenplex the plan also chooses which device takes which slot of
the new layout, so that most stays where it is, and takes each piece from the nearest holder, among equally
near ones from the one that has sent least.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from swift_ft.errors import UsageError
from swift_ft.recovery.layout.mesh import Layout, Tiles, tiles_of
from swift_ft.recovery.layout.tensors import Ranges, StateTensor
from swift_ft.recovery.moves.overlaps import Group, groups_of
from swift_ft.recovery.moves.sources import Location, Sources, distance

_SENDERS = 8
"""The largest number of senders from which a device receives tensors that are cut alike."""


Matrix = npt.NDArray[np.int64]

_LARGEST = 2**62


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


def place(
    groups: Sequence[Group], devices: Sequence[int], slots: int, locations: Mapping[int, Location]
) -> tuple[int, ...]:
    """The device of each slot.

    The sum of bytes that stay on their devices is the largest possible. Slots of which no device holds
    anything go to the machines that hold most of them.

    Args:
        groups: what is held and wanted.
        devices: that may take slots.
        slots: how many there are.
        locations: where devices are; the whole location names the machine.
    """
    row_of = {device: row for row, device in enumerate(devices)}
    stays = np.zeros((len(devices), slots), dtype=np.int64)
    _add(stays, groups, {device: [row] for device, row in row_of.items()})
    taken = gaining(stays)
    if locations:
        rows_at: dict[Location, list[int]] = {}
        for device, row in row_of.items():
            rows_at.setdefault(locations.get(device, (device,)), []).append(row)
        near = np.zeros_like(stays)
        _add(near, groups, {d: rows_at[p] for d, p in locations.items() if p in rows_at})
        near[[row for row in taken if row >= 0], :] = 0
        near[:, [column for column, row in enumerate(taken) if row >= 0]] = 0
        taken = [new if row < 0 else row for row, new in zip(taken, gaining(near), strict=True)]
    return tuple(devices[row] for row in fill(taken, len(devices)))


def _add(gain: Matrix, groups: Sequence[Group], rows_of: Mapping[int, Sequence[int]]) -> None:
    """Adds the bytes that each row has of each slot.

    Args:
        gain: rows x slots.
        groups: what is held and wanted.
        rows_of: the rows that count as holders of what a device holds.
    """
    for group in groups:
        rows = [sorted({row for device in held for row in rows_of.get(device, ())}) for _, held in group.held]
        columns = [list(slots) for _, slots in group.wanted]
        for shared in group.overlaps:
            if rows[shared.old]:
                gain[np.ix_(rows[shared.old], columns[shared.new])] += shared.nbytes * len(group.names)


# Shortest augmenting paths with dual prices (Jonker and Volgenant 1987), each part of the problem on its own.


def assign(gain: Matrix) -> list[int]:
    """For each column its own row, with the largest sum of gains; the same input gives the same answer.

    Where several answers are best, one is preferred that gives column i its row i more often.

    Args:
        gain: not negative; rows x columns, at least as many rows as columns. The largest gain times the
            square of the number of columns must stay below 2**62.

    Raises:
        UsageError: if there are fewer rows than columns, or the gains are too large.
    """
    return fill(gaining(gain), gain.shape[0])


def gaining(gain: Matrix) -> list[int]:
    """The same, with -1 for columns that gain nothing more from one row than from another.

    Any of the rows that are left may take these columns.

    Raises:
        UsageError: as for :func:`assign`.
    """
    rows, columns = gain.shape
    if rows < columns:
        raise UsageError(f"{columns} slots need as many devices, there are {rows}: choose a smaller layout")
    if int(gain.max(initial=0)) >= _LARGEST // (columns + 1) ** 2:
        raise UsageError(f"gains of up to {gain.max()} for {columns} slots are too large: use a larger unit")
    if columns == 0:
        return []
    reduced = gain - gain.min(axis=0)  # each column is given once, so this changes no choice
    if rows == columns:
        reduced = reduced - reduced.min(axis=1)[:, None]
    taken = [-1] * columns
    for part_rows, part_columns in _parts(reduced > 0):
        weights = reduced[np.ix_(part_rows, part_columns)] * (columns + 1)
        weights = weights + (part_rows[:, None] == part_columns[None, :])
        for i, j in _match(weights.max() - weights):
            if reduced[part_rows[i], part_columns[j]] > 0:
                taken[int(part_columns[j])] = int(part_rows[i])
    return taken


def fill(taken: Sequence[int], rows: int) -> list[int]:
    """Gives each column without a row a free one: its own where that is free, else the first."""
    given, used = list(taken), set(taken)
    free = dict.fromkeys(row for row in range(rows) if row not in used)
    for column, row in enumerate(given):
        if row < 0 and column in free:
            given[column] = column
            del free[column]
    rest = iter(free)
    return [next(rest) if row < 0 else row for row in given]


def _parts(linked: npt.NDArray[np.bool_]) -> Iterator[tuple[Matrix, Matrix]]:
    """Rows and columns that are linked with each other and with no others."""
    unseen = linked.any(axis=1)
    while unseen.any():
        rows = np.zeros(linked.shape[0], dtype=bool)
        columns = np.zeros(linked.shape[1], dtype=bool)
        new = np.zeros_like(rows)
        new[int(np.argmax(unseen))] = True
        while new.any():
            rows |= new
            reached = linked[new].any(axis=0) & ~columns
            columns |= reached
            new = linked[:, reached].any(axis=1) & ~rows
        unseen &= ~rows
        yield np.flatnonzero(rows), np.flatnonzero(columns)


def _match(cost: Matrix) -> list[tuple[int, int]]:
    """Pairs of row and column with the smallest sum; all of the shorter side are in a pair."""
    if cost.shape[0] > cost.shape[1]:
        return [(i, j) for j, i in _match(np.ascontiguousarray(cost.T))]
    rows, columns = cost.shape
    row_price, column_price = cost.min(axis=1), np.zeros(columns, dtype=np.int64)
    row_of, column_of = np.full(columns, -1, dtype=np.int64), np.full(rows, -1, dtype=np.int64)
    for row in range(rows):  # what needs no path
        tight = np.flatnonzero((cost[row] == row_price[row]) & (row_of < 0))
        if tight.size:
            row_of[tight[0]], column_of[row] = row, tight[0]
    for alone in np.flatnonzero(column_of < 0):
        _augment(cost, int(alone), row_price, column_price, row_of, column_of)
    return [(i, int(column_of[i])) for i in range(rows)]


def _augment(
    cost: Matrix, start: int, row_price: Matrix, column_price: Matrix, row_of: Matrix, column_of: Matrix
) -> None:
    """Finds the cheapest path from a row without a column to a column without a row, and takes it."""
    distance = cost[start] - row_price[start] - column_price
    before = np.full(distance.shape, start)
    done = np.zeros(distance.shape, dtype=bool)
    passed = [start]
    while True:
        open_distance = np.where(done, np.iinfo(np.int64).max, distance)
        low = int(open_distance.min())
        nearest = np.flatnonzero(open_distance == low)
        free = nearest[row_of[nearest] < 0]
        column = int(free[0]) if free.size else int(nearest[0])
        if free.size:
            break
        done[column] = True
        row = int(row_of[column])
        passed.append(row)
        onward = low + cost[row] - row_price[row] - column_price
        nearer = ~done & (onward < distance)
        distance[nearer], before[nearer] = onward[nearer], row
    row_price[start] += low
    others = np.array(passed[1:], dtype=np.int64)
    row_price[others] += low - distance[column_of[others]]
    column_price[done] += distance[done] - low
    while True:
        row = int(before[column])
        row_of[column] = row
        column_of[row], column = column, int(column_of[row])
        if row == start:
            return
