"""The best cut of layers into a given number of stages, by the bound of ``pipeline_time.py``.

The search goes from the last stage to the first. What the stages before some point must know of those behind
it are three numbers: how many there are, R = the sum of their times, and V = their bound. Both R and V only
make the bound greater, so of two cuts with the same rest, one that has more of both is dropped: each point
keeps the front of the others. What cannot become better than the best time known so far is dropped as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from swift_ft.costs.schedule_orders import Schedule
from swift_ft.planning.layout.costs import StageCosts


class Stage(NamedTuple):
    """Layers ``first`` to ``end - 1`` on some devices of a node."""

    first: int
    end: int
    devices: int


@dataclass(frozen=True, slots=True)
class Question:
    """The question of a search.

    Attributes:
        microbatches: per iteration.
        schedule: which.
        transfer_ns: between two stages.
        sizes: devices that a stage may have; None for all powers of two.
    """

    costs: StageCosts
    nodes: int
    stages: int
    microbatches: int
    schedule: Schedule = Schedule.ONE_F_ONE_B
    transfer_ns: int = 0
    sizes: tuple[int, ...] | None = None


@dataclass(slots=True)
class Budget:
    """The budget of searches, in labels and not in seconds, so that all machines find the same.

    Attributes:
        labels: that are left.
    """

    labels: int

    def spend(self, labels: int) -> None:
        """Use some.

        Raises:
            OverflowError: if that is more than is left.
        """
        self.labels -= labels
        if self.labels < 0:
            raise OverflowError


class Cut(NamedTuple):
    """An answer: the stages, in order, and a lower bound of the time of any cut into so many stages."""

    stages: tuple[Stage, ...]
    bound_ns: int


class _Label(NamedTuple):
    """A cut of the last layers: R, V, its first stage, and the label of the stages behind that."""

    behind_ns: int
    bound_ns: int
    stage: Stage | None = None
    rest: _Label | None = None


_LABELS_PER_CUT = 500
"""Labels that a search may meet for each cut that it may find."""

_NONE = -(1 << 80)
"""No bound."""

_Point = tuple[int, int]
"""Devices used, and the first layer that is not in a stage yet; both counted from the end."""


def own_term(question: Question) -> Callable[[int, int, int, int], int]:
    """The bound that a stage gives by itself, from its times, R, and the number of stages behind it."""
    microbatches = question.microbatches
    if question.schedule is Schedule.ONE_F_ONE_B:

        def one_f_one_b(forward: int, backward: int, behind: int, stages_behind: int) -> int:
            first = max(0, behind - stages_behind * forward)
            last = max(0, behind - stages_behind * backward)
            gaps = first + last if microbatches > stages_behind + 1 else max(first, last)
            return microbatches * (forward + backward) + gaps

        return one_f_one_b
    if question.schedule is Schedule.GPIPE:
        return lambda forward, backward, behind, _: microbatches * (forward + backward) + behind
    return lambda forward, backward, behind, _: microbatches * (forward + backward)


def best_cut(question: Question, limit_ns: int | None = None, budget: Budget | None = None) -> Cut | None:
    """The cut with the smallest bound.

    Args:
        question: what is asked.
        limit_ns: cuts whose bound is not below it do not count.
        budget: what the search may do; None without a limit.

    Returns:
        None if no cut is below the limit and fits into memory.

    Raises:
        OverflowError: if the budget is used up.
    """
    if limit_ns is not None and root_bound_ns(question) >= limit_ns:
        return None
    label = min(_complete(question, limit_ns, budget, _undominated), key=_by_bound, default=None)
    return None if label is None else Cut(tuple(_stages_of(label)), label.bound_ns)


def cuts_below(question: Question, limit_ns: int, most: int) -> list[tuple[Stage, ...]] | None:
    """All cuts whose bound is below a limit; None if the search for them meets too many."""
    try:
        labels = _complete(question, limit_ns, Budget(_LABELS_PER_CUT * most), lambda labels: labels)
    except OverflowError:
        return None
    return [tuple(_stages_of(label)) for label in labels] if len(labels) <= most else None


def root_bound_ns(question: Question) -> int:
    """A bound of all cuts, found without a search."""
    costs = question.costs
    layers = len(costs.layers)
    slowest = costs.least_slowest_ns(layers, question.nodes * costs.devices_per_node)
    return question.microbatches * slowest


def _complete(
    question: Question,
    limit_ns: int | None,
    budget: Budget | None,
    front_of: Callable[[list[_Label]], list[_Label]],
) -> list[_Label]:
    """The labels of cuts of all layers."""
    front: dict[_Point, list[_Label]] = {(0, len(question.costs.layers)): [_Label(0, 0)]}
    for behind in range(question.stages):
        found: dict[_Point, list[_Label]] = {}
        growth = _Growth(question, behind, limit_ns)
        for point, labels in front.items():
            for stage, devices in growth.stages(point):
                new = growth.labels(stage, devices, labels)
                if new:
                    found.setdefault((devices, stage.first), []).extend(new)
                    if budget is not None:
                        budget.spend(len(new))
        front = {point: front_of(labels) for point, labels in found.items()}
    return front.get((question.nodes * question.costs.devices_per_node, 0), [])


def _by_bound(label: _Label) -> tuple[int, int]:
    return label.bound_ns, label.behind_ns


def _stages_of(label: _Label) -> Iterator[Stage]:
    at: _Label | None = label
    while at is not None and at.stage is not None:
        yield at.stage
        at = at.rest


def _undominated(labels: list[_Label]) -> list[_Label]:
    """Labels of which no other has less of both R and V."""
    if len(labels) == 1:
        return labels
    labels.sort(key=lambda label: (label.behind_ns, label.bound_ns))
    front = [labels[0]]
    for label in labels:
        if label.bound_ns < front[-1].bound_ns:
            front.append(label)
    return front


class _Growth:
    """Puts one more stage before the stages that there are."""

    def __init__(self, question: Question, behind: int, limit_ns: int | None) -> None:
        self._question = question
        self._behind = behind
        self._limit = limit_ns
        self._left = question.stages - behind - 1
        self._own = own_term(question)
        costs = question.costs
        self._kept = costs.kept(question.schedule, behind, question.stages, question.microbatches)
        self._all = question.nodes * costs.devices_per_node
        self._both_ways = question.schedule is not Schedule.ZERO_BUBBLE  # its end need not wait for others
        self._gap = (1 + self._both_ways) * question.transfer_ns if behind else 0
        self._gaps_left = (1 + self._both_ways) * question.transfer_ns * self._left

    def stages(self, point: _Point) -> Iterator[tuple[Stage, int]]:
        """Stages that may come before a point, and the devices that are used then."""
        used, end = point
        costs, left = self._question.costs, self._left
        per_node = costs.devices_per_node
        for size in self._question.sizes or costs.sizes:
            if used % per_node + size > per_node or not self._fill(self._all - used - size):
                continue
            for first in range(end - 1, left - 1, -1):
                if self._too_slow(first, end, size) or not costs.fits(first, end, size, self._kept):
                    break
                if left or not first:
                    yield Stage(first, end, size), used + size

    def _fill(self, devices: int) -> bool:
        """Whether the stages that are left can use exactly the devices that are left."""
        nodes, part = divmod(devices, self._question.costs.devices_per_node)
        per_node = self._question.costs.devices_per_node
        return nodes * per_node.bit_count() + part.bit_count() <= self._left <= devices

    def _too_slow(self, first: int, end: int, size: int) -> bool:
        if self._limit is None:
            return False
        return self._question.microbatches * sum(self._question.costs.pair(first, end, size)) >= self._limit

    def labels(self, stage: Stage, used: int, rests: list[_Label]) -> list[_Label]:
        """The labels with one more stage, without those that cannot stay below the limit."""
        forward, backward = self._question.costs.pair(*stage)
        own, limit, behind, gap = self._own, self._limit, self._behind, self._gap
        least, slowest = self._rest(stage.first, used)
        through = gap + forward + (backward if self._both_ways else 0)
        new = []
        for rest in rests:
            back = rest.behind_ns + gap
            bound = max(rest.bound_ns + through, own(forward, backward, back, behind))
            back += forward + backward
            if limit is not None and max(bound + least, 2 * back + least + slowest) >= limit:
                continue
            new.append(_Label(back, bound, stage, rest))
        return new

    def _rest(self, first: int, used: int) -> tuple[int, int]:
        """Lower bounds for the layers before a stage: the sum of their times, and the slowest stage's part.

        A stage k of them with the time w has R_k >= R, and its own bound is at least W + R_k + (N - S + k) w.
        """
        question = self._question
        if not first:
            return 0, _NONE
        if not self._both_ways:
            return self._gaps_left, _NONE
        least = question.costs.least_ns(first) + self._gaps_left
        if question.schedule is not Schedule.ONE_F_ONE_B or question.microbatches <= question.stages:
            return least, _NONE
        slowest = question.costs.least_slowest_ns(first, self._all - used)
        return least, (question.microbatches - question.stages) * slowest
