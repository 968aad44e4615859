"""Carries out a plan of moves on arrays, and says what each device holds before and must hold after.

And what a plan of reads takes from each place, by the sizes of files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from swift_ft.recovery.layout.mesh import Layout, held_by, tiles_of
from swift_ft.recovery.layout.tensors import Ranges, StateTensor, clipped, overlap, relative
from swift_ft.recovery.moves.plan import MovePlan
from swift_ft.recovery.moves.reads import ReadPlan

Array = npt.NDArray[np.generic]
Held = dict[int, dict[str, tuple[Ranges, Array]]]


def sliced(
    tensors: Sequence[StateTensor], values: Mapping[str, Array], layout: Layout, devices: Sequence[int]
) -> Held:
    """What each device holds: the slice and its values, with zeros for padding."""
    by_name = {tensor.name: tensor for tensor in tensors}
    held: Held = {devices[slot]: {} for slot in range(layout.size)}
    for slot, slices in held_by(tensors, tiles_of(tensors, layout)).items():
        for name, ranges in slices.items():
            array = np.zeros([end - start for start, end in ranges], values[name].dtype)
            real = clipped(ranges, by_name[name].shape)
            array[relative(real, ranges)] = values[name][tuple(slice(a, b) for a, b in real)]
            held[devices[slot]][name] = (ranges, array)
    return held


def carried_out(tensors: Sequence[StateTensor], plan: MovePlan, held: Held, layout: Layout) -> Held:
    """What each device holds after a plan: allocate, copy what stays, receive what moves."""
    by_name = {tensor.name: tensor for tensor in tensors}
    dtype = {name: array.dtype for slices in held.values() for name, (_, array) in slices.items()}
    after: Held = {device: {} for device in plan.placement}
    for slot, slices in held_by(tensors, tiles_of(tensors, layout)).items():
        mine = after[plan.placement[slot]]
        for name, ranges in slices.items():
            array = np.zeros([end - start for start, end in ranges], dtype[name])
            mine[name] = (ranges, array)
            if name in held.get(plan.placement[slot], {}):
                base, old = held[plan.placement[slot]][name]
                both = clipped(overlap(ranges, base), by_name[name].shape)
                array[relative(both, ranges)] = old[relative(both, base)]
    for move in plan.moves:
        for name in move.tensors:
            assert move.source is not None
            base, old = held[move.source][name]
            ranges, array = after[move.target][name]
            array[relative(move.ranges, ranges)] = old[relative(move.ranges, base)]
    return after


@dataclass(frozen=True, slots=True)
class FilesOfPart:
    """The sizes of a part's files.

    Attributes:
        plain: of the file that says what the part has; it is read in any case.
        tensors: of the file of its tensors, which is read whole where anything in it is needed.
    """

    plain: int
    tensors: int


@dataclass(slots=True)
class PlannedBytes:
    """Bytes that a worker reads, by where they come from."""

    own_disk: int = 0
    peers: int = 0
    store: int = 0


def planned_bytes(
    plan: ReadPlan[str], files: Mapping[int, FilesOfPart], here: Set[int], elsewhere: Set[int]
) -> PlannedBytes:
    """The bytes of a plan, by where they come from.

    Args:
        files: the sizes of each part's files.
        here: parts that are on the worker's own disk.
        elsewhere: parts that are on the disks of other machines of the run.
    """
    found = PlannedBytes()
    for part, size in files.items():
        read = size.plain + (size.tensors if plan.pieces.get(part) else 0)
        if part in here:
            found.own_disk += read
        elif part in elsewhere:
            found.peers += read
        else:
            found.store += read
    return found
