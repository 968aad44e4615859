"""Functions that remember results: what an interrupted step has made them remember is forgotten."""

from __future__ import annotations

import functools
import logging
import random
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from swift_ft.checkpoint.step.rollback import Rollback
from swift_ft.checkpoint.training_state import TrainingState

CACHES: dict[str, Callable[[Any], Any]] = {
    "without an end": functools.cache,
    "with an end": functools.lru_cache(maxsize=4),
    "by type": functools.lru_cache(maxsize=None, typed=True),
}


@pytest.fixture
def rollback() -> Rollback:
    return Rollback(TrainingState({"model": nn.Linear(1, 1)}))


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("looked", [True, False])
def test_a_result_that_was_drawn_is_drawn_again(looked: bool, kind: str, rollback: Rollback) -> None:
    """The generator goes back: to remember the result would leave it there."""
    dice = random.Random(1)

    @CACHES[kind]
    def noise_of(level: int, *, scale: float = 1.0) -> float:
        return level * scale * dice.random()

    if looked:
        noise_of(1)
    rollback.begin(0)
    before = noise_of(1) if looked else 0.0
    drawn = [noise_of(2), noise_of(level=3, scale=2.0), dice.random()]
    rollback.back()
    assert [noise_of(2), noise_of(level=3, scale=2.0), dice.random()] == drawn
    if looked and kind != "with an end":
        assert noise_of(1) == before
    rollback.back()
    assert [noise_of(2), noise_of(level=3, scale=2.0), dice.random()] == drawn


@pytest.mark.parametrize("kind", CACHES)
def test_results_that_change_in_themselves_stay_the_same_objects(kind: str, rollback: Rollback) -> None:
    """Earlier steps have changed them."""

    @CACHES[kind]
    def counters_of(name: str) -> dict[str, int]:
        return {"count": 0}

    held = counters_of("a")
    held["count"] = 5
    rollback.begin(0)
    counters_of("a")["count"] += 1
    counters_of("b")["count"] += 1
    rollback.back()
    assert counters_of("a") is held
    assert held["count"] == 5


def test_a_replacement_that_has_none_says_so(rollback: Rollback, caplog: pytest.LogCaptureFixture) -> None:
    @functools.cache
    def counters_of(name: str) -> dict[str, int]:
        return {"count": 0}

    rollback.watch()
    counters_of("a")["count"] = 5
    saved = rollback.carried.to_save()
    counters_of.cache_clear()
    with caplog.at_level(logging.WARNING):
        rollback.carried.to_save()  # it looks
        rollback.carried.take_over(saved)
    rollback.close()
    said = [one.getMessage() for one in caplog.records if getattr(one, "event", "") == "variable_missing"]
    assert len(said) == 1
    assert "counters_of().0 has changed" in said[0]


OF_THEIR_OWN: dict[str, Callable[[], Any]] = {
    "an iterator": lambda: iter(range(9)),
    "a generator": lambda: (number for number in range(9)),
    "an object of a library": object,
}


@pytest.mark.parametrize("kind", OF_THEIR_OWN)
def test_a_result_with_a_life_of_its_own_is_not_made_again(kind: str, rollback: Rollback) -> None:
    """An iterator would begin again, and a group of processes would be made by this worker alone."""

    @functools.lru_cache(maxsize=4)
    def stream_of(name: str) -> Any:
        return OF_THEIR_OWN[kind]()

    first = stream_of("a")
    rollback.begin(0)
    stream_of("b")
    rollback.back()
    assert stream_of("a") is first
