"""The paper's greedy algorithm for groups (§5.3), and the balanced partition for comparison."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from swift_ft.errors import UsageError
from swift_ft.planning.grouping.chain import Chain


@dataclass(frozen=True)
class Merge:
    """One step of the greedy algorithm: the group that begins at ``start`` joins the one before it.

    Attributes:
        start: first machine of the right one of the two groups.
        saved_bytes: bytes per iteration that are no longer logged: ΔM / T.
        added_s: ΔR, seconds per replayed iteration, with equal failure probabilities.
    """

    start: int
    saved_bytes: int
    added_s: float


def greedy_merges(chain: Chain) -> Iterator[Merge]:
    """Repeatedly merges the two neighbouring groups with the smallest ΔR/ΔM, until one group is left (§5.3).

    As in the paper, all machines count as equally likely to fail; the profile's weights are ignored. Among
    equal ratios the leftmost is merged first, which the paper leaves open. A boundary without traffic saves
    nothing, so it is merged last. O(N log N) with a heap; the paper's bound is O(N^2).
    """
    n = chain.n
    right_end = list(range(1, n + 1))  # by start of a group: where it ends
    left_start = list(range(-1, n - 1))  # by start of a group: where the one before it begins
    version = [0] * n  # by start of a group: grows when the group or the one before it changes
    sizes = chain.profile.boundary_bytes
    end_time, start_time, share = chain.end_time.tolist(), chain.start_time.tolist(), chain.share.tolist()

    def cost(i: int, j: int) -> float:
        seconds: float = (end_time[j] - start_time[i]) * share[j - i] * (j - i) / n
        return seconds

    def entry(start: int) -> tuple[float, int, int, float]:
        i, j = left_start[start], right_end[start]
        added = cost(i, j) - cost(i, start) - cost(start, j)
        size = sizes[start - 1]
        return (added / size if size else float("inf"), start, version[start], added)

    heap = [entry(start) for start in range(1, n)]
    heapq.heapify(heap)
    while heap:
        _, start, seen, added = heapq.heappop(heap)
        if seen != version[start]:
            continue
        i, j = left_start[start], right_end[start]
        version[start] = -1
        right_end[i] = j
        yield Merge(start, sizes[start - 1], added)
        if j < n:
            left_start[j] = i
            version[j] += 1
            heapq.heappush(heap, entry(j))
        if i > 0:
            version[i] += 1
            heapq.heappush(heap, entry(i))


def greedy_partition(chain: Chain, limit: int) -> tuple[int, ...]:
    """Where the groups begin once greedy merging has reached ``limit`` bytes per iteration."""
    left = sum(chain.profile.boundary_bytes)
    gone = [False] * chain.n
    merges = greedy_merges(chain)
    while left > limit:
        merge = next(merges)
        gone[merge.start] = True
        left -= merge.saved_bytes
    return tuple(start for start in range(chain.n) if not gone[start])


def balanced_partition(chain: Chain, limit: int) -> tuple[int, ...]:
    """The most groups of nearly equal size (larger ones first) that keep ``limit`` bytes per iteration.

    Raises:
        UsageError: never for a limit of zero or more, since one group logs nothing.
    """
    before = np.concatenate(([0], chain.boundary))
    for k in range(chain.n, 0, -1):
        size, larger = divmod(chain.n, k)
        index = np.arange(k)
        starts = index * size + np.minimum(index, larger)
        if int(before[starts].sum()) <= limit:
            return tuple(starts.tolist())
    raise UsageError("no partition keeps a negative number of bytes")
