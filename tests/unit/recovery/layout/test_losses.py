"""Oobleck §5.1: simple reinstantiation, borrowing, merging, and the guarantee of f + 1 pipelines."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_ft.errors import UsageError
from swift_ft.recovery.layout.losses import Pipelines, reconfigure

FOUR = ((0, 1), (2, 3, 4), (5, 6, 7, 8), (9, 10, 11, 12, 13))


@pytest.mark.parametrize(
    ("lost", "after"),
    [
        ({2}, ((0, 1), (3, 4), (5, 6, 7, 8), (9, 10, 11, 12, 13))),
        ({10, 11}, ((0, 1), (2, 3, 4), (9, 12, 13), (5, 6, 7, 8))),
        ({1, 3, 4}, ((0, 13), (2, 12), (9, 10, 11), (5, 6, 7, 8))),
        (set(range(1, 12)), ((0, 12, 13),)),
        (set(), FOUR),
    ],
    ids=["simple", "simple, sorted", "borrow", "merge", "nothing lost"],
)
def test_the_steps_of_the_paper(lost: set[int], after: Pipelines) -> None:
    assert reconfigure(FOUR, lost, min_nodes=2) == after


def pipelines_of(sizes: tuple[int, ...]) -> Pipelines:
    """Pipelines of these sizes with nodes 0, 1, 2 ..."""
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    return tuple(tuple(range(a, a + n)) for a, n in zip(starts, sizes, strict=True))


def sets_of(nodes: int, least: int, fewest: int) -> list[tuple[int, ...]]:
    """All sizes of at least ``least`` that add up to ``nodes``, ``fewest`` of them at least."""

    def grow(rest: int, smallest: int) -> list[tuple[int, ...]]:
        here: list[tuple[int, ...]] = [()] if rest == 0 else []
        return here + [(n, *more) for n in range(smallest, rest + 1) for more in grow(rest - n, n)]

    return [sizes for sizes in grow(nodes, least) if len(sizes) >= fewest]


@pytest.mark.parametrize("min_nodes", [1, 2, 3])
@pytest.mark.parametrize("tolerate", [0, 1, 2, 3])
def test_any_loss_of_a_small_cluster_leaves_enough_pipelines(min_nodes: int, tolerate: int) -> None:
    """Oobleck §3.2, for all sets of pipelines of up to 12 nodes and all failures of up to f nodes."""
    least = (tolerate + 1) * min_nodes
    checked = 0
    for nodes in range(least, max(least, 12) + 1):
        for sizes in sets_of(nodes, min_nodes, tolerate + 1):
            before = pipelines_of(sizes)
            for failures in range(min(tolerate, nodes - least) + 1):
                for lost in combinations(range(nodes), failures):
                    after = reconfigure(before, lost, min_nodes=min_nodes, tolerate=tolerate)
                    left = set(range(nodes)) - set(lost)
                    assert sorted(node for nodes_ in after for node in nodes_) == sorted(left)
                    assert all(len(nodes_) >= min_nodes for nodes_ in after)
                    assert len(after) >= tolerate + 1
                    checked += 1
    assert checked


@given(st.data())
def test_all_nodes_are_used_whatever_is_lost(data: st.DataObject) -> None:
    min_nodes = data.draw(st.integers(1, 4))
    sizes = data.draw(st.lists(st.integers(min_nodes, 8), min_size=1, max_size=6))
    before = pipelines_of(tuple(sizes))
    nodes = sum(sizes)
    lost = data.draw(st.sets(st.integers(0, nodes - 1), max_size=nodes - min_nodes))
    tolerate = data.draw(st.integers(0, 4))
    after = reconfigure(before, lost, min_nodes=min_nodes, tolerate=tolerate)
    assert sorted(node for part in after for node in part) == sorted(set(range(nodes)) - lost)
    assert all(len(part) >= min_nodes for part in after)
    assert len(after) >= min(tolerate + 1, (nodes - len(lost)) // min_nodes)
    untouched = [part for part in before if len(part) == min_nodes and not lost & set(part)]
    if len(untouched) > 1:  # one alone may have to take in what is left of others
        assert sum(part in after for part in untouched) >= len(untouched) - 1


def test_short_pipelines_pass_their_surplus_on() -> None:
    """Three halves of three nodes: merging whole ones would leave three pipelines where four are promised."""
    before = pipelines_of((3, 3, 3, 3, 3))
    after = reconfigure(before, {2, 5, 8}, min_nodes=3, tolerate=3)
    assert after == ((0, 1, 3), (4, 6, 7), (9, 10, 11), (12, 13, 14))


def test_a_pipeline_that_is_gone_is_made_anew() -> None:
    before = ((0, 1), (2, 3), (4, 5, 6, 7, 8, 9))
    assert reconfigure(before, {0, 1}, min_nodes=2) == ((2, 3), (4, 5, 6, 7, 8, 9))
    assert reconfigure(before, {0, 1}, min_nodes=2, tolerate=2) == ((2, 3), (9, 8), (4, 5, 6, 7))


@pytest.mark.parametrize(
    ("pipelines", "lost", "min_nodes", "message"),
    [
        (((0, 1), (2, 3)), {0, 1, 2}, 3, r"1 nodes are left .* needs 3: 2 more would do"),
        (((0, 1),), {7}, 1, "node 7 is lost and in no pipeline"),
        (((0, 1), (1, 2)), set(), 1, "node 1 is in the pipelines twice"),
        ((), set(), 1, "there are no pipelines"),
        (((0,),), set(), 0, "must have at least 1"),
    ],
)
def test_what_cannot_be(pipelines: Pipelines, lost: set[int], min_nodes: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        reconfigure(pipelines, lost, min_nodes=min_nodes)
