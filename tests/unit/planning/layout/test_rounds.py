"""Batches for schedules that divide microbatches into rounds: brute force finds no better deal."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_ft.costs.schedule_orders import Schedule
from swift_ft.errors import UsageError
from swift_ft.planning.layout.instantiate import best_instantiation
from swift_ft.planning.layout.makespan import StageTime
from swift_ft.planning.layout.pipeline_time import PipelineTime
from tests.support.node_sets import node_sets

IN_ROUNDS = (Schedule.INTERLEAVED, Schedule.ZERO_BUBBLE)


def all_deals(times: dict[int, PipelineTime], nodes: int, fewest: int, microbatches: int) -> Iterator[int]:
    """The time of the slowest pipeline of each set and each deal."""
    for sizes in node_sets(sorted(times), nodes, fewest):
        counts = [times[size].counts(microbatches) for size in sizes]
        for shares in product(*counts):
            if sum(shares) == microbatches:
                yield max(times[size].exact(share) for size, share in zip(sizes, shares, strict=True))


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_no_other_deal_is_faster(data: st.DataObject) -> None:
    schedule = data.draw(st.sampled_from(IN_ROUNDS))
    chunks = data.draw(st.integers(1, 2))
    times = {}
    for size in data.draw(st.sets(st.integers(1, 3), min_size=1)):
        stages = data.draw(
            st.lists(
                st.builds(StageTime, st.integers(1, 9), st.integers(1, 9)),
                min_size=size * chunks,
                max_size=size * chunks,
            )
        )
        times[size] = PipelineTime(tuple(stages), schedule, data.draw(st.integers(0, 2)), chunks)
    nodes, fewest = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 2))
    microbatches = data.draw(st.integers(1, 12))
    best = min(all_deals(times, nodes, fewest, microbatches), default=None)
    if best is None:
        with pytest.raises(UsageError):
            best_instantiation(times, nodes, fewest, microbatches)
        return
    found = best_instantiation(times, nodes, fewest, microbatches)
    assert found.iteration_ns == best
    assert sum(found.nodes) == nodes
    assert len(found.nodes) >= fewest
    assert sum(found.microbatches) == microbatches


def test_shares_follow_the_rounds() -> None:
    """Two workers take 2, 3, or an even number from 4 on; seven microbatches are 3 and 4."""
    time = PipelineTime((StageTime(1, 2), StageTime(1, 2)), Schedule.ZERO_BUBBLE)
    assert time.counts(8) == [1, 2, 3, 4, 6, 8]
    assert sorted(best_instantiation({2: time}, 4, 1, 7).microbatches) == [3, 4]


@pytest.mark.parametrize(
    ("nodes", "fewest", "microbatches", "message"),
    [
        (3, 1, 8, "no 1 or more pipelines of 2 nodes use 3 nodes exactly"),
        (2, 1, 5, "exactly 5 microbatches: .* 4 would do"),
        (4, 2, 1, "a global batch of 1 microbatches is too small"),
    ],
)
def test_what_cannot_be_dealt_is_said(nodes: int, fewest: int, microbatches: int, message: str) -> None:
    time = PipelineTime((StageTime(1, 2), StageTime(1, 2)), Schedule.ZERO_BUBBLE)
    with pytest.raises(UsageError, match=message):
        best_instantiation({2: time}, nodes, fewest, microbatches)


def test_what_would_take_hours_is_refused() -> None:
    times = {n: PipelineTime((StageTime(1, 2),) * n, Schedule.ZERO_BUBBLE) for n in range(2, 40)}
    with pytest.raises(UsageError, match="too many to plan for"):
        best_instantiation(times, 4000, 2, 8000)
