"""Pipelines of other sizes: as few nodes as possible change their pipeline."""

from __future__ import annotations

from itertools import pairwise, permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_ft.errors import UsageError
from swift_ft.recovery.layout.losses import Pipelines, moved, reform


@pytest.mark.parametrize(
    ("sizes", "added", "after"),
    [
        ((2, 3, 4), (9, 10), ((0, 1), (2, 3, 4), (5, 6, 9, 10))),
        ((2, 2, 3, 2), (9, 10), ((0, 1), (5, 6), (9, 10), (2, 3, 4))),
        ((3, 4), (), ((2, 3, 4), (0, 1, 6, 5))),
    ],
)
def test_pipelines_that_keep_their_size_stay(
    sizes: tuple[int, ...], added: tuple[int, ...], after: Pipelines
) -> None:
    assert reform(((0, 1), (2, 3, 4), (5, 6)), sizes, added) == after


@given(st.data())
def test_no_other_way_moves_fewer_nodes(data: st.DataObject) -> None:
    before = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    starts = [sum(before[:number]) for number in range(len(before))]
    pipelines = [tuple(range(start, start + size)) for start, size in zip(starts, before, strict=True)]
    nodes = sum(before)
    added = tuple(range(nodes, nodes + data.draw(st.integers(0, 5))))
    cuts = data.draw(st.sets(st.integers(1, max(1, nodes + len(added) - 1)), max_size=3))
    borders = [0, *sorted(cut for cut in cuts if cut < nodes + len(added)), nodes + len(added)]
    sizes = [last - first for first, last in pairwise(borders)]
    after = reform(pipelines, sizes, added)
    assert sorted(map(len, after)) == sorted(sizes)
    assert sorted(node for one in after for node in one) == list(range(nodes + len(added)))
    olds = before + [0] * max(0, len(sizes) - len(before))
    kept = max(
        sum(min(old, new) for old, new in zip(order, [*sizes, *[0] * len(order)], strict=False))
        for order in permutations(olds)
    )
    assert moved(pipelines, after) == nodes - kept
    same = {size: min(before.count(size), sizes.count(size)) for size in before}
    assert sum(one in after for one in pipelines) >= sum(same.values())


def test_what_cannot_be() -> None:
    with pytest.raises(UsageError, match=r"pipelines of 2, 2 nodes do not use 5 nodes exactly"):
        reform(((0, 1), (2, 3)), (2, 2), (4,))
    with pytest.raises(UsageError, match="node 1 is in the pipelines twice"):
        reform(((0, 1),), (3,), (1,))
