"""Pipelines that use all nodes, and the global batch dealt to them (Oobleck §4.2)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations_with_replacement

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_ft.costs.layer_profile import LayerProfile
from swift_ft.costs.schedule_orders import Schedule
from swift_ft.errors import UsageError
from swift_ft.planning.layout.costs import StageCosts
from swift_ft.planning.layout.instantiate import best_instantiation, count_sets, deal
from swift_ft.planning.layout.makespan import StageTime
from swift_ft.planning.layout.pipeline_time import PipelineTime
from swift_ft.planning.layout.templates import node_counts, templates_for
from tests.support.node_sets import node_sets


@pytest.mark.parametrize(
    ("sizes", "nodes", "fewest", "count"),
    [
        ((2, 3, 4), 7, 1, 2),
        ((2, 3, 4), 13, 1, 5),
        (tuple(node_counts(13, 1, 2, layers=99)), 13, 2, 23),
        (tuple(node_counts(13, 3, 3, layers=99)), 13, 4, 1),
    ],
)
def test_counts_of_the_paper(sizes: tuple[int, ...], nodes: int, fewest: int, count: int) -> None:
    assert count_sets(sizes, nodes, fewest) == count == len(list(node_sets(sizes, nodes, fewest)))


@given(st.sets(st.integers(1, 6), min_size=1), st.integers(1, 14), st.integers(1, 4))
def test_sets_are_all_that_there_are(sizes: set[int], nodes: int, fewest: int) -> None:
    found = list(node_sets(tuple(sizes), nodes, fewest))
    all_sets = [
        one
        for count in range(fewest, nodes + 1)
        for one in combinations_with_replacement(sorted(sizes), count)
        if sum(one) == nodes
    ]
    assert sorted(found) == sorted(all_sets)
    assert count_sets(tuple(sizes), nodes, fewest) == len(all_sets)


def shares_of(total: int, pipelines: int) -> Iterator[tuple[int, ...]]:
    """All ways to deal microbatches to pipelines, one at least for each."""
    if pipelines == 1:
        yield (total,)
        return
    for first in range(1, total - pipelines + 2):
        for rest in shares_of(total - first, pipelines - 1):
            yield (first, *rest)


TIMES = st.builds(
    PipelineTime,
    st.lists(st.builds(StageTime, st.integers(1, 50), st.integers(1, 99)), min_size=1, max_size=3).map(tuple),
    st.sampled_from([Schedule.ONE_F_ONE_B, Schedule.GPIPE]),
    st.sampled_from([0, 5]),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(TIMES, min_size=1, max_size=3), st.integers(1, 14))
def test_no_other_deal_is_faster(times: list[PipelineTime], microbatches: int) -> None:
    allowed = [
        shares
        for shares in shares_of(microbatches, len(times))
        if all(share >= time.least for share, time in zip(shares, times, strict=True))
    ]
    if not allowed:
        with pytest.raises(UsageError, match="too few: the pipelines need"):
            deal(times, microbatches)
        return

    def slowest(shares: tuple[int, ...]) -> int:
        return max(time.exact(share) for time, share in zip(times, shares, strict=True))

    dealt = deal(times, microbatches)
    assert dealt in allowed
    assert slowest(dealt) == min(map(slowest, allowed))


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_no_other_set_of_pipelines_is_faster(data: st.DataObject) -> None:
    layer = st.builds(LayerProfile, st.integers(1, 40), st.integers(1, 40), st.just(0))
    layers = data.draw(st.lists(layer, min_size=4, max_size=8))
    tolerate, least = data.draw(st.integers(0, 2)), data.draw(st.integers(1, 2))
    nodes = data.draw(st.integers((tolerate + 1) * least, 8))
    microbatches = data.draw(st.integers(nodes, 24))
    costs = StageCosts(layers)
    templates = templates_for(costs, node_counts(nodes, tolerate, least, len(layers)))
    times = {one.nodes: PipelineTime.of(costs, one, Schedule.ONE_F_ONE_B) for one in templates}
    found = best_instantiation(times, nodes, tolerate + 1, microbatches)
    assert sum(found.nodes) == nodes
    assert sum(found.microbatches) == microbatches
    assert len(found.nodes) > tolerate
    best = None
    for sizes in node_sets(tuple(times), nodes, tolerate + 1):
        own = [times[size] for size in sizes]
        slowest = max(time.exact(share) for time, share in zip(own, deal(own, microbatches), strict=True))
        best = slowest if best is None else min(best, slowest)
    assert found.iteration_ns == best


@given(TIMES, st.integers(0, 5000), st.integers(3, 20))
def test_what_fits_into_a_time(time: PipelineTime, limit: int, most: int) -> None:
    within = [count for count in range(time.least, most + 1) if time.exact(count) <= limit]
    assert time.exact_within(limit, most) == max(within, default=0)


def test_what_cannot_be() -> None:
    time = PipelineTime((StageTime(1, 2), StageTime(1, 2)))
    with pytest.raises(UsageError, match=r"no 2 or more pipelines of 3 nodes use 7 nodes exactly"):
        best_instantiation({3: time}, 7, 2, 100)
    with pytest.raises(UsageError, match=r"batch of 3 microbatches is 1 too small: the pipelines need 4"):
        best_instantiation({3: time}, 6, 2, 3)
