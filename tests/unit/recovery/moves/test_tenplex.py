"""The changes that Tenplex measures: no plan moves less, and no holder is nearer than the one that sends.

Shares are of one model's state. Tenplex publishes seconds; the shares follow from its degrees.
"""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest

from benchmarks.planning.tenplex import CHANGES, Change, machines
from swift_ft.recovery.layout.mesh import held_by, tiles_of
from swift_ft.recovery.layout.tensors import Ranges, StateTensor, count, overlap
from swift_ft.recovery.moves.sources import distance

LAYERS, WIDTH = 16, 96
HALF = Fraction(1, 2)
MOVED = {
    "figure 7: two slices on one stage, three on two": Fraction(2, 3),
    "figure 10: the same on other devices": 2,
    "figure 11: 4 of 16 devices lost": 0,
    "figure 11: 8 of 16 devices lost": 0,
    "figure 11: 12 of 16 devices lost": HALF,
    "figure 14: twice the replicas": 1,
    "figure 14: twice the stages": HALF,
    "figure 14: twice the slices": HALF,
    **{f"figures 15 and 16: D from {n} to {2 * n}": n for n in (4, 8, 16)},
    **{f"figures 15 and 16: T from {n} to {2 * n}": HALF for n in (4, 8, 16)},
    **{f"figures 15 and 16: P from {n} to {2 * n}": HALF for n in (4, 8)},
    "figure 16: T from 8 to 4": HALF,
    "figure 16: P from 8 to 4": HALF,
    "figure 16: D from 8 to 4": 0,
}

each_change = pytest.mark.parametrize("name", CHANGES)


def model() -> list[StateTensor]:
    """One tensor per layer, cut by tensor parallelism."""
    return [StateTensor(f"layers.{i}", (WIDTH,), 1, (i,), (("tp", 0),)) for i in range(LAYERS)]


def share(nbytes: int) -> Fraction:
    """Of the model's state."""
    return Fraction(nbytes, LAYERS * WIDTH)


def held_and_wanted(
    change: Change, tensors: list[StateTensor]
) -> tuple[dict[int, dict[str, Ranges]], list[dict[str, Ranges]]]:
    """The slices that each living device holds, and those that each slot of the new layout needs."""
    old, new = (tiles_of(tensors, layout) for layout in change.layouts(LAYERS))
    held, wanted = held_by(tensors, old), held_by(tensors, new)
    return {device: held[device] for device in held if device not in change.lost}, list(wanted.values())


@each_change
def test_no_placement_keeps_more(name: str) -> None:
    """No device can keep more than its best slot needs, and no slot more than its best device holds."""
    tensors, change = model(), CHANGES[name]
    plan = change.plan(tensors, LAYERS)
    assert share(plan.moved_bytes) == MOVED[name]
    held, wanted = held_and_wanted(change, tensors)
    by_device, by_slot = Counter[int](), Counter[int]()
    for device in held.keys() & set(change.devices(LAYERS)):
        for slot, need in enumerate(wanted):
            own = held[device]
            kept = sum(count(overlap(own[tensor], need[tensor])) for tensor in own.keys() & need.keys())
            by_device[device] = max(by_device[device], kept)
            by_slot[slot] = max(by_slot[slot], kept)
    assert plan.kept_bytes == min(by_device.total(), by_slot.total())
    assert plan.moved_bytes <= change.plan(tensors, LAYERS, in_order=True).moved_bytes


@each_change
def test_no_living_holder_is_nearer_than_the_one_that_sends(name: str) -> None:
    tensors, change, places = model(), CHANGES[name], machines()
    held, _ = held_and_wanted(change, tensors)
    from_checkpoint = 0
    for move in change.plan(tensors, LAYERS).moves:
        for tensor in move.tensors:
            holders = [
                device
                for device, own in held.items()
                if tensor in own and count(overlap(own[tensor], move.ranges)) == count(move.ranges)
            ]
            if move.source is None:
                assert not holders
                from_checkpoint += count(move.ranges)
                continue
            assert move.source in holders
            nearest = min(distance(places[holder], places[move.target]) for holder in holders)
            assert distance(places[move.source], places[move.target]) == nearest
    assert share(from_checkpoint) == (HALF if "12 of 16" in name else 0)


def test_ranks_in_order_move_three_quarters_where_half_would_do() -> None:
    ranked = CHANGES["figure 14: twice the stages"].plan(model(), LAYERS, in_order=True)
    assert share(ranked.moved_bytes) == Fraction(3, 4)
