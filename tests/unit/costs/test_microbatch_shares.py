"""Microbatches for unlike pipelines."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_ft.costs.layer_profile import LayerProfile
from swift_ft.costs.schedule_orders import Schedule
from swift_ft.costs.shared_machines import loads_of_pipelines, pipeline_ns, share_microbatches
from swift_ft.planning.layout.makespan import StageTime
from swift_ft.planning.layout.shared_makespan import shared_makespan_ns

PIPELINES = st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=4), min_size=1, max_size=3)


@given(PIPELINES, st.integers(0, 9), st.integers(1, 3))
def test_no_other_shares_end_earlier(pipelines: list[list[int]], more: int, fewest: int) -> None:
    total = fewest * len(pipelines) + more
    counts = share_microbatches(pipelines, total, fewest)
    assert sum(counts) == total
    assert min(counts) >= fewest

    def slowest(shares: tuple[int, ...] | list[int]) -> int:
        return max(map(pipeline_ns, pipelines, shares))

    every = itertools.product(range(fewest, total + 1), repeat=len(pipelines))
    assert slowest(counts) == min(slowest(shares) for shares in every if sum(shares) == total)


def test_a_pipeline_with_a_machine_less() -> None:
    assert share_microbatches([[4, 4, 4], [4, 4, 4]], 16) == [8, 8]
    assert share_microbatches([[4, 4, 4], [8, 4]], 16) == [11, 5]
    assert share_microbatches([[4, 4, 4], [6, 6]], 16) == [10, 6]


def test_stages_of_a_machine_count_together() -> None:
    """Also those of several pipelines, and more on a slow machine."""
    layers = [LayerProfile(1, 2, 0)] * 7
    cuts = [(2, 3, 2), (1, 4, 2)]
    assert loads_of_pipelines(layers, ["aab", "cdc"], cuts) == [[15, 6], [12, 9]]
    assert loads_of_pipelines(layers, ["aab", "cdb"], cuts) == [[15, 12], [12, 12, 3]]
    assert loads_of_pipelines(layers, ["aab", "cdc"], cuts, {"b": 3000}) == [[18, 15], [12, 9]]


@pytest.mark.parametrize("schedule", [Schedule.ONE_F_ONE_B, Schedule.GPIPE])
@pytest.mark.parametrize("cut", [(2, 2, 2), (2, 3, 5), (3, 2, 5), (1, 4, 5), (4, 1, 5)])
@pytest.mark.parametrize("machines", ["abc", "aab", "abb", "aba"])
def test_it_is_what_the_schedule_takes(schedule: Schedule, cut: tuple[int, ...], machines: str) -> None:
    """Within a tenth, whatever the stages that share a machine."""
    (loads,) = loads_of_pipelines([LayerProfile(10, 20, 0)] * sum(cut), [machines], [cut])
    exact = shared_makespan_ns([StageTime(10 * n, 20 * n) for n in cut], machines, 8, schedule)
    assert pipeline_ns(loads, 8) == pytest.approx(exact, rel=0.1)
