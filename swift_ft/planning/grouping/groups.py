"""Groups of machines that recover together, under a storage budget (§5.3 of the paper)."""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from swift_ft.costs.chain_profile import ChainProfile
from swift_ft.costs.json_files import write_text
from swift_ft.errors import UsageError
from swift_ft.planning.checks import check_not_negative
from swift_ft.planning.grouping.chain import Chain
from swift_ft.planning.grouping.exact import optimal_partition

METHODS = ("optimal", "greedy", "balanced")


@dataclass(frozen=True)
class GroupPlan:
    """Groups of consecutive machines, and what they cost.

    Attributes:
        groups: machines by group, in pipeline order.
        log_bytes: largest size of the log, ``M(G)``: all bytes between groups over one checkpoint interval.
        expected_recovery_s: mean seconds of re-computation after a failure (the paper's R(G) times the
            iterations to replay, half an interval on average).
        per_machine_recovery_s: the same, by the machine that fails.
        method: ``optimal``, ``greedy`` or ``balanced``.
        budget_bytes: upper limit for ``log_bytes``.
        checkpoint_interval: iterations between two global checkpoints.
        gap_s: no other partition is better by more than this. 0.0 for a proven optimum, None for methods that
            prove nothing.
    """

    groups: tuple[tuple[int, ...], ...]
    log_bytes: int
    expected_recovery_s: float
    per_machine_recovery_s: tuple[float, ...]
    method: str
    budget_bytes: int
    checkpoint_interval: int
    gap_s: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "groups": [list(group) for group in self.groups],
            "log_bytes": self.log_bytes,
            "expected_recovery_s": self.expected_recovery_s,
            "method": self.method,
            "budget_bytes": self.budget_bytes,
            "per_machine_recovery_s": list(self.per_machine_recovery_s),
            "checkpoint_interval": self.checkpoint_interval,
            "gap_s": self.gap_s,
        }


@dataclass(frozen=True)
class SweepPoint:
    """One point of the trade-off curve of figure 11."""

    budget_bytes: int
    log_bytes: int
    expected_recovery_s: float
    n_groups: int


def plan_groups(
    profile: ChainProfile,
    *,
    budget_bytes: int,
    checkpoint_interval: int,
    bandwidth: float,
    method: str = "optimal",
    parallel_recovery: bool = False,
) -> GroupPlan:
    """Groups of neighbouring machines whose log stays within a budget.

    Args:
        profile: the measured pipeline.
        budget_bytes: room for the log, ``M_max``.
        checkpoint_interval: iterations between two global checkpoints, ``T``; a log holds that many.
        bandwidth: bytes per second between two machines, ``B``.
        method: ``optimal`` (least expected recovery time, failure weights included), ``greedy`` (§5.3 to the
            letter) or ``balanced`` (the most groups of equal size that fit).
        parallel_recovery: divide a group's time by ``floor(N / |G|)`` (§5.2).

    Raises:
        UsageError: for impossible values.
    """
    chain = _chain(profile, checkpoint_interval, bandwidth, parallel_recovery)
    limit = _limit(budget_bytes, checkpoint_interval)
    gap = None
    if method == "optimal":
        best = optimal_partition(chain, limit)
        starts, gap = best.starts, best.gap_s * checkpoint_interval / 2
    elif method == "greedy":
        starts = greedy_partition(chain, limit)
    elif method == "balanced":
        starts = balanced_partition(chain, limit)
    else:
        raise UsageError(f"there is no method {method!r}: take one of {', '.join(METHODS)}")
    return _plan(chain, starts, method, budget_bytes, checkpoint_interval, gap)


def evaluate_groups(
    profile: ChainProfile,
    groups: Sequence[Sequence[int]],
    *,
    checkpoint_interval: int,
    bandwidth: float,
    parallel_recovery: bool = False,
) -> GroupPlan:
    """The cost of groups that were chosen by hand.

    Raises:
        UsageError: unless the groups hold every machine once, in pipeline order.
    """
    if [machine for group in groups for machine in group] != list(range(profile.n_machines)) or not all(
        groups
    ):
        raise UsageError("groups must hold every machine once, neighbours together, in pipeline order")
    chain = _chain(profile, checkpoint_interval, bandwidth, parallel_recovery)
    starts = tuple(group[0] for group in groups)
    log_bytes = chain.logged_bytes(starts) * checkpoint_interval
    return _plan(chain, starts, "given", log_bytes, checkpoint_interval, None)


