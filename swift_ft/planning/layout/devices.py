"""Pipelines of unlike devices: groups, tensor parallelism, stages on nodes, layers (AutoHet §III). Pure.

Tensor parallelism is the same everywhere, and its workers are devices of one node. They count as one device
from there on, as in AutoHet's Algorithm 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from math import gcd, prod
from typing import NamedTuple

import numpy as np

from swift_ft.costs.layer_balance import Balance, Stage, balance
from swift_ft.costs.layer_profile import NANOSECONDS, LayerProfile
from swift_ft.errors import UsageError
from swift_ft.planning.layout.cluster import Cluster, Node
from swift_ft.planning.layout.device_groups import Grouping, group_devices
from swift_ft.planning.layout.group_packing import NONE, Groups, Kind, Packing, Table, Task, frontier
from swift_ft.units import format_bytes

_WHOLE = 1000
_MOST_GROUPINGS = 20  # of which the layers are dealt
_GRADIENTS = 8  # 2 of the 16 bytes per parameter of mixed-precision Adam are gradients


_MOST_GROUPS = 120
_OPERATIONS = 100_000_000  # well below a second

Group = tuple[int, ...]


@dataclass(frozen=True)
class Pipeline:
    """One pipeline.

    Attributes:
        devices: how many of each kind.
        stages: first and last layer of each stage.
        times_ns: of each stage, for one microbatch.
        kinds: of devices, by stage.
        nodes: of each stage, counted as the cluster lists them.
        iteration_ns: its time without averaging gradients.
    """

    devices: dict[str, int]
    stages: tuple[tuple[int, int], ...]
    times_ns: tuple[int, ...]
    kinds: tuple[str, ...]
    nodes: tuple[int, ...]
    iteration_ns: int


@dataclass(frozen=True)
class DevicePlan:
    """A layout on devices: who computes what.

    Attributes:
        tp: devices of a stage.
        pipelines: replicas of each other.
        iteration_ns: of the slowest pipeline, with averaging gradients.
        idle: devices of each kind that would make nothing faster.
        gap: by which share another grouping may have more effective power at most; 0.0 if it is proven best,
            in small clusters by time.
    """

    tp: int
    pipelines: tuple[Pipeline, ...]
    iteration_ns: int
    idle: dict[str, int]
    gap: float


def plan_devices(
    cluster: Cluster,
    layers: Sequence[LayerProfile],
    microbatches: int,
    *,
    tp: int | None = None,
    tensor_overhead: float = 0.05,
    measured_on: str | None = None,
) -> DevicePlan:
    """The plan with the largest throughput.

    Args:
        cluster: the devices.
        layers: with times on one device of one kind.
        microbatches: of each pipeline in an iteration.
        tp: degree of tensor parallelism; all that divide every node are tried without it.
        tensor_overhead: by which part each doubling of it falls short.
        measured_on: the kind of device whose times the layers have; the strongest without it.

    Raises:
        UsageError: if nothing fits, with the constraint and what would make it fit.
    """
    if microbatches < 1:
        raise UsageError(f"{microbatches} microbatches: a pipeline needs at least one")
    if not 0 <= tensor_overhead <= 1:
        raise UsageError(f"the overhead of a doubling is {tensor_overhead}: it must be between 0 and 1")
    powers = {node.kind: node.power for node in cluster.kinds()}
    if measured_on is not None and measured_on not in powers:
        raise UsageError(f"no device is a {measured_on!r}: there are {', '.join(powers)}")
    reference = powers[measured_on] if measured_on else max(powers.values())
    degrees = _degrees(cluster, tp)
    plans = []
    for degree in degrees:
        units = _Units(cluster, degree, round(tensor_overhead * _WHOLE))
        plan = _planned(units, layers, microbatches, reference)
        if plan is not None:
            plans.append(plan)
    if not plans:
        raise UsageError(_why_not(cluster, layers, degrees))
    return max(plans, key=_throughput)


class _Units:
    """The devices of a cluster in groups of a tensor-parallel degree, each seen as one device."""

    def __init__(self, cluster: Cluster, tp: int, overhead: int) -> None:
        self.cluster, self.tp = cluster, tp
        self.kinds = cluster.kinds()
        share = _WHOLE + overhead * (tp.bit_length() - 1)
        self.power = {node.kind: max(1, node.power * tp * _WHOLE // share) for node in self.kinds}
        self.memory = {node.kind: node.memory_bytes * tp for node in self.kinds}
        counts: Counter[str] = Counter()
        for node in cluster.nodes:
            counts[node.kind] += node.devices // tp
        self.count = counts

    def stage(self, kind: str) -> Stage:
        return Stage(self.power[kind], self.memory[kind])


def _degrees(cluster: Cluster, tp: int | None) -> list[int]:
    """Degrees of tensor parallelism that divide the devices of every node."""
    common = 0
    for node in cluster.nodes:
        common = gcd(common, node.devices)
    degrees = [degree for degree in (1 << i for i in range(common.bit_length())) if common % degree == 0]
    if tp is None:
        return degrees
    if tp < 1 or common % tp:
        raise UsageError(f"--tp {tp} does not divide the devices of every node: use a divisor of {common}")
    return [tp]


def _planned(
    units: _Units, layers: Sequence[LayerProfile], microbatches: int, reference: int
) -> DevicePlan | None:
    """The best plan for a degree of tensor parallelism; None if nothing fits.

    By AutoHet's effective power, and where all groups can be timed, by time if that is faster.
    """
    cuts = _Cuts(units, layers, microbatches, reference)
    kinds = [Kind(units.power[n.kind], units.memory[n.kind], units.count[n.kind]) for n in units.kinds]
    counts = [kind.count for kind in kinds]
    state = sum(layer.state_bytes for layer in layers)
    found = group_devices(kinds, Task(state, microbatches, len(layers)))
    all_timed = can_time_all(counts)
    groupings = [(one.groups, 0.0 if all_timed else _gap(one)) for one in found[:_MOST_GROUPINGS]]
    if all_timed:
        groupings += [(groups, 0.0) for groups in fastest_groups(counts, len(layers), cuts.time_of)]
    plans = (_plan(cuts, groups, gap) for groups, gap in groupings)
    return max((plan for plan in plans if plan), key=_throughput, default=None)


def _gap(grouping: Grouping) -> float:
    return 0.0 if grouping.is_proven else float(grouping.bound / grouping.product - 1)


def _throughput(plan: DevicePlan) -> tuple[float, int]:
    """Samples by time; among equals the plan with the fewest devices in a stage comes first."""
    return len(plan.pipelines) / plan.iteration_ns, -plan.tp


class _Cuts:
    """The layers of groups, each found once."""

    def __init__(
        self, units: _Units, layers: Sequence[LayerProfile], microbatches: int, reference: int
    ) -> None:
        self.units, self.layers, self.microbatches = units, layers, microbatches
        self._reference = reference
        self._made: dict[tuple[int, ...], _Cut | None] = {}

    def of(self, group: tuple[int, ...]) -> _Cut | None:
        """None if the layers do not fit.

        Activations need most memory in the first stages: the weakest devices come first (§III-C), or where
        the layers do not fit so, those with the most memory.
        """
        if group not in self._made:
            kinds = _ordered(self.units.kinds, group)
            roomy = sorted(kinds, key=lambda kind: -self.units.memory[kind])
            self._made[group] = self._cut(kinds) or self._cut(roomy)
        return self._made[group]

    def time_of(self, group: tuple[int, ...]) -> int | None:
        """Of an iteration, in nanoseconds; None if the layers do not fit."""
        cut = self.of(group)
        return None if cut is None else cut.balance.iteration_ns(self.microbatches)

    def _cut(self, kinds: list[str]) -> _Cut | None:
        stages = [self.units.stage(kind) for kind in kinds]
        found = balance(self.layers, stages, reference=self._reference, microbatches=self.microbatches)
        return None if found is None else _Cut(tuple(kinds), found)


class _Cut(NamedTuple):
    """A pipeline's kinds of devices in order, and their layers."""

    kinds: tuple[str, ...]
    balance: Balance


