"""A hang is located: where the scripts of all workers are, in groups, the odd ones first. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swift_ft.coordination.progress import STANDS, Stand
from swift_ft.plain import from_plain
from swift_ft.units import named

MOST_FRAMES = 6
"""Of the stack of a worker that does not wait for others. Notes of many workers share a key of the store."""
MOST_FRAMES_OF_WAITS = 3
"""Of one that does. As a rule these are all workers but one."""


@dataclass(frozen=True, slots=True)
class Group:
    """Workers that are at the same place.

    Attributes:
        ranks: all of its workers.
        stand: where they are.
    """

    ranks: tuple[int, ...]
    stand: Stand

    def in_words(self) -> str:
        """One sentence, with the stack of its first worker."""
        several = len(self.ranks) > 1
        waits = f", and wait{'s' * (not several)} for other workers" if self.stand.waits else ""
        stack = f": {' < '.join(self.stand.stack)}" if len(self.stand.stack) > 1 else ""
        return f"{named('worker', self.ranks)} {'are' if several else 'is'} {self.stand.place}{waits}{stack}"


def grouped(progress: Mapping[int, Mapping[str, Any]], iteration: int) -> list[Group]:
    """The workers that stand, by place: first those that do not wait for others, smaller groups first.

    Args:
        progress: of all workers, by rank.
        iteration: that does not end. What a worker has said of another one is over, unless it is behind.
    """
    places: dict[tuple[str, bool, int], list[int]] = defaultdict(list)
    stands: dict[int, Stand] = {}
    for rank, facts in sorted(progress.items()):
        if STANDS in facts:
            stands[rank] = stand = from_plain(Stand, facts[STANDS])
            if stand.iteration <= iteration:
                places[stand.place, stand.waits, stand.iteration].append(rank)
    groups = [Group(tuple(ranks), stands[ranks[0]]) for ranks in places.values()]
    return sorted(groups, key=_oddness)


def _oddness(group: Group) -> tuple[bool, bool, int, tuple[int, ...]]:
    return group.stand.waits, group.stand.backward, len(group.ranks), group.ranks


def in_words(groups: Sequence[Group], workers: int) -> str:
    """All of them; the others most likely wait for the first.

    Args:
        groups: see :func:`grouped`.
        workers: the number of them in the job.
    """
    return ". ".join(_sentences(groups, workers))


def _sentences(groups: Sequence[Group], workers: int) -> Iterator[str]:
    for group in groups:
        yield _capitalized(group.in_words())
    known = {rank for group in groups for rank in group.ranks}
    if unknown := [rank for rank in range(workers) if rank not in known]:
        yield _capitalized(f"{named('worker', unknown)} said nothing of a wait")


def _capitalized(sentence: str) -> str:
    return sentence[0].upper() + sentence[1:]
