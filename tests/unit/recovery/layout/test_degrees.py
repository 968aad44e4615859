"""Degrees of parallelism: short text, what is refused, the layout that follows, ranks as frameworks count."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_ft.errors import UsageError
from swift_ft.recovery.layout.degrees import AXES, PP_SLOWEST, Degrees, parse_degrees
from swift_ft.recovery.layout.mesh import Layout, Slot, held_by, stages_of, tiles_of
from swift_ft.recovery.layout.stage_layers import even_layout
from swift_ft.recovery.layout.tensors import StateTensor


@pytest.mark.parametrize(
    ("text", "workers", "degrees"),
    [
        ("dp=2,tp=2,pp=2", None, Degrees(dp=2, tp=2, pp=2)),
        (" pp=3 , cp=2 ", 6, Degrees(pp=3, cp=2)),
        ("sp=2,ep=4", None, Degrees(cp=2, ep=4)),
        ("dp_replicate=2,dp_shard=4", None, Degrees(dp=2, dp_shard=4, zero=3)),
        ("dp=2,dp_shard=-1,tp=2", 16, Degrees(dp=2, dp_shard=4, tp=2, zero=3)),
        ("dp=-1,tp=4", 4, Degrees(tp=4)),
        ("T=4,P=2,D=1", None, Degrees(tp=4, pp=2)),
    ],
)
def test_short_text(text: str, workers: int | None, degrees: Degrees) -> None:
    assert parse_degrees(text, workers) == degrees


@pytest.mark.parametrize(
    ("text", "workers", "words"),
    [
        ("dp=2,xp=2", None, "'xp' is no degree: the nearest name is 'tp'"),
        ("dp_shart=2", None, "the nearest name is 'dp_shard'"),
        ("tp=0", None, "tp=0 is no degree: it must be 1 or more"),
        ("tp=-2", None, "tp=-2 is no degree"),
        ("tp=two", None, "tp=two is no degree: it must be a whole number"),
        ("tp=²", None, "must be a whole number"),
        ("tp", None, "'tp' is no degree: write it like"),
        ("", None, "write it like"),
        ("tp=2,tp=2", None, "'tp' is given twice: give it once"),
        ("sp=2,cp=2", None, "'cp' is given twice, as 'sp' before"),
        ("tp=3", 16, "tp=3 do not fit 16 workers: their product is 3, and must multiply to 16"),
        ("tp=3,dp=-1", 16, "their product is 3, and must divide them"),
        ("dp=-1", None, "dp is what is left of all workers: say how many there are"),
        ("dp=-1,tp=-1", 8, "'dp' and 'tp' are both what is left"),
        ("tp=" + "9" * 5000, None, "must be from 1 to 65536"),
        ("tp=65536,dp=2", None, "a layout of 131072 devices is too large"),
    ],
)
def test_what_is_refused(text: str, workers: int | None, words: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_degrees(text, workers)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


sizes = st.fixed_dictionaries({axis: st.integers(1, 3) for axis in AXES})


@given(sizes, st.booleans(), st.permutations(AXES))
def test_each_slot_has_its_own_rank(sizes: dict[str, int], shared: bool, order: list[str]) -> None:
    degrees = replace(Degrees(**sizes), zero=3 if sizes["dp_shard"] > 1 else 0, order=tuple(order))  # type: ignore[arg-type]
    ranks = degrees.ranks(shared=shared)
    assert sorted(ranks) == list(range(degrees.workers))
    assert degrees.layout(9, shared=shared).size == degrees.workers


@given(sizes)
def test_short_text_counts_ranks_as_slots(sizes: dict[str, int]) -> None:
    degrees = Degrees(**sizes)  # type: ignore[arg-type]
    assert degrees.ranks() == tuple(range(degrees.workers))
    stages = stages_of(even_layout(9, degrees.pp))
    sp = degrees.dp_shard * degrees.cp
    assert degrees.layout(9) == Layout((stages,) * degrees.dp, tp=degrees.tp, ep=degrees.ep, sp=sp)


def test_ranks_with_stages_slowest_are_those_of_a_device_mesh() -> None:
    """A mesh of (pp, dp, cp, tp) numbers its ranks row by row, as torch's ``init_device_mesh`` does."""
    degrees = Degrees(dp=2, pp=3, cp=2, tp=2, order=PP_SLOWEST)
    mesh = np.arange(24).reshape(3, 2, 2, 2)
    for slot, rank in zip(degrees.layout(6).slots(), degrees.ranks(), strict=True):
        assert mesh[slot.stage, slot.pipeline, slot.sp, slot.tp] == rank


def test_workers_that_share_no_state_are_replicas_beside_those_that_do() -> None:
    """Tensors are cut by "sp" for the sake of the other layout: here each worker must still hold all."""
    tensors = [StateTensor("weight", (12,), 1, (0,), (("tp", 0), ("ep", 0), ("sp", 0)))]
    for degrees, lengths in (
        (Degrees(dp=2, cp=2, tp=2), {6}),
        (Degrees(dp=2, dp_shard=3, cp=2, zero=3), {2}),
        (Degrees(ep=2, dp_shard=2, zero=3), {3}),
        (Degrees(ep=2, dp=2), {12}),
    ):
        held = held_by(tensors, tiles_of(tensors, degrees.layout(1, shared=True)))
        assert len(held) == degrees.workers
        assert {end - start for slices in held.values() for start, end in slices["weight"]} == lengths


@pytest.mark.parametrize(
    ("layers", "stages", "like_a_stack", "first_more"),
    [(10, 3, (3, 3, 4), (4, 3, 3)), (10, 4, (2, 3, 2, 3), (3, 3, 2, 2)), (9, 3, (3, 3, 3), (3, 3, 3))],
)
def test_an_even_cut_is_that_of_a_stack_or_of_a_framework_that_fills_first_stages(
    layers: int, stages: int, like_a_stack: tuple[int, ...], first_more: tuple[int, ...]
) -> None:
    assert even_layout(layers, stages) == like_a_stack
    assert Degrees(pp=stages).layout(layers).pipelines == (stages_of(like_a_stack),)
    assert Degrees(pp=stages, first_more=True).layout(layers).pipelines == (stages_of(first_more),)


def test_a_cut_of_unequal_stages_with_an_embedding_and_a_head() -> None:
    degrees = Degrees(pp=3, cut=(2, 4, 3))
    assert degrees.layout(9).pipelines == (((0, 1), (2, 5), (6, 8)),)
    assert degrees.layout(11).pipelines == (((0, 2), (3, 6), (7, 10)),)
    with pytest.raises(UsageError, match="the stages have 9 layers and the profile has 10"):
        degrees.layout(10)
    with pytest.raises(UsageError, match="does not fit 2 stages"):
        Degrees(pp=2, cut=(1, 2, 3))
    with pytest.raises(UsageError, match="4 stages per worker are not contiguous layers"):
        Degrees(pp=2, stages_per_worker=4).layout(8)


def test_slots_of_a_layout_are_in_the_order_of_the_axes() -> None:
    slots = list(Degrees(dp=2, pp=2, cp=2, tp=2).layout(4).slots())
    assert slots[:3] == [Slot(0, 0, 0, 0, 0), Slot(0, 0, 0, 0, 1), Slot(0, 0, 0, 1, 0)]


def test_what_differs_from_one_worker() -> None:
    assert Degrees(dp=2, tp=4).to_dict() == {"dp": 2, "tp": 4}