def _ordered(kinds: Sequence[Node], group: Sequence[int]) -> list[str]:
    """The kinds of a group's devices, the weakest first."""
    return [node.kind for node, count in zip(kinds, group, strict=True) for _ in range(count)]


def _plan(found: _Cuts, groups: Groups, gap: float) -> DevicePlan | None:
    """The plan with these groups; None if the layers of one do not fit."""
    cuts = [cut for group in groups if (cut := found.of(group)) is not None]
    if len(cuts) < len(groups):
        return None
    units, microbatches = found.units, found.microbatches
    kinds = [cut.kinds for cut in cuts]
    nodes = _on_nodes(units, kinds)
    pipelines = tuple(
        Pipeline(
            devices={kind: n * units.tp for kind, n in sorted(Counter(mine).items())},
            stages=cut.balance.stages,
            times_ns=cut.balance.times_ns,
            kinds=tuple(mine),
            nodes=tuple(where),
            iteration_ns=cut.balance.iteration_ns(microbatches),
        )
        for mine, where, cut in zip(kinds, nodes, cuts, strict=True)
    )
    used = Counter(kind for mine in kinds for kind in mine)
    idle = {kind: (n - used[kind]) * units.tp for kind, n in sorted(units.count.items()) if n > used[kind]}
    slowest = max(pipeline.iteration_ns for pipeline in pipelines)
    return DevicePlan(
        tp=units.tp,
        pipelines=pipelines,
        iteration_ns=slowest + _averaging_ns(units, pipelines, found.layers),
        idle=idle,
        gap=gap,
    )


