"""Microbatches for unlike pipelines."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from swift_ft.planning.layout.microbatch_shares import pipeline_ns, share_microbatches

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
    assert share_microbatches([[4, 4, 4], [8, 8, 4]], 16) == [11, 5]
    assert share_microbatches([[4, 4, 4], [6, 6, 0]], 16) == [10, 6]
