"""Iterators that a script takes its batches from are found by what holds them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from swift_ft.program.iterators import iterators_of_script
from swift_ft.session import Session


class NoLoop:
    """Stands for what a session has by its first step."""

    _in_epochs = True

    class _loop:
        @staticmethod
        def steps_of_epoch(count: int) -> Iterator[int]:
            yield from range(count)


def steps(count: int) -> Iterator[Any]:
    return Session.steps(cast(Session, NoLoop()), count)


def own() -> Iterator[int]:
    yield from range(3)


@pytest.mark.parametrize(
    ("made", "name"),
    [
        (lambda: iter([1, 2]), "batches"),
        (own, "batches"),
        (lambda: itertools.cycle([1]), "batches"),
        (lambda: zip([1], [2], strict=True), "batches"),
    ],
)
def test_a_variable_that_holds_one(made: Callable[[], Any], name: str) -> None:
    batches = made()
    assert name in iterators_of_script()
    del batches


def test_what_is_none() -> None:
    numbers, text, file, each = [1, 2], "abc", Path(__file__).open(), enumerate([1])  # noqa: SIM115
    with file:
        found = iterators_of_script()
    assert not {"numbers", "text", "file", "each"} & {*found}
    del numbers, text, each


@pytest.mark.parametrize("side_by_side", [True, False])
def test_steps_and_batches_side_by_side(side_by_side: bool) -> None:
    loop: Any = zip(steps(2), [7, 8], strict=False) if side_by_side else enumerate(steps(2))
    seen = [iterators_of_script() for _ in loop]
    assert [("zip" in names) for names in seen] == [side_by_side, side_by_side]
