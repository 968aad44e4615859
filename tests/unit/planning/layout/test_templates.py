"""Templates: brute force finds nothing better, and what does not fit is explained (Oobleck §4.1)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_ft.costs.layer_profile import LayerProfile
from swift_ft.costs.schedule_orders import Schedule, is_allowed
from swift_ft.errors import UsageError
from swift_ft.planning.layout.costs import StageCosts
from swift_ft.planning.layout.makespan import makespan_ns
from swift_ft.planning.layout.pipeline_template import PER_WORKER, TemplateOptions
from swift_ft.planning.layout.search import Stage
from swift_ft.planning.layout.templates import best_template, node_counts, templates_for

LAYERS = st.builds(
    LayerProfile, st.integers(1, 30), st.integers(1, 60), st.integers(0, 20), st.integers(0, 5)
)


def fills(nodes: int, per_node: int) -> Iterator[tuple[int, ...]]:
    """All ways to give the devices of nodes to stages: powers of two inside each node."""

    def fill(rest: int) -> list[tuple[int, ...]]:
        sizes = [1 << power for power in range(rest.bit_length())]
        return [(size, *more) for size in sizes for more in fill(rest - size)] if rest else [()]

    if nodes == 0:
        yield ()
        return
    for first in fill(per_node):
        for rest in fills(nodes - 1, per_node):
            yield first + rest


def brute_force(costs: StageCosts, nodes: int, options: TemplateOptions) -> int | None:
    """The smallest makespan of all cuts; None if none fits."""
    layers, times = len(costs.layers), []
    for devices in fills(nodes, costs.devices_per_node):
        count = len(devices)
        microbatches = options.microbatches or PER_WORKER * count
        if not is_allowed(options.schedule, workers=count, microbatches=microbatches):
            continue
        for borders in combinations(range(1, layers), count - 1):
            ends = zip((0, *borders), (*borders, layers), devices, strict=True)
            stages = [Stage(*stage) for stage in ends]
            kept = [costs.kept(options.schedule, count - 1 - k, count, microbatches) for k in range(count)]
            if all(costs.fits(*stage, keep) for stage, keep in zip(stages, kept, strict=True)):
                stage_times = [costs.time(*stage) for stage in stages]
                times.append(
                    makespan_ns(stage_times, microbatches, options.schedule, transfer_ns=options.transfer_ns)
                )
    return min(times, default=None)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_brute_force_finds_nothing_better(data: st.DataObject) -> None:
    layers = data.draw(st.lists(LAYERS, min_size=1, max_size=6))
    per_node = data.draw(st.sampled_from([1, 1, 2, 3, 4]))
    memory = data.draw(st.none() | st.integers(10, 120))
    costs = StageCosts(layers, per_node, memory, data.draw(st.sampled_from([0.0, 0.2])))
    options = TemplateOptions(
        data.draw(st.none() | st.integers(1, 8)),
        data.draw(st.sampled_from([Schedule.ONE_F_ONE_B, Schedule.GPIPE, Schedule.ZERO_BUBBLE])),
        data.draw(st.sampled_from([0, 7])),
    )
    nodes = data.draw(st.integers(1, 3))
    best = brute_force(costs, nodes, options)
    if best is None:
        with pytest.raises(UsageError, match="would do"):
            best_template(costs, nodes, options)
        return
    found = best_template(costs, nodes, options)
    assert found.iteration_ns == best
    assert found.proven
    assert found.gap == 0
    assert [stage.first for stage in found.stages] == [0, *(stage.end for stage in found.stages[:-1])]
    assert sum(stage.devices for stage in found.stages) == nodes * per_node


@settings(max_examples=60, deadline=None)
@given(st.lists(LAYERS, min_size=4, max_size=30), st.integers(1, 6))
def test_a_bound_is_below_the_time(layers: list[LayerProfile], nodes: int) -> None:
    costs = StageCosts(layers, 2)
    if nodes > len(layers):
        return
    found = best_template(costs, nodes)
    assert found.bound_ns <= found.iteration_ns
    assert found.gap < 0.01
    times = [costs.time(*stage) for stage in found.stages]
    assert found.iteration_ns == makespan_ns(times, PER_WORKER * len(found.stages))


def test_memory_moves_a_border() -> None:
    layers = [LayerProfile(10, 20, 100)] * 4
    assert best_template(StageCosts(layers), 2).stages == (Stage(0, 2, 1), Stage(2, 4, 1))
    heavy = [LayerProfile(10, 20, 100, activation_bytes=50)] * 4
    tight = best_template(StageCosts(heavy, 1, 450), 2)
    assert tight.stages == (Stage(0, 2, 1), Stage(2, 4, 1))
    tighter = best_template(StageCosts(heavy, 1, 499), 3)
    assert tighter.stages[0] == Stage(0, 1, 1), "the first stage keeps the most activations"


def test_a_shared_layer_is_held_twice() -> None:
    layers = [LayerProfile(10, 20, 100), LayerProfile(10, 20, 100), LayerProfile(10, 20, 0, shared_with=0)]
    costs = StageCosts(layers)
    assert costs.memory(2, 3, 1, kept=1) == 100
    assert costs.memory(0, 3, 1, kept=1) == 200


def test_node_counts_are_consecutive() -> None:
    """Oobleck §4.1.1: from n0 to N - f n0, and no more nodes than layers."""
    assert node_counts(13, 1, 2, layers=50) == range(2, 12)
    assert node_counts(13, 3, 3, layers=50) == range(3, 5)
    assert node_counts(13, 0, 2, layers=6) == range(2, 7)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((5, 2, 2, 9), r"5 nodes cannot hold 3 pipelines of 2 nodes: 1 more nodes would do, or --tolerate 1"),
        ((9, 1, 4, 3), "3 layers make no more than 3 stages"),
        ((9, -1, 4, 3), "at least 0 losses"),
    ],
)
def test_clusters_that_are_too_small(arguments: tuple[int, int, int, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        node_counts(*arguments)


@pytest.mark.parametrize(
    ("costs", "nodes", "options", "message"),
    [
        (
            StageCosts([LayerProfile(1, 1, 1000)] * 4, 1, 1500),
            2,
            TemplateOptions(),
            "1.50 kB per device are 500 B too few; --memory 2000 would do",
        ),
        (
            StageCosts([LayerProfile(1, 1, 1)] * 2),
            3,
            TemplateOptions(),
            "3 stages, 1 more than layers; 2 nodes",
        ),
        (
            StageCosts([LayerProfile(1, 1, 1)] * 4),
            3,
            TemplateOptions(2),
            "2 are 1 too few for 3 nodes; --microbatches 3 would do",
        ),
        (
            StageCosts([LayerProfile(1, 1, 1)]),
            1,
            TemplateOptions(schedule=Schedule.INTERLEAVED),
            "1 layers make no 2 stages",
        ),
    ],
)
def test_what_does_not_fit(costs: StageCosts, nodes: int, options: TemplateOptions, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        templates_for(costs, [nodes], options)
