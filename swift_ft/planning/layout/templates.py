"""Pipeline templates: for each number of nodes the best cut of a model into stages (Oobleck, SOSP '23, §4.1).

The cost of a cut is its exact makespan, not the sums of the paper.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from swift_ft.costs.schedule_orders import Schedule, check_size, is_allowed
from swift_ft.errors import UsageError
from swift_ft.planning.layout.costs import StageCosts
from swift_ft.planning.layout.makespan import makespan_ns, one_f_one_b_ns
from swift_ft.planning.layout.multi_stage import best_multi_stage
from swift_ft.planning.layout.pipeline_template import PER_WORKER, Template, TemplateOptions
from swift_ft.planning.layout.search import Budget, Cut, Question, Stage, best_cut, cuts_below, root_bound_ns
from swift_ft.units import format_bytes

_TOLERANCES = (0, 20)
"""Per mille of the best time known by which a cut must be better to count: the next where too many are."""

_MOST_LABELS = 300_000
_MOST_TRIALS = 400


def node_counts(nodes: int, tolerate: int, min_nodes: int, layers: int) -> range:
    """Numbers of nodes for which templates are made (Oobleck §4.1.1).

    All from ``min_nodes`` to what is left when ``tolerate`` other pipelines have ``min_nodes`` each, and no
    more nodes than layers. So each number of nodes that holds ``tolerate + 1`` pipelines can be used up.

    Raises:
        UsageError: if there are not nodes enough.
    """
    if min_nodes < 1 or tolerate < 0:
        raise UsageError(
            f"{min_nodes} nodes at least and {tolerate} losses: give at least 1 node and at least 0 losses"
        )
    needed = (tolerate + 1) * min_nodes
    if nodes < needed:
        fewer = f", or --tolerate {nodes // min_nodes - 1}" if nodes >= min_nodes else ""
        raise UsageError(
            f"{nodes} nodes cannot hold {tolerate + 1} pipelines of {min_nodes} nodes: {needed - nodes} more "
            f"nodes would do{fewer}"
        )
    if min_nodes > layers:
        raise UsageError(f"{layers} layers make no more than {layers} stages: --min-nodes {layers} would do")
    return range(min_nodes, min(nodes - tolerate * min_nodes, layers) + 1)


def templates_for(
    costs: StageCosts, counts: Sequence[int], options: TemplateOptions | None = None
) -> tuple[Template, ...]:
    """The best template for each number of nodes.

    Args:
        counts: of nodes, ascending.
        options: how.

    Raises:
        UsageError: if no cut fits one of them; the message says why not, and what would do.
    """
    return tuple(best_template(costs, nodes, options) for nodes in counts)


def smallest_pipeline(costs: StageCosts, nodes: int, options: TemplateOptions) -> int:
    """The smallest number of nodes that holds the model.

    Args:
        nodes: that are there.
        options: how templates are made.

    Raises:
        UsageError: if all of them do not hold it.
    """
    if options.stages_per_worker == 1:
        return least_nodes(costs, nodes, options.microbatches, options.schedule)
    for count in range(1, nodes):
        with contextlib.suppress(UsageError):
            return best_multi_stage(costs, count, options).nodes
    return best_multi_stage(costs, nodes, options).nodes


def best_template(costs: StageCosts, nodes: int, options: TemplateOptions | None = None) -> Template:
    """The best template for a number of nodes, over all numbers of stages.

    Raises:
        UsageError: if no cut fits; the message says why not, and what would do.
    """
    options = options or TemplateOptions()
    best = best_single_stage if options.stages_per_worker == 1 else best_multi_stage
    return best(costs, nodes, options)


# The best template with one stage per worker.
#
# ``search.py`` finds the cut with the smallest lower bound; where the bound is the makespan, as it mostly is,
# the cut is proven best. Otherwise moving borders may better it, all other cuts whose bound is below its time
# are tried if they are few, and the template says how far from the optimum it can be at most.


def best_single_stage(costs: StageCosts, nodes: int, options: TemplateOptions) -> Template:
    """The best template for a number of nodes, over all numbers of stages.

    Raises:
        UsageError: if no cut fits; the message says why not, and what would do.
    """
    trial = _Trial(costs, nodes, options)
    counts = _stage_counts(costs, nodes)
    for stages in counts[:1]:
        trial.run(stages)
    for size in reversed(costs.sizes[:-1]):  # the same everywhere: mostly good, and soon found
        if trial.best is not None and nodes * costs.devices_per_node // size in counts:
            trial.look(nodes * costs.devices_per_node // size, size)
    for stages in counts[1:]:
        trial.run(stages)
    if trial.best is None:
        raise UsageError(why_not(costs, nodes, options.microbatches, options.schedule))
    return replace(trial.best, bound_ns=min(trial.best.iteration_ns, *trial.bounds))


def _stage_counts(costs: StageCosts, nodes: int) -> range:
    """Numbers of stages that use all devices of so many nodes."""
    per_node = costs.devices_per_node
    return range(nodes * per_node.bit_count(), min(nodes * per_node, len(costs.layers)) + 1)


class _Found(NamedTuple):
    """A cut and its exact time."""

    time_ns: int
    stages: tuple[Stage, ...]


class _Trial:
    """Tries one number of stages after another. What is known already bounds what is tried next."""

    def __init__(self, costs: StageCosts, nodes: int, options: TemplateOptions) -> None:
        self.best: Template | None = None
        self.bounds: list[int] = []
        """Lower bounds of all cuts' times in ns, one for each number of stages with which some fits."""
        self._costs = costs
        self._nodes = nodes
        self._options = options
        self._tolerances = list(_TOLERANCES)
        self._budget = Budget(_MOST_LABELS)

    def run(self, stages: int) -> None:
        """Find the best cut into so many stages, if it is the best so far, and a bound for the others."""
        question = self._question(stages)
        cut, bound = (None, None) if question is None else self._cut_below(question)
        if question is None or cut is None:
            self.bounds += [] if bound is None else [bound]
            return
        found = _climbed(question, cut.stages)
        bound = cut.bound_ns
        if found.time_ns > bound:
            below = min(found.time_ns, self.best.iteration_ns if self.best else found.time_ns)
            others = cuts_below(question, below, _MOST_TRIALS)
            if others is not None:
                found = min([found, *(_exact(question, other) for other in others)])
                bound = min(below, found.time_ns)
        self.bounds.append(bound)
        self._offer(question, found)

    def look(self, stages: int, size: int) -> None:
        """Look at the best cut into so many stages whose stages all have so many devices."""
        question = self._question(stages, (size,))
        assert self.best is not None
        cut = question and best_cut(question, self.best.iteration_ns)
        if question and cut:
            self._offer(question, _climbed(question, cut.stages))

    def _question(self, stages: int, sizes: tuple[int, ...] | None = None) -> Question | None:
        options = self._options
        microbatches = options.microbatches or PER_WORKER * stages
        if not is_allowed(options.schedule, workers=stages, microbatches=microbatches):
            return None
        costs, schedule, transfer_ns = self._costs, options.schedule, options.transfer_ns
        return Question(costs, self._nodes, stages, microbatches, schedule, transfer_ns, sizes)

    def _cut_below(self, question: Question) -> tuple[Cut | None, int | None]:
        """The partition with the smallest lower bound, or the limit of the search if there is none."""
        if self.best is None:
            return best_cut(question), None
        while self._tolerances:
            below = self.best.iteration_ns * (1000 - self._tolerances[0]) // 1000
            try:
                return best_cut(question, below, self._budget), below
            except OverflowError:
                self._tolerances.pop(0)
                self._budget = Budget(_MOST_LABELS)
        return None, root_bound_ns(question)

    def _offer(self, question: Question, found: _Found) -> None:
        if self.best is None or found.time_ns < self.best.iteration_ns:
            self.best = Template(self._nodes, found.stages, question.microbatches, found.time_ns, bound_ns=0)


