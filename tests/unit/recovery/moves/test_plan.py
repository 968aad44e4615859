"""Moves between layouts: properties over random layouts and tensors, and who sends."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_ft.errors import UsageError
from swift_ft.recovery.layout.degrees import Degrees
from swift_ft.recovery.layout.mesh import Layout, held_by, tiles_of
from swift_ft.recovery.layout.tensors import StateTensor, clipped, count, overlap
from swift_ft.recovery.moves.plan import MovePlan, plan_moves
from tests.support.reshard import Array, carried_out, sliced

LAYERS = 4


def model(width: int = 96) -> list[StateTensor]:
    """One tensor per layer, cut by tensor parallelism."""
    return [StateTensor(f"layers.{i}", (width,), 1, (i,), (("tp", 0),)) for i in range(LAYERS)]


def moves(old: Layout, new: Layout, tensors: list[StateTensor], *, in_order: bool = False) -> MovePlan:
    """The plan between two layouts; new devices follow the old ones."""
    devices = range(max(old.size, new.size))
    return plan_moves(tensors, (old, range(old.size)), (new, devices), in_order=in_order)


# ------------------------------------------------------------------------------ any layout, any tensor


@st.composite
def layouts(draw: st.DrawFn, largest: int = 12) -> Layout:
    """Layouts of up to some slots, whose pipelines may differ."""
    tp, ep, sp = draw(
        st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 2)).filter(
            lambda degrees: math.prod(degrees) <= largest
        )
    )
    pipelines: list[tuple[tuple[int, int], ...]] = []
    room = largest // (tp * ep * sp)
    for _ in range(draw(st.integers(1, min(3, room)))):
        left = room - sum(map(len, pipelines)) - (2 - len(pipelines))
        cuts = draw(st.sets(st.integers(1, LAYERS - 1), max_size=max(0, min(LAYERS - 1, left - 1))))
        starts = [0, *sorted(cuts), LAYERS]
        pipelines.append(tuple((a, b - 1) for a, b in pairwise(starts)))
    return Layout(tuple(pipelines), tp=tp, ep=ep, sp=sp)


@st.composite
def states(draw: st.DrawFn) -> list[StateTensor]:
    """Tensors of every kind: cut, replicated, tied, padded, of experts, sharded over replicas, scalars."""
    tensors = []
    for number in range(draw(st.integers(1, 5))):
        shape = tuple(draw(st.lists(st.integers(1, 7), max_size=2)))
        axes = draw(st.lists(st.sampled_from(["dp", "ep", "sp", "tp"]), unique=True, max_size=2))
        split = tuple((axis, draw(st.integers(0, len(shape) - 1))) for axis in axes) if shape else ()
        layers = tuple(sorted(draw(st.sets(st.integers(0, LAYERS - 1), min_size=1, max_size=2))))
        experts = draw(st.integers(1, 4))
        tensors.append(
            StateTensor(
                f"tensor{number}",
                shape,
                draw(st.sampled_from([1, 2, 4])),
                layers,
                split,
                None if "ep" in axes else draw(st.sampled_from([None, (experts - 1, experts), (0, experts)])),
                draw(st.sampled_from([0, 0, 1, 2])),
            )
        )
    return tensors


def values_of(tensors: list[StateTensor]) -> dict[str, Array]:
    """Different numbers for all elements, none of them zero."""
    kinds = {1: np.uint8, 2: np.uint16, 4: np.uint32}
    return {
        tensor.name: np.arange(1, math.prod(tensor.shape) + 1, dtype=kinds[tensor.itemsize]).reshape(
            tensor.shape
        )
        for tensor in tensors
    }


@given(states(), layouts(), layouts(), st.randoms(use_true_random=False))
@settings(max_examples=80, deadline=None)
def test_a_plan_gives_each_device_exactly_its_slices(
    tensors: list[StateTensor], old: Layout, new: Layout, random: object
) -> None:
    devices = list(range(16))
    random.shuffle(devices)  # type: ignore[attr-defined]
    before, after = devices[: old.size], sorted(devices[3:])
    plan = plan_moves(tensors, (old, before), (new, after))
    values = values_of(tensors)
    found = carried_out(tensors, plan, sliced(tensors, values, old, before), new)
    for device, slices in sliced(tensors, values, new, plan.placement).items():
        assert found[device].keys() == slices.keys()
        for name, (ranges, array) in slices.items():
            assert found[device][name][0] == ranges
            np.testing.assert_array_equal(found[device][name][1], array)


def copies(tensors: list[StateTensor], layout: Layout) -> Counter[tuple[str, tuple[int, ...]]]:
    """How many slots hold each element."""
    held: Counter[tuple[str, tuple[int, ...]]] = Counter()
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    for slices in held_by(tensors, tiles_of(tensors, layout)).values():
        for name, ranges in slices.items():
            for index in np.ndindex(*[max(0, b - a) for a, b in clipped(ranges, shapes[name])]):
                at = tuple(i + a for i, (a, _) in zip(index, ranges, strict=True))
                held[name, at] += 1
    return held


@given(states(), layouts(), layouts())
@settings(max_examples=40, deadline=None)
def test_bytes_are_between_the_bounds_and_come_once(
    tensors: list[StateTensor], old: Layout, new: Layout
) -> None:
    """No plan moves less than the copies that are missing; rank order moves no less than the placement."""
    plan, itemsize = moves(old, new, tensors), {tensor.name: tensor.itemsize for tensor in tensors}
    before, after = copies(tensors, old), copies(tensors, new)
    missing = sum(itemsize[at[0]] * max(0, number - before[at]) for at, number in after.items())
    assert missing <= plan.moved_bytes <= moves(old, new, tensors, in_order=True).moved_bytes
    assert plan.moved_bytes + plan.kept_bytes == sum(itemsize[at[0]] * n for at, n in after.items())
    assert plan.moved_bytes == sum(plan.bytes_by_source().values())
    received = [(move.target, name, move.ranges) for move in plan.moves for name in move.tensors]
    for i, (target, name, ranges) in enumerate(received):
        for other_target, other_name, other in received[:i]:
            assert (target, name) != (other_target, other_name) or not count(overlap(ranges, other))


@given(states(), layouts(largest=4), layouts(largest=4))
@settings(max_examples=25, deadline=None)
def test_no_other_placement_moves_less(tensors: list[StateTensor], old: Layout, new: Layout) -> None:
    devices = range(max(old.size, new.size))
    best = min(
        plan_moves(tensors, (old, range(old.size)), (new, order), in_order=True).moved_bytes
        for order in permutations(devices, new.size)
    )
    assert moves(old, new, tensors).moved_bytes == best


# ------------------------------------------------------------------------------------------ sources


def test_the_nearest_holder_sends() -> None:
    old, new = Degrees(dp=2).layout(LAYERS), Degrees(dp=4).layout(LAYERS)
    machines = {0: (0, 0), 1: (1, 1), 2: (1, 2), 3: (0, 0)}  # rack, machine
    plan = plan_moves(model(), (old, [0, 1]), (new, range(4)), locations=machines)
    assert {(move.source, move.target) for move in plan.moves} == {(1, 2), (0, 3)}
    whole = sum(tensor.nbytes for tensor in model())
    assert plan.bytes_by_distance(machines) == {0: whole, 1: whole}


def test_new_devices_take_the_slots_that_their_machine_holds() -> None:
    """Machine 0 holds the first half of the layers and machine 1 the second; each gets a new device."""
    old, new = Degrees(pp=2).layout(LAYERS), Degrees(pp=4).layout(LAYERS)
    machines = {0: (0,), 1: (1,), 2: (1,), 3: (0,)}
    plan = plan_moves(model(), (old, [0, 1]), (new, range(4)), locations=machines)
    assert set(plan.bytes_by_distance(machines)) == {0}


def test_the_load_is_spread_over_all_holders() -> None:
    old, new = Degrees(dp=4).layout(LAYERS), Degrees(dp=5).layout(LAYERS)
    plan = moves(old, new, model())
    assert plan.bytes_by_source() == dict.fromkeys(range(4), 96)


def test_what_no_living_device_holds_comes_from_the_checkpoint() -> None:
    old, new = Degrees(pp=2).layout(LAYERS), Degrees(pp=1).layout(LAYERS)
    plan = plan_moves(model(), (old, [7, 8]), (new, [7]), lost=[8])
    assert plan.placement == (7,)
    assert plan.bytes_by_source() == {None: 2 * 96}


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [([0], [0, 1], "old layout has 2"), ([0, 1], [0], "new layout has 2"), ([0, 0], [0, 1], "different")],
)
def test_devices_that_do_not_fit(before: list[int], after: list[int], words: str) -> None:
    layout = Degrees(pp=2).layout(LAYERS)
    with pytest.raises(UsageError, match=words):
        plan_moves(model(), (layout, before), (layout, after))
