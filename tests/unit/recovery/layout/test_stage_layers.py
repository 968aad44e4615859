"""Which layers are on which stage, and what moves."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from swift_ft.recovery.events import StatusReported
from swift_ft.recovery.layout.stage_layers import (
    begun_layout,
    cuts_of,
    even_layout,
    layers_by_rank,
    layers_of,
    moves_between,
    stages_in,
    why_no_layout,
)

LAYOUTS = st.lists(st.integers(1, 5), min_size=1, max_size=8).map(tuple)


def reports(stages: list[tuple[int, ...]], layers: int) -> dict[int, StatusReported]:
    return {
        rank: StatusReported(rank=rank, generation=1, iteration=0, stages=own, layers=layers)
        for rank, own in enumerate(stages)
    }


@given(st.integers(1, 8), st.integers(0, 30))
def test_an_even_layout_has_all_layers_and_differs_by_one(stages: int, more: int) -> None:
    layout = even_layout(stages + more, stages)
    assert not why_no_layout(layout, stages + more, [stages])
    assert max(layout) - min(layout) <= 1


def test_the_last_stage_has_one_more() -> None:
    assert even_layout(10, 3) == (3, 3, 4)


@given(LAYOUTS)
def test_each_layer_is_on_one_stage(layout: tuple[int, ...]) -> None:
    found = [layer for stage in range(len(layout)) for layer in layers_of(layout, stage)]
    assert found == list(range(sum(layout)))


def test_layers_of_workers_with_several_stages() -> None:
    v_shaped = reports([(0, 3), (1, 2)], layers=7)
    assert layers_by_rank(v_shaped, (1, 2, 3, 1)) == {0: (0, 6), 1: (1, 2, 3, 4, 5)}
    assert layers_by_rank(v_shaped, ()) == {0: (0, 5, 6), 1: (1, 2, 3, 4)}
    assert layers_by_rank(reports([(0,), (1,)], layers=0), ()) == {}


@given(st.data(), LAYOUTS)
def test_moves_lead_from_one_layout_to_the_other(data: st.DataObject, old: tuple[int, ...]) -> None:
    """Each layer that has to move does so once, and no other one: these are the fewest bytes."""
    cuts = data.draw(
        st.lists(st.integers(1, sum(old) - 1), min_size=len(old) - 1, max_size=len(old) - 1, unique=True)
        if sum(old) > 1
        else st.just([])
    )
    ends = [0, *sorted(cuts), sum(old)]
    new = tuple(end - first for first, end in pairwise(ends))
    every = reports([(rank,) for rank in range(len(old))], layers=sum(old))
    before, after = layers_by_rank(every, old), layers_by_rank(every, new)
    held = {rank: {*layers} for rank, layers in before.items()}
    moves = moves_between(before, after)
    for move in moves:
        assert held[move.source] >= {*move.layers}
        held[move.source] -= {*move.layers}
        held[move.target] |= {*move.layers}
    assert {rank: tuple(sorted(layers)) for rank, layers in held.items()} == after
    changed = sum(layer not in before[rank] for rank, layers in after.items() for layer in layers)
    assert sum(len(move.layers) for move in moves) == changed


def test_why_a_layout_cannot_be() -> None:
    assert why_no_layout((3, 3), 6, [2]) == ""
    assert why_no_layout((3, 3), 0, [2]) == "the model is no LayerStack"
    assert why_no_layout((3, 3), 6, [3]) == "it has 2 stages, and the job 3"
    assert why_no_layout((3, 4), 6, [2]) == "it has 7 layers, and the model 6"
    assert why_no_layout((6, 0), 6, [2]) == "a stage has no layer"


def test_pipelines_of_unlike_numbers_of_stages() -> None:
    """Ranks 0 and 3, and between them 1, 2 and 4."""
    stages = {0: (0, 0), 1: (1, 0), 2: (1, 1), 3: (0, 1), 4: (1, 2)}
    every = {
        rank: StatusReported(
            rank=rank, generation=1, iteration=0, stages=(stage,), layers=7, pipeline=pipeline
        )
        for rank, (pipeline, stage) in stages.items()
    }
    assert stages_in(every) == (2, 3)
    assert begun_layout(every) == (3, 4, 2, 2, 3)
    every[0] = replace(every[0], cut=(6, 1))
    assert begun_layout(every) == (6, 1, 2, 2, 3)
    found = layers_by_rank(every, ())
    assert found == {0: (0, 1, 2, 3, 4, 5), 1: (0, 1), 2: (2, 3), 3: (6,), 4: (4, 5, 6)}
    assert layers_by_rank(every, (1, 6, 5, 1, 1))[2] == (5,)
    assert why_no_layout((6, 1, 2, 2, 2), 7, stages_in(every)) == "it has 6 layers, and the model 7"
    assert cuts_of((1, 2, 3), (2, 1)) == [(1, 2), (3,)]