def sweep_budgets(
    profile: ChainProfile,
    *,
    checkpoint_interval: int,
    bandwidth: float,
    method: str = "optimal",
    parallel_recovery: bool = False,
    points: int = 32,
) -> tuple[SweepPoint, ...]:
    """Recovery time against storage (figure 11), from no log at all to every boundary logged.

    Greedy's curve is whole, one point per merge, up to ``points`` of them; the others are computed at as many
    budgets, evenly spread.
    """
    chain = _chain(profile, checkpoint_interval, bandwidth, parallel_recovery)
    if points < 2:
        raise UsageError("a curve needs at least two points")
    total = sum(profile.boundary_bytes)
    levels = {round(total * k / (points - 1)) for k in range(points)}
    if method == "greedy" or chain.n <= points:
        left, levels = total, {total}
        for merge in greedy_merges(chain):
            left -= merge.saved_bytes
            levels.add(left)
    ordered = sorted(levels)
    if len(ordered) > points:
        ordered = [ordered[round(k * (len(ordered) - 1) / (points - 1))] for k in range(points)]
    curve = []
    for level in ordered:
        plan = plan_groups(
            profile,
            budget_bytes=level * checkpoint_interval,
            checkpoint_interval=checkpoint_interval,
            bandwidth=bandwidth,
            method=method,
            parallel_recovery=parallel_recovery,
        )
        curve.append(
            SweepPoint(plan.budget_bytes, plan.log_bytes, plan.expected_recovery_s, len(plan.groups))
        )
    return tuple(curve)


def _chain(
    profile: ChainProfile, checkpoint_interval: int, bandwidth: float, parallel_recovery: bool
) -> Chain:
    if (
        isinstance(checkpoint_interval, bool)
        or not isinstance(checkpoint_interval, int)
        or checkpoint_interval < 1
    ):
        raise UsageError(
            f"the checkpoint interval is {checkpoint_interval}: it must be at least one iteration"
        )
    return Chain(profile, bandwidth, parallel_recovery)


def _limit(budget_bytes: int, checkpoint_interval: int) -> int:
    """Bytes per iteration that the budget leaves."""
    check_not_negative({"the budget in bytes": budget_bytes})
    return int(budget_bytes) // checkpoint_interval


def _plan(
    chain: Chain, starts: Sequence[int], method: str, budget: int, interval: int, gap: float | None
) -> GroupPlan:
    stops = [*starts[1:], chain.n]
    groups = tuple(tuple(range(i, j)) for i, j in zip(starts, stops, strict=True))
    replayed = interval / 2
    by_group = [chain.replay_s(i, j) * replayed for i, j in zip(starts, stops, strict=True)]
    by_machine = tuple(seconds for group, seconds in zip(groups, by_group, strict=True) for _ in group)
    return GroupPlan(
        groups=groups,
        log_bytes=chain.logged_bytes(starts) * interval,
        expected_recovery_s=chain.expected_replay_s(starts) * replayed,
        per_machine_recovery_s=by_machine,
        method=method,
        budget_bytes=int(budget),
        checkpoint_interval=interval,
        gap_s=gap,
    )


def write_groups(plan: GroupPlan, path: Path) -> None:
    """Writes the ``groups.json`` that a session takes.

    Raises:
        UsageError: if the file cannot be written.
    """
    write_text(path, json.dumps(plan.to_dict(), indent=1) + "\n")


@dataclass(frozen=True)
class Merge:
    """One step of the greedy algorithm: the group that begins at ``start`` joins the one before it.

    Attributes:
        start: first machine of the right one of the two groups.
        saved_bytes: bytes per iteration that are no longer logged: ΔM / T.
    """

    start: int
    saved_bytes: int


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

    def entry(start: int) -> tuple[float, int, int]:
        i, j = left_start[start], right_end[start]
        added = cost(i, j) - cost(i, start) - cost(start, j)
        size = sizes[start - 1]
        return (added / size if size else float("inf"), start, version[start])

    heap = [entry(start) for start in range(1, n)]
    heapq.heapify(heap)
    while heap:
        _, start, seen = heapq.heappop(heap)
        if seen != version[start]:
            continue
        i, j = left_start[start], right_end[start]
        version[start] = -1
        right_end[i] = j
        yield Merge(start, sizes[start - 1])
        if j < n:
            left_start[j] = i
            version[j] += 1
            heapq.heappush(heap, entry(j))
        if i > 0:
            version[i] += 1
            heapq.heappush(heap, entry(i))


def greedy_partition(chain: Chain, limit: int) -> tuple[int, ...]:
    """The first machine of each group, once greedy merging has reached ``limit`` bytes per iteration."""
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
