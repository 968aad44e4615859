"""The least time of moves: the busiest link decides, inside nodes and between them."""

from __future__ import annotations

import pytest

from benchmarks.planning.links import CHANGES, CLUSTERS, DEVICES, PER_NODE, REACHED, measure, nodes
from benchmarks.planning.models import LLAMA_70B
from swift_ft.errors import UsageError
from swift_ft.planning.layout.move_time import Links, MoveTime, move_time
from swift_ft.recovery.moves.plan import Move, MovePlan

NODES = {device: (device // 4,) for device in range(8)}


def plan(*moves: tuple[int | None, int, int]) -> MovePlan:
    """A plan of moves of so many bytes: source, target, bytes."""
    return MovePlan((), tuple(Move(("one",), ((0, n),), source, target, n) for source, target, n in moves), 0)


@pytest.mark.parametrize(
    ("moves", "adapters", "time"),
    [
        (((0, 1, 100), (0, 2, 100)), 1, MoveTime(20.0, 0.0)),  # one device sends all
        (((0, 1, 100), (1, 0, 100)), 1, MoveTime(10.0, 0.0)),  # both directions at once
        (((0, 4, 100), (1, 5, 100)), 1, MoveTime(0.0, 100.0)),  # one adapter for both
        (((0, 4, 100), (1, 5, 100)), 4, MoveTime(0.0, 50.0)),  # one for each
        (((0, 4, 100), (1, 5, 100)), 2, MoveTime(0.0, 100.0)),  # devices 0 and 1 have the first of two
        (((0, 4, 100), (2, 6, 100), (3, 1, 50)), 2, MoveTime(5.0, 50.0)),
        (((None, 0, 10**9),), 1, MoveTime(0.0, 0.0)),  # from a checkpoint
        ((), 1, MoveTime(0.0, 0.0)),
    ],
)
def test_the_busiest_link_decides(
    moves: tuple[tuple[int | None, int, int], ...], adapters: int, time: MoveTime
) -> None:
    assert move_time(plan(*moves), NODES, Links(10.0, 2.0, adapters)) == time
    assert time.seconds == max(time.inside_s, time.between_s)


def test_mistakes() -> None:
    with pytest.raises(UsageError, match="speeds above zero"):
        Links(0.0, 1.0)
    with pytest.raises(UsageError, match="device 9 has no location"):
        move_time(plan((0, 9, 1)), NODES, Links(1.0, 1.0))


def test_seventy_billion_parameters_on_64_devices() -> None:
    """Times of changes whose bytes follow from the degrees: each device gets an equal part of the state."""
    state = sum(tensor.nbytes for tensor in LLAMA_70B.tensors())
    assert state == pytest.approx(14 * 70.55e9, rel=1e-3)
    rows = {change.name: measure(change) for change in CHANGES[:4]}
    links = CLUSTERS["NVLink 4, 8 NDR"]
    slices, stages = rows["half the slices, twice the replicas"], rows["half the stages, twice the replicas"]
    seconds = {name: row.times["NVLink 4, 8 NDR"].seconds for name, row in rows.items()}
    # Embedding and head make the first and the last stage larger, by up to a tenth.
    one = state / DEVICES
    assert slices.moved == pytest.approx(state, rel=0.01)
    assert slices.across == 0
    assert 1 <= seconds[slices.change.name] / (one / (links.inside * REACHED)) < 1.1
    assert stages.moved == stages.across == pytest.approx(state, rel=0.01)
    assert 1 <= seconds[stages.change.name] / (one / (links.between * REACHED)) < 1.15
    assert rows["twice the stages, half the replicas"].moved == 0
    assert rows["half the slices, twice the stages"].across == 0
    one_adapter = stages.times["PCIe 4, 1 HDR"].seconds
    assert one_adapter == pytest.approx(PER_NODE * one / (25e9 * REACHED), rel=0.15)
    assert len(nodes()) == DEVICES
