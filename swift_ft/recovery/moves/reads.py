"""The ranges of a checkpoint's parts that a worker reads, and the source of each. Pure.

A worker that now has rows 3 to 5 of a tensor takes row 3 from the part that has rows 2 and 3, and rows 4 and
5 from the next one (Tenplex §4). A part is read from the nearest place that has its files: the machine's own
disk, the disk of another machine, the store.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
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
