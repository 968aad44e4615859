"""Pipelines of unlike devices: groups, tensor parallelism, stages on nodes, layers (AutoHet §III). Pure.

Tensor parallelism is the same everywhere, and its workers are devices of one node. They count as one device
from there on, as in AutoHet's Algorithm 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

from swift_ft.errors import UsageError
from swift_ft.planning.layout.cluster import Cluster, Node
from swift_ft.planning.layout.device_groups import Grouping, group_devices
from swift_ft.planning.layout.group_tables import Kind, Task
from swift_ft.planning.layout.layer_balance import Balance, Stage, balance
from swift_ft.planning.layout.profile import NANOSECONDS, LayerProfile
from swift_ft.units import format_bytes

__all__ = ["DevicePlan", "Pipeline", "plan_devices"]

_WHOLE = 1000
_GRADIENTS = 8  # 2 of the 16 bytes per parameter of mixed-precision Adam are gradients


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
    """Who computes what.

    Attributes:
        tp: devices of a stage.
        pipelines: replicas of each other.
        iteration_ns: of the slowest pipeline, with averaging gradients.
        idle: devices of each kind that would make nothing faster.
        gap: by which share another grouping may have more effective power at most; 0.0 if it is proven best.
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
    return max(plans, key=lambda plan: (len(plan.pipelines) / plan.iteration_ns, -plan.tp))


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
    """The best plan for a degree of tensor parallelism; None if nothing fits."""
    kinds = [Kind(units.power[n.kind], units.memory[n.kind], units.count[n.kind]) for n in units.kinds]
    state = sum(layer.state_bytes for layer in layers)
    for grouping in group_devices(kinds, Task(state, microbatches, len(layers))):
        cuts = _balanced(units, grouping, layers, microbatches, reference)
        if cuts is not None:
            return _plan(units, grouping, cuts, layers, microbatches)
    return None


def _balanced(
    units: _Units, grouping: Grouping, layers: Sequence[LayerProfile], microbatches: int, reference: int
) -> list[Balance] | None:
    """The layers of each group; None if those of one do not fit."""
    made: dict[tuple[int, ...], Balance | None] = {}
    for group in grouping.groups:
        if group not in made:
            stages = [units.stage(kind) for kind in _ordered(units.kinds, group)]
            made[group] = balance(layers, stages, reference=reference, microbatches=microbatches)
            if made[group] is None:
                return None
    return [cut for group in grouping.groups if (cut := made[group]) is not None]


def _ordered(kinds: Sequence[Node], group: Sequence[int]) -> list[str]:
    """The kinds of a group's stages: the weakest first, where activations need most memory (§III-C)."""
    return [node.kind for node, count in zip(kinds, group, strict=True) for _ in range(count)]


def _plan(
    units: _Units,
    grouping: Grouping,
    cuts: Sequence[Balance],
    layers: Sequence[LayerProfile],
    microbatches: int,
) -> DevicePlan:
    kinds = [_ordered(units.kinds, group) for group in grouping.groups]
    nodes = _on_nodes(units, kinds)
    pipelines = tuple(
        Pipeline(
            devices={kind: n * units.tp for kind, n in sorted(Counter(mine).items())},
            stages=cut.stages,
            times_ns=cut.times_ns,
            kinds=tuple(mine),
            nodes=tuple(where),
            iteration_ns=cut.iteration_ns(microbatches),
        )
        for mine, where, cut in zip(kinds, nodes, cuts, strict=True)
    )
    used = Counter(kind for mine in kinds for kind in mine)
    idle = {kind: (n - used[kind]) * units.tp for kind, n in sorted(units.count.items()) if n > used[kind]}
    slowest = max(pipeline.iteration_ns for pipeline in pipelines)
    return DevicePlan(
        tp=units.tp,
        pipelines=pipelines,
        iteration_ns=slowest + _averaging_ns(units, cuts, layers),
        idle=idle,
        gap=0.0 if grouping.is_proven else float(grouping.bound / grouping.product - 1),
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


def _averaging_ns(units: _Units, cuts: Sequence[Balance], layers: Sequence[LayerProfile]) -> int:
    """To average the gradients of the largest stage in a ring over the links; 0 if these are not known."""
    link, replicas = units.cluster.link_bytes_per_s, len(cuts)
    if link is None or replicas == 1:
        return 0
    stages = {stage for cut in cuts for stage in cut.stages}
    largest = max(sum(layer.state_bytes for layer in layers[first : last + 1]) for first, last in stages)
    volume = 2 * (replicas - 1) * largest // (_GRADIENTS * units.tp * replicas)
    return volume * NANOSECONDS // link


def _why_not(cluster: Cluster, layers: Sequence[LayerProfile], degrees: Sequence[int]) -> str:
    """Which constraint no plan meets, and by how much."""
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
