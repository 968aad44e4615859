"""The size of a job: throughput and cost for each number of machines of each kind. Pure.

DLRover (§4) fits a model of throughput to what runs of a job have measured, and searches it for resources. A
synchronous pipeline needs no fit: its schedule and the measured layers give the time of an iteration, on any
number of machines (``instantiate.py``). What that does not cover is measured as a part of each iteration.

The knee is where throughput times throughput per machine is largest, Kleinrock's power: up to there, twice
the machines bring more than the square root of two of the throughput.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swift_ft.costs.layer_profile import NANOSECONDS, LayerProfile
from swift_ft.errors import UsageError
from swift_ft.planning.layout.costs import StageCosts
from swift_ft.planning.layout.instantiate import Instantiation, best_instantiation
from swift_ft.planning.layout.pipeline_template import TemplateOptions
from swift_ft.planning.layout.pipeline_time import PipelineTime
from swift_ft.planning.layout.templates import node_counts, smallest_pipeline, templates_for

_OF_STATE = 4
"""The state of a layer trained by Adam: weights, gradients, and two averages. Gradients are a quarter."""


@dataclass(frozen=True)
class MachineKind:
    """Machines that can be had.

    Attributes:
        most: how many can be had.
        speed: of a device, as a share of the one that the layers were measured on.
        price_per_hour: of a machine, in any currency.
        devices: per machine.
        memory_bytes: of a device; None without a limit.
    """

    name: str
    most: int
    speed: float = 1.0
    price_per_hour: float = 0.0
    devices: int = 1
    memory_bytes: int | None = None


@dataclass(frozen=True)
class Work:
    """The workload of the job.

    Attributes:
        layers: of the model, as measured.
        batch: samples of an iteration.
        microbatches: into which the batch is divided.
        pipelines: how many there are to be; None for the best number.
        link_bytes_per_s: between machines, for averaging gradients; None if that is not counted.
        overhead_s: of each iteration, besides computing: what is measured as more.
    """

    layers: tuple[LayerProfile, ...]
    batch: int
    microbatches: int
    pipelines: int | None = None
    link_bytes_per_s: float | None = None
    overhead_s: float = 0.0


@dataclass(frozen=True)
class Size:
    """So many machines of a kind, and what they do.

    Attributes:
        kind: of the machines.
        machines: how many.
        pipelines: the machines of each.
        iteration_s: for the global batch.
        samples_per_s: that are trained.
    """

    kind: MachineKind
    machines: int
    pipelines: tuple[int, ...]
    iteration_s: float
    samples_per_s: float

    @property
    def price_per_hour(self) -> float:
        """Of all machines."""
        return self.machines * self.kind.price_per_hour

    @property
    def price_per_million(self) -> float:
        """Of a million samples."""
        return self.price_per_hour / 3600 / self.samples_per_s * 1e6

    @property
    def power(self) -> float:
        """Throughput times throughput per machine."""
        return self.samples_per_s**2 / self.machines

    def takes_s(self, samples: float) -> float:
        """Seconds to train so many samples."""
        return samples / self.samples_per_s

    def price_of(self, samples: float) -> float:
        """The price of training so many samples, in the unit of ``price_per_hour``."""
        return self.takes_s(samples) / 3600 * self.price_per_hour


@dataclass(frozen=True)
class Goal:
    """The goal by which a size is recommended; without samples it is the knee.

    Attributes:
        samples: to train.
        within_s: by when: then the cheapest size is wanted.
        budget: what it may cost: then the fastest size is wanted.
    """

    samples: float | None = None
    within_s: float | None = None
    budget: float | None = None


def sizes(work: Work, kind: MachineKind) -> list[Size]:
    """Every number of machines of a kind that can train, ascending.

    Raises:
        UsageError: if not even all of them can, and why; or if a number makes no sense.
    """
    _check(work, kind)
    scaled = tuple(one.faster(kind.speed) for one in work.layers)
    costs = StageCosts(scaled, kind.devices, kind.memory_bytes)
    options = TemplateOptions()
    smallest = smallest_pipeline(costs, kind.most, options)
    counts = node_counts(kind.most, 0, smallest, len(scaled))
    templates = templates_for(costs, counts, options)
    times = {one.nodes: PipelineTime.of(costs, one, options.schedule) for one in templates}
    found = []
    for machines in range(smallest, kind.most + 1):
        best = _best(work, times, machines)
        if best is not None:
            seconds = best.iteration_ns / NANOSECONDS + _averaging_s(work, best.nodes) + work.overhead_s
            found.append(Size(kind, machines, best.nodes, seconds, work.batch / seconds))
    if not found:
        raise UsageError(
            f"{kind.most} machines of {kind.name} and {work.microbatches} microbatches make no "
            f"{work.pipelines or 1} pipelines: each needs as many microbatches as stages"
        )
    return found


def _best(work: Work, times: dict[int, PipelineTime], machines: int) -> Instantiation | None:
    """The fastest pipelines that use all machines; None if there are none."""
    if work.pipelines == 1:
        time = times.get(machines)
        if time is None or time.least > work.microbatches:
            return None
        return Instantiation((machines,), (work.microbatches,), time.exact(work.microbatches))
    try:
        found = best_instantiation(times, machines, work.pipelines or 1, work.microbatches)
    except UsageError:
        return None
    return found if work.pipelines in (None, len(found.nodes)) else None


def _averaging_s(work: Work, nodes: Sequence[int]) -> float:
    """The gradients of a machine of the shortest pipeline, in a ring of all, of which nothing is hidden."""
    pipelines = len(nodes)
    if pipelines == 1 or work.link_bytes_per_s is None:
        return 0.0
    gradients = sum(layer.state_bytes for layer in work.layers) / _OF_STATE / min(nodes)
    return 2 * (pipelines - 1) / pipelines * gradients / work.link_bytes_per_s


def _check(work: Work, kind: MachineKind) -> None:
    numbers = {"batch": work.batch, "microbatches": work.microbatches, "machines": kind.most}
    for name, number in numbers.items():
        if number < 1:
            raise UsageError(f"{name} is {number}: it must be at least 1")
    if work.batch % work.microbatches:
        raise UsageError(f"a batch of {work.batch} samples makes no {work.microbatches} equal microbatches")
    if not kind.speed > 0:
        raise UsageError(f"the speed of {kind.name} is {kind.speed}: it must be more than 0")


def knee(found: Sequence[Size]) -> Size:
    """The size beyond which more machines bring little.

    Args:
        found: of one kind, at least one.
    """
    return max(found, key=lambda size: (size.power, -size.machines))


def recommended(by_kind: Sequence[Sequence[Size]], goal: Goal) -> tuple[Size, str]:
    """The size to take, and why.

    Args:
        by_kind: the sizes of each kind, at least one.
        goal: what is wanted.

    Raises:
        UsageError: if none reaches the goal; says what would.
    """
    every = [size for found in by_kind for size in found]
    samples = goal.samples
    if samples is None:
        best = min(map(knee, by_kind), key=lambda size: (size.price_per_million, -size.samples_per_s))
        return best, "the knee of the kind whose samples cost least there: more machines bring little"
    if goal.within_s is not None:
        in_time = [size for size in every if size.takes_s(samples) <= goal.within_s]
        if not in_time:
            fastest = min(size.takes_s(samples) for size in every)
            raise UsageError(f"no size does it in time: the fastest takes {fastest / 3600:.3g} h")
        best = min(in_time, key=lambda size: (size.price_of(samples), size.machines))
        return best, "the cheapest that is done in time"
    if goal.budget is not None:
        payable = [size for size in every if size.price_of(samples) <= goal.budget]
        if not payable:
            cheapest = min(size.price_of(samples) for size in every)
            raise UsageError(f"no size is within the budget: the cheapest costs {cheapest:.4g}")
        return min(payable, key=lambda size: size.takes_s(samples)), "the fastest within the budget"
    return min(every, key=lambda size: (size.price_of(samples), size.machines)), "the cheapest"
