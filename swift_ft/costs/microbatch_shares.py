"""Shares of microbatches for pipelines that are unlike (Oobleck §5.2, by makespan). Pure.

Oobleck minimises the variance of the pipelines' times, one count for all that have the same template. An
iteration takes as long as its slowest pipeline, so the longest time is what counts here.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

_GAIN = 1.05
"""By how much an iteration must become shorter."""


def pipeline_ns(machines: Sequence[int], microbatches: int) -> int:
    """The time of a pipeline: one microbatch through all machines, and the others through the slowest one.

    Args:
        machines: what each takes for a microbatch, all its stages together, in nanoseconds.
        microbatches: per iteration.
    """
    return sum(machines) + (microbatches - 1) * max(machines)


def share_microbatches(pipelines: Sequence[Sequence[int]], microbatches: int, fewest: int = 1) -> list[int]:
    """The microbatches of each pipeline, so that the slowest one ends as early as can be.

    One after the other goes where it ends first, which is best: the times grow with each microbatch.

    Args:
        pipelines: what each machine of each pipeline takes for a microbatch, in nanoseconds.
        microbatches: of all pipelines, at least ``fewest`` for each.
        fewest: that a pipeline can have.
    """
    counts = [fewest] * len(pipelines)
    ends = [(pipeline_ns(machines, fewest + 1), number) for number, machines in enumerate(pipelines)]
    heapq.heapify(ends)
    for _ in range(microbatches - fewest * len(pipelines)):
        end, number = heapq.heappop(ends)
        counts[number] += 1
        heapq.heappush(ends, (end + max(pipelines[number]), number))
    return counts


def worth_sharing(pipelines: Sequence[Sequence[int]], present: Sequence[int], fewest: int = 1) -> list[int]:
    """The microbatches that each pipeline should have: the best shares, unless the present ones are as good.

    Args:
        pipelines: what each machine of each pipeline takes for a microbatch, in nanoseconds.
        present: the microbatches that each has.
        fewest: that a pipeline can have.
    """
    best = share_microbatches(pipelines, sum(present), fewest)
    before, after = (max(map(pipeline_ns, pipelines, counts)) for counts in (present, best))
    return best if before >= _GAIN * after else [*present]