def _exact(question: Question, stages: tuple[Stage, ...]) -> _Found:
    times = [question.costs.time(*stage) for stage in stages]
    if question.schedule is Schedule.ONE_F_ONE_B:
        return _Found(one_f_one_b_ns(times, question.microbatches, question.transfer_ns), stages)
    time_ns = makespan_ns(times, question.microbatches, question.schedule, transfer_ns=question.transfer_ns)
    return _Found(time_ns, stages)


def _climbed(question: Question, stages: tuple[Stage, ...]) -> _Found:
    """The best that comes of a cut by moving one layer at a time over a border, as long as that helps."""
    best, better = _exact(question, stages), True
    while better:
        found = min((_exact(question, other) for other in _moved(question, best.stages)), default=best)
        better = found.time_ns < best.time_ns
        best = min(best, found)
    return best


def _moved(question: Question, stages: tuple[Stage, ...]) -> Iterator[tuple[Stage, ...]]:
    for border in range(1, len(stages)):
        left, right = stages[border - 1], stages[border]
        for to in (left.end - 1, left.end + 1):
            if left.first < to < right.end:
                pair = (left._replace(end=to), right._replace(first=to))
                if all(_fits(question, stage, border - 1 + k) for k, stage in enumerate(pair)):
                    yield (*stages[: border - 1], *pair, *stages[border + 1 :])


