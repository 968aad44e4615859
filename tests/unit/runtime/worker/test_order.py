"""Parts are called in the declared order, and that order is one in which nothing goes wrong."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from swift_ft.runtime import assembly
from swift_ft.runtime.worker.order import BACKWARDS, BEFORE, ORDER, Pair, place_of
from swift_ft.runtime.worker.part import Part
from swift_ft.runtime.worker.parts import Parts

MOMENTS = [name for name, _ in inspect.getmembers(Part, inspect.isfunction) if not name.startswith("_")]
ADDS = {"report", "ready"}
"""Moments at which each part adds to what it is given."""


def wrong(order: tuple[str, ...]) -> list[Pair]:
    """Pairs that are called in the wrong order."""
    at = {name: place for place, name in enumerate(order)}
    return [pair for pair in BEFORE if (at[pair.first] < at[pair.then]) == (pair.moment in BACKWARDS)]


def test_nothing_that_matters_is_the_other_way_round() -> None:
    assert not wrong(ORDER)


@pytest.mark.parametrize("pair", BEFORE, ids=lambda pair: f"{pair.moment}-{pair.first}-{pair.then}")
def test_another_order_would_be_wrong(pair: Pair) -> None:
    """So each of the pairs says something."""
    places = {name: place for place, name in enumerate(ORDER)}
    order = [*ORDER]
    order[places[pair.first]], order[places[pair.then]] = pair.then, pair.first
    assert pair in wrong(tuple(order))


def test_the_decision_shows_all_pairs() -> None:
    text = (Path(__file__).parents[4] / "docs/decisions/0094-parts-of-a-worker.md").read_text()
    rows = [f"| `{pair.moment}` | {pair.first} | {pair.then} | {pair.why} |" for pair in BEFORE]
    assert [row for row in text.splitlines() if row.startswith("| `")] == rows


def test_pairs_name_moments_and_parts() -> None:
    assert {pair.moment for pair in BEFORE} <= {*MOMENTS}
    assert {name for pair in BEFORE for name in pair[1:3]} <= {*ORDER}
    assert {*MOMENTS} > BACKWARDS


class Named(Part):
    """Writes down what is called."""

    def __init__(self, name: str, called: list[str]) -> None:
        self.name = name
        for moment in MOMENTS:
            setattr(self, moment, self._noting(called, adds=moment in ADDS))

    def _noting(self, called: list[str], *, adds: bool) -> Any:
        def call(*given: Any) -> Any:
            called.append(self.name)
            return given[0] if adds else None

        return call


@pytest.mark.parametrize("moment", MOMENTS)
def test_all_parts_are_called_in_this_order(moment: str) -> None:
    called: list[str] = []
    parts = Parts([Named(name, called) for name in ("another one", *sorted(ORDER))])
    arguments = inspect.signature(getattr(Part, moment)).parameters
    method = getattr(parts, moment)
    given = ["what was there"] if len(arguments) > 1 else []
    result = method(*given, *[0] * (len(arguments) - 2))
    expected = [*ORDER, "another one"]
    assert called == (expected[::-1] if moment in BACKWARDS else expected)
    assert result == {"report": "what was there", "ready": "what was there", "why_checkpoint": ""}.get(moment)


def test_the_first_that_breaks_off_an_exchange_ends_it() -> None:
    called: list[str] = []

    class Breaks(Part):
        name = ORDER[1]

        def join(self, round: Any) -> str:
            called.append(self.name)
            return "peer gone"

    parts = Parts([Named(ORDER[2], called), Breaks(), Named(ORDER[0], called)])
    assert parts.join(None) == "peer gone"  # type: ignore[arg-type]
    assert called == [*ORDER[:2]]


def test_the_parts_of_a_worker_have_the_names_of_the_order() -> None:
    used = {
        found.name
        for _, found in inspect.getmembers(assembly, inspect.isclass)
        if issubclass(found, Part) and found is not Part and found is not Parts
    }
    assert used == {*ORDER, "requests"}
    assert place_of("requests") == len(ORDER)
