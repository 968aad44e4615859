"""The ranges of a checkpoint's parts that a worker reads, and the source of each. Pure.

A worker that now has rows 3 to 5 of a tensor takes row 3 from the part that has rows 2 and 3, and rows 4 and
5 from the next one (Tenplex §4). A part is read from the nearest place that has its files: the machine's own
disk, the disk of another machine, the store.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Set
from dataclasses import dataclass
from typing import Generic, TypeVar

from swift_ft.recovery.layout.tensors import Ranges, count, overlap

K = TypeVar("K", bound=Hashable)
"""The name of a tensor in a state."""


@dataclass(frozen=True, slots=True)
class ReadPlan(Generic[K]):
    """The reads of a worker.

    Attributes:
        pieces: by part, the ranges of each tensor that come from it. They never overlap. The first part is
            the worker's own one.
        missing: tensors of which the parts do not have all.
    """

    pieces: Mapping[int, Mapping[K, Ranges]]
    missing: tuple[K, ...]


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


def plan_reads(wanted: Mapping[K, Ranges], held: Mapping[int, Mapping[K, Ranges]], own: int) -> ReadPlan[K]:
    """From which parts the pieces of a worker's tensors come.

    Args:
        wanted: the ranges of each tensor that the worker has.
        held: by part, the ranges that are in it. Parts of replicas have the same ones.
        own: the part that is asked first; the others follow in their order.
    """
    order = (own, *(part for part in sorted(held) if part != own))
    pieces: dict[int, dict[K, Ranges]] = {part: {} for part in order}
    missing = []
    for name, ranges in wanted.items():
        left, seen = count(ranges), set[Ranges]()
        for part in order:
            theirs = held[part].get(name)
            if not left or theirs is None or theirs in seen:
                continue
            seen.add(theirs)
            if size := count(piece := overlap(ranges, theirs)):
                pieces[part][name] = piece
                left -= size
        if left:
            missing.append(name)
    return ReadPlan(pieces, tuple(missing))


def planned_bytes(
    plan: ReadPlan[K], files: Mapping[int, FilesOfPart], here: Set[int], elsewhere: Set[int]
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
