"""The placement of devices in a new layout that keeps most of the state where it is. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from swift_ft.recovery.moves.assignment import Matrix, fill, gaining
from swift_ft.recovery.moves.overlaps import Group
from swift_ft.recovery.moves.sources import Location


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