def _on_nodes(units: _Units, kinds: Sequence[Sequence[str]]) -> list[list[int]]:
    """A node for each stage of each pipeline, replicas of a stage on one node where it has room."""
    free = [node.devices // units.tp for node in units.cluster.nodes]
    chosen: list[list[int]] = [[] for _ in kinds]
    for stage in range(max(map(len, kinds))):
        wanted: dict[str, list[int]] = {}
        for pipeline, mine in enumerate(kinds):
            if stage < len(mine):
                wanted.setdefault(mine[stage], []).append(pipeline)
        for kind, pipelines in wanted.items():
            mine_nodes = [i for i, node in enumerate(units.cluster.nodes) if node.kind == kind]
            rest = list(pipelines)
            while rest:
                roomy = [i for i in mine_nodes if free[i] >= len(rest)]
                node = (
                    min(roomy, key=lambda i: (free[i], i))
                    if roomy
                    else max(mine_nodes, key=lambda i: free[i])
                )
                for pipeline in rest[: free[node]]:
                    chosen[pipeline].append(node)
                rest, free[node] = rest[free[node] :], free[node] - min(free[node], len(rest))
    return chosen


def _averaging_ns(units: _Units, pipelines: Sequence[Pipeline], layers: Sequence[LayerProfile]) -> int:
    """To average the gradients of the stage that sends most, in a ring over the links; 0 without known links.

    A layer whose replicas are all on one node needs no link.
    """
    link, replicas = units.cluster.link_bytes_per_s, len(pipelines)
    if link is None:
        return 0
    holders: list[set[int]] = [set() for _ in layers]
    for pipeline in pipelines:
        for (first, last), node in zip(pipeline.stages, pipeline.nodes, strict=True):
            for layer in range(first, last + 1):
                holders[layer].add(node)
    state = [layer.state_bytes if len(nodes) > 1 else 0 for layer, nodes in zip(layers, holders, strict=True)]
    stages = {stage for pipeline in pipelines for stage in pipeline.stages}
    largest = max(sum(state[first : last + 1]) for first, last in stages)
    volume = 2 * (replicas - 1) * largest // (_GRADIENTS * units.tp * replicas)
    return volume * NANOSECONDS // link


def _why_not(cluster: Cluster, layers: Sequence[LayerProfile], degrees: Sequence[int]) -> str:
    """The constraint that no plan meets, and by how much."""
    state = sum(layer.state_bytes for layer in layers)
    memory = sum(node.devices * node.memory_bytes for node in cluster.nodes)
    if memory < state:
        return (
            f"the model's state of {format_bytes(state)} does not fit into the {format_bytes(memory)} of all "
            f"devices: {format_bytes(state - memory)} more are needed"
        )
    largest = max(layer.state_bytes for layer in layers)
    most = max(node.memory_bytes for node in cluster.nodes) * max(degrees)
    if most < largest:
        return (
            f"the largest layer needs {format_bytes(largest)}, and a stage of {max(degrees)} devices has "
            f"{format_bytes(most)}: {format_bytes(largest - most)} are missing; split the layer or raise --tp"
        )
    return (
        f"no cut of {len(layers)} layers fits into the memory of the devices, with the activations of all "
        f"microbatches in flight: {format_bytes(memory)} for {format_bytes(state)} of state in all; use more "
        "devices, smaller microbatches, or more tensor parallelism"
    )


# Groups of unlike devices by the time that their pipelines take, where all can be timed.
#
# AutoHet's effective power (``device_groups.py``) does not know that a stage has whole layers. Here the
# layers of every group that there may be are dealt, and for each number of groups the least time is sought
# within which so many disjoint groups exist. No grouping has a faster slowest pipeline.


def can_time_all(counts: Sequence[int]) -> bool:
    """Whether there are few enough groups.

    Args:
        counts: one for each kind of device.
    """
    return prod(count + 1 for count in counts) <= _MOST_GROUPS


def fastest_groups(
    counts: Sequence[int], most_devices: int, time_of: Callable[[Group], int | None]
) -> list[Groups]:
    """For each number of groups those whose slowest one is fastest.

    Args:
        counts: one for each kind of device.
        most_devices: per group.
        time_of: a group's time, in any unit; None if it cannot hold the model.

    Returns:
        The first has one group, the last as many as there can be. Devices that make no pipeline faster are
        left over.
    """
    times = {
        group: time_ns
        for group in product(*(range(count + 1) for count in counts))
        if 1 <= sum(group) <= most_devices and (time_ns := time_of(group)) is not None
    }
    limits = sorted(set(times.values()))
    packing = Packing(counts, _OPERATIONS)
    found: list[Groups] = []
    low = 0  # more groups are not faster than fewer
    while low < len(limits):
        best, high = None, len(limits)
        while low < high:
            middle = (low + high) // 2
            groups = packing.packed(_smallest(times, limits[middle], counts), len(found) + 1)
            if groups is None:
                low = middle + 1
            else:
                best, high = groups, middle
        if best is None:
            break
        found.append(_with_rest(best, times, counts))
    return found


def _with_rest(groups: Groups, times: dict[Group, int], counts: Sequence[int]) -> Groups:
    """The groups, the fastest first, with those of the devices that are left that make one faster."""
    filled = [*groups]
    for kind in reversed(range(len(counts))):
        for _ in range(counts[kind] - sum(group[kind] for group in groups)):
            more = [(*group[:kind], group[kind] + 1, *group[kind + 1 :]) for group in filled]
            gains = [times[old] - times.get(new, times[old]) for old, new in zip(filled, more, strict=True)]
            best = max(range(len(filled)), key=gains.__getitem__)
            if gains[best] > 0:
                filled[best] = more[best]
    return tuple(sorted(filled, key=lambda group: (times[group], group)))


def _smallest(times: dict[Group, int], limit: int, counts: Sequence[int]) -> Table:
    """For each count of the weaker kinds, how many of the strongest a group within a time needs."""
    table = np.full([count + 1 for count in counts[:-1]], NONE, dtype=np.int64)
    for group, time_ns in times.items():
        if time_ns <= limit:
            at = group[:-1]
            table[at] = min(int(table[at]), group[-1])
    return frontier(table)
