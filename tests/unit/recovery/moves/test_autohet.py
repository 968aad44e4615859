"""AutoHet's recoveries A, B and C: what stays, what comes from peers, and what only the cloud has."""

from __future__ import annotations

from fractions import Fraction

import pytest

from benchmarks.planning.autohet import (
    LAYERS,
    SCENARIOS,
    SLICES,
    Scenario,
    nodes,
    plan_scenario,
    recover,
    stages,
)

FIRST = Fraction(10, 32)
"""The share of the layers that the H20 have, as swift-plan cuts them."""

EXPECTED: dict[str, tuple[Fraction | int, ...]] = {
    "A": (2, 0, 0),
    "B": (2 * FIRST, 0, 2 * (1 - FIRST)),
    "C": (4, 1, 0),
}
"""By scenario: what stays, what comes from peers and from the cloud, in shares of one model's state."""


def test_the_weaker_devices_have_the_first_and_fewer_layers() -> None:
    assert stages() == ((0, 9), (10, 31))


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_what_moves(scenario: Scenario) -> None:
    plan = plan_scenario(scenario, stages())
    state = LAYERS * SLICES
    cloud = plan.bytes_by_source().get(None, 0)
    shares = (plan.kept_bytes, plan.moved_bytes - cloud, cloud)
    assert tuple(Fraction(nbytes, state) for nbytes in shares) == EXPECTED[scenario.name]


def test_both_pipelines_of_b_miss_the_layers_of_the_lost_node_and_no_others() -> None:
    moves = plan_scenario(SCENARIOS[1], stages()).moves
    assert {name for move in moves for name in move.tensors} == {f"layers.{i}" for i in range(10, 32)}
    assert recover(SCENARIOS[1]).missing == pytest.approx(float(1 - FIRST))


def test_the_new_devices_of_c_get_the_layers_of_their_kind_from_all_who_have_them() -> None:
    plan = plan_scenario(SCENARIOS[2], stages())
    where = nodes()
    pairs = {(where[move.source], where[move.target]) for move in plan.moves if move.source is not None}
    assert pairs == {((0,), (2,)), ((1,), (3,))} or pairs == {((0,), (3,)), ((1,), (2,))}
    assert len({move.source for move in plan.moves}) == 16


@pytest.mark.parametrize(("name", "within"), [("A", 0.04), ("B", 0.03)])
def test_published_rates_explain_the_published_speedups(name: str, within: float) -> None:
    scenario = next(one for one in SCENARIOS if one.name == name)
    assert recover(scenario).faster == pytest.approx(scenario.speedup, rel=within)
