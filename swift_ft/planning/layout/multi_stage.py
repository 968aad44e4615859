"""The best template with several stages per worker: looped schedules, and those that turn.

All workers have equally many stages, as torch's schedules demand, and equally many devices, as its device
mesh demands. A worker's memory holds all its stages. No iteration is shorter than, for any worker w,

    A_w + N L_w

with L_w the time of a microbatch in all stages of w, N the number of microbatches, and A_w the time of one in
the stages before the first one of w: forward before w begins, and back after it has ended (where a schedule
splits the backward pass, w may still compute weights then: forward only).

Cuts are tried depth first, stage by stage, and what cannot be below the best time known is left out. If
nothing else is left out, the best cut is proven. Else the template says how far from it it can be at most.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise, takewhile

from swift_ft.costs.schedule_orders import check_size, most_kept, stages_of
from swift_ft.errors import UsageError
from swift_ft.planning.layout.costs import StageCosts
from swift_ft.planning.layout.makespan import makespan_ns
from swift_ft.planning.layout.pipeline_template import PER_WORKER, Template, TemplateOptions
from swift_ft.planning.layout.search import Stage
from swift_ft.units import format_bytes

_MOST_TRIED = 200_000
"""Stages that a search tries. In steps and not in seconds, so that all machines find the same."""

_MOST_ACTIONS = 1_000_000
"""Actions of all orders that a search carries out."""

_Cut = tuple[int, ...]
"""The first layer of each stage, and behind the last one the number of layers."""


def best_multi_stage(costs: StageCosts, nodes: int, options: TemplateOptions) -> Template:
    """The best template for a number of nodes, over all numbers of devices of a worker.

    Raises:
        UsageError: if no cut fits; the message says why not, and what would do.
    """
    if nodes < 1:
        raise UsageError(f"{nodes} nodes cannot hold a pipeline: --nodes must be at least 1")
    chunks, layers = options.stages_per_worker, len(costs.layers)
    sizes = [size for size in costs.sizes if costs.devices_per_node % size == 0]
    fewest = nodes * costs.devices_per_node // sizes[-1]
    if fewest * chunks > layers:
        raise UsageError(
            f"{layers} layers make no {fewest * chunks} stages: {chunks} on each of {fewest} workers are "
            f"{fewest * chunks - layers} too many; {layers // chunks} workers would do"
        )
    trials = []
    refused: UsageError | None = None
    for size in reversed(sizes):
        workers = nodes * costs.devices_per_node // size
        if workers * chunks <= layers:
            try:
                trials.append(_Trial(costs, size, workers, options))
            except UsageError as error:  # the schedule's own constraint
                refused = refused or error
    if not trials and refused is not None:
        raise refused
    found = [trial.run() for trial in trials]
    templates = [trial.template(nodes) for trial, fits in zip(trials, found, strict=True) if fits]
    if not templates:
        raise UsageError(_why_not(trials, costs, nodes))
    best = min(templates, key=lambda one: one.iteration_ns)
    bound = min(one.bound_ns for one in templates)
    return Template(nodes, best.stages, best.microbatches, best.iteration_ns, bound, chunks)


def _why_not(trials: Sequence[_Trial], costs: StageCosts, nodes: int) -> str:
    needed, given = min(trial.least_bytes for trial in trials), costs.memory_bytes or 0
    return (
        f"no cut that was tried fits into the memory of {nodes} nodes: {format_bytes(given)} per device are "
        f"{format_bytes(needed - given)} too few; --memory {needed} would do, or more nodes (--min-nodes)"
    )


class _Trial:
    """Cuts for so many workers of so many devices.

    Raises:
        UsageError: if torch would refuse the sizes.
    """

    def __init__(self, costs: StageCosts, size: int, workers: int, options: TemplateOptions) -> None:
        self.least_bytes = 1 << 62
        """The least memory of a device with which a cut that was tried fits."""
        self._costs, self._size, self._workers, self._options = costs, size, workers, options
        schedule, chunks = options.schedule, options.stages_per_worker
        self._microbatches = options.microbatches or PER_WORKER * workers
        check_size(schedule, workers=workers, chunks=chunks, microbatches=self._microbatches)
        self._stages = [stages_of(schedule, w, workers=workers, chunks=chunks) for w in range(workers)]
        self._worker = {stage: w for w, own in enumerate(self._stages) for stage in own}
        self._kept = [
            most_kept(schedule, w, workers=workers, chunks=chunks, microbatches=self._microbatches)
            for w in range(workers)
        ]
        self._both_ways = not schedule.splits_backward
        self._layers = len(costs.layers)
        self._count = workers * chunks
        self._whole = sum(costs.pair(0, self._layers, size))
        self._left = _MOST_TRIED
        passes = 3 if schedule.splits_backward else 2
        self._evaluations = max(20, _MOST_ACTIONS // (passes * self._count * self._microbatches))
        self._best: _Cut | None = None
        self._best_ns = 1 << 62
        self._times: dict[_Cut, int] = {}

    def run(self) -> bool:
        """Find the best cut. False if none that was tried fits."""
        self._climb(self._even())
        self._complete = self._descend((0,), [0] * self._workers, 0)
        return self._best is not None

    def template(self, nodes: int) -> Template:
        """The best cut that was found."""
        assert self._best is not None
        bound = self._best_ns if self._complete else min(self._best_ns, self._root_bound())
        stages = tuple(Stage(first, end, self._size) for first, end in pairwise(self._best))
        chunks = self._options.stages_per_worker
        return Template(nodes, stages, self._microbatches, self._best_ns, bound, chunks)

    # ---------------------------------------------------------------------------------------- one cut

    def _pair(self, first: int, end: int) -> tuple[int, int]:
        return self._costs.pair(first, end, self._size)

    def _exact(self, cut: _Cut) -> int:
        """The time of a cut. Counts against what may be evaluated."""
        if cut not in self._times:
            self._evaluations -= 1
            options = self._options
            self._times[cut] = makespan_ns(
                [self._costs.time(first, end, self._size) for first, end in pairwise(cut)],
                self._microbatches,
                options.schedule,
                workers=self._workers,
                transfer_ns=options.transfer_ns,
            )
        return self._times[cut]

    def _bytes(self, cut: _Cut) -> int:
        """Of the device that needs most."""
        return max(self._worker_bytes(cut, worker) for worker in range(self._workers))

    def _worker_bytes(self, cut: _Cut, worker: int) -> int:
        """Of a worker's devices, as far as its stages are cut."""
        own = [stage for stage in self._stages[worker] if stage + 1 < len(cut)]
        return max(
            sum(
                self._costs.memory(cut[stage], cut[stage + 1], self._size, kept)
                for stage, kept in zip(own, moment, strict=False)
            )
            for moment in self._kept[worker]
        )

    def _bound(self, cut: _Cut) -> int:
        """A lower bound, of all workers."""
        loads = [0] * self._workers
        for stage, (first, end) in enumerate(pairwise(cut)):
            loads[self._worker[stage]] += sum(self._pair(first, end))
        return max(self._ahead(cut, worker) + self._microbatches * load for worker, load in enumerate(loads))

    def _ahead(self, cut: _Cut, worker: int) -> int:
        """A_w. The first stage of each worker has its number."""
        forward, backward = self._pair(0, cut[worker])
        both = 1 + self._both_ways
        return forward + backward * self._both_ways + both * worker * self._options.transfer_ns

    def _root_bound(self) -> int:
        """Of all cuts: some worker has its share of the work, and of the number of layers."""
        least = -(-self._layers // self._workers)
        single = sorted(sum(self._pair(layer, layer + 1)) for layer in range(self._layers))
        busiest = max(-(-self._whole // self._workers), sum(single[:least]) - least, single[-1] - 1)
        return self._microbatches * busiest

    # ------------------------------------------------------------------------------------------ search

    def _even(self) -> _Cut:
        """Stages of about the same time."""
        cut = [0]
        for stage in range(1, self._count):
            share = self._whole * stage // self._count
            last = self._layers - (self._count - stage)
            at = cut[-1] + 1
            while at < last and sum(self._pair(0, at)) < share:
                at += 1
            over, under = sum(self._pair(0, at)) - share, share - sum(self._pair(0, at - 1))
            cut.append(at - 1 if at - 1 > cut[-1] and under < over else at)
        return (*cut, self._layers)

    def _climb(self, cut: _Cut) -> None:
        """Move one layer at a time over a border, as long as that helps: memory first, then time."""
        cost = self._cost(cut)
        better = True
        while better and self._evaluations > 0:
            found = min(((self._cost(other), other) for other in self._moved(cut)), default=(cost, cut))
            better = found[0] < cost
            if better:
                cost, cut = found
        if not cost[0]:
            self._offer(cut)

    def _cost(self, cut: _Cut) -> tuple[int, int]:
        needed = self._bytes(cut)
        self.least_bytes = min(self.least_bytes, needed)
        over = 0 if self._costs.memory_bytes is None else max(0, needed - self._costs.memory_bytes)
        bound = self._bound(cut)
        if over or bound >= self._best_ns or self._evaluations <= 0:
            return over, max(bound, self._best_ns)
        return 0, self._exact(cut)

    def _moved(self, cut: _Cut) -> Iterator[_Cut]:
        for border in range(1, len(cut) - 1):
            for to in (cut[border] - 1, cut[border] + 1):
                if cut[border - 1] < to < cut[border + 1]:
                    yield (*cut[:border], to, *cut[border + 1 :])

    def _offer(self, cut: _Cut) -> None:
        time_ns = self._exact(cut)
        if time_ns < self._best_ns:
            self._best, self._best_ns = cut, time_ns

    def _descend(self, cut: _Cut, loads: list[int], ahead: int) -> bool:
        """Try all cuts that begin like this. False if some were not looked at.

        Args:
            cut: where stages begin, as far as it is decided.
            loads: time of a microbatch on each worker, in these stages.
            ahead: the sum of A_w of the workers whose first stage is decided.
        """
        stage = len(cut) - 1
        if stage == self._count:
            if self._evaluations <= 0:
                return False
            self._offer(cut)
            return True
        worker = self._worker[stage]
        if stage < self._workers:
            ahead += self._ahead(cut, worker)
        last = self._layers - (self._count - stage - 1)
        first = last if stage == self._count - 1 else cut[-1] + 1
        possible = takewhile(lambda end: self._can(cut, end, loads, ahead), range(first, last + 1))
        for end in self._by_evenness(cut, list(possible)):
            loads[worker] += (spent := sum(self._pair(cut[-1], end)))
            complete = self._descend((*cut, end), loads, ahead)
            loads[worker] -= spent
            if not complete or self._left <= 0:
                return False
        return True

    def _can(self, cut: _Cut, end: int, loads: list[int], ahead: int) -> bool:
        """Whether a cut with one more stage can fit, and can be fast enough: not if a shorter one cannot."""
        self._left -= 1
        stage = len(cut) - 1
        worker = self._worker[stage]
        load = loads[worker] + sum(self._pair(cut[-1], end))
        least = load * self._microbatches + (self._ahead(cut, worker) if stage >= worker else 0)
        # The A of workers whose first stage is not decided is no less than what is decided now.
        undecided = max(0, self._workers - stage - 1) * self._ahead_of(end)
        average = (ahead + undecided + self._microbatches * self._whole) // self._workers
        if max(least, average) >= self._best_ns:
            return False
        if self._costs.memory_bytes is None:
            return True
        return self._worker_bytes((*cut, end), worker) <= self._costs.memory_bytes

    def _ahead_of(self, end: int) -> int:
        forward, backward = self._pair(0, end)
        return forward + backward * self._both_ways

    def _by_evenness(self, cut: _Cut, ends: list[int]) -> list[int]:
        """The ends of a stage, first those with which it has its share of what is left."""
        done = sum(self._pair(0, cut[-1]))
        share = done + (self._whole - done) // (self._count - len(cut) + 1)
        return sorted(ends, key=lambda end: (abs(sum(self._pair(0, end)) - share), end))