def _fits(question: Question, stage: Stage, position: int) -> bool:
    behind = question.stages - 1 - position
    kept = question.costs.kept(question.schedule, behind, question.stages, question.microbatches)
    return question.costs.fits(*stage, kept)


def why_not(costs: StageCosts, nodes: int, microbatches: int | None, schedule: Schedule) -> str:
    """The reason why a model cannot be cut for some nodes, in one line.

    Raises:
        UsageError: if it is the schedule; the message is of the same kind.
    """
    if nodes < 1:
        return f"{nodes} nodes cannot hold a pipeline: --nodes must be at least 1"
    per_node, layers = costs.devices_per_node, len(costs.layers)
    fewest = nodes * per_node.bit_count()
    if layers < fewest:
        enough = layers // per_node.bit_count()
        return (
            f"{layers} layers cannot use {nodes} nodes of {per_node} devices: they need at least {fewest} "
            f"stages, {fewest - layers} more than layers; "
            + (
                f"{enough} nodes would do"
                if enough
                else f"1 node of {1 << per_node.bit_length() - 1} devices would do"
            )
        )
    if microbatches is not None and schedule is not Schedule.ONE_F_ONE_B:
        check_size(schedule, workers=fewest, chunks=1, microbatches=microbatches)
    elif microbatches is not None and microbatches < fewest:
        return (
            f"{schedule} needs as many microbatches as stages: {microbatches} are {fewest - microbatches} "
            f"too few for {nodes} nodes; --microbatches {fewest} would do"
        )
    needed = least_memory(costs, nodes, microbatches, schedule)
    given = costs.memory_bytes or 0
    return (
        f"no cut fits into the memory of {nodes} nodes: {format_bytes(given)} per device are "
        f"{format_bytes(needed - given)} too few; --memory {needed} would do, or more nodes (--min-nodes)"
    )


def least_memory(costs: StageCosts, nodes: int, microbatches: int | None, schedule: Schedule) -> int:
    """Bytes per device with which some cut fits, of those that give each stage one node's devices.

    Found by bisection: whether the layers can be cut, from the last one, into stages that fit.
    """
    from_last = _sizes(costs, nodes, microbatches, schedule)
    low, high = 0, max(stage.bytes(0, len(costs.layers)) for stage in from_last)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _can_cut(from_last, len(costs.layers), middle) else (middle, high)
    return high


def least_nodes(costs: StageCosts, nodes: int, microbatches: int | None, schedule: Schedule) -> int:
    """The smallest number of nodes that holds the model, one stage each.

    Args:
        nodes: that are there.
        microbatches: of an iteration; None for four per stage.
        schedule: which.

    Raises:
        UsageError: if all of them do not hold it.
    """
    most = min(nodes, len(costs.layers))
    for count in range(1, most + 1):
        stages = _sizes(costs, count, microbatches, schedule)
        if costs.memory_bytes is None or _can_cut(stages, len(costs.layers), costs.memory_bytes):
            return count
    raise UsageError(why_not(costs, most, microbatches, schedule))


def _sizes(costs: StageCosts, nodes: int, microbatches: int | None, schedule: Schedule) -> list[_Size]:
    return [_Size(costs, nodes, microbatches, schedule, behind) for behind in range(nodes)]


class _Size:
    """The memory of the stage with so many others behind it."""

    def __init__(
        self, costs: StageCosts, nodes: int, microbatches: int | None, schedule: Schedule, behind: int
    ) -> None:
        self._costs = costs
        self._devices = 1 << (costs.devices_per_node.bit_length() - 1)
        self._kept = costs.kept(schedule, behind, nodes, microbatches or 4 * nodes)

    def bytes(self, first: int, end: int) -> int:
        return self._costs.memory(first, end, self._devices, self._kept)


def _can_cut(stages: list[_Size], layers: int, memory_bytes: int) -> bool:
    ends = {layers}
    for behind, stage in enumerate(stages):
        left = len(stages) - 1 - behind
        ends = {
            first for end in ends for first in range(left, end) if stage.bytes(first, end) <= memory_bytes
        }
    return 0 in ends
