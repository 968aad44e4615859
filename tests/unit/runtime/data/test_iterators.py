"""Iterators that a script takes its batches from are found by what holds them."""

from __future__ import annotations

import functools
import gc
import itertools
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import LinearLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

from swift_ft.data import LoaderBatches
from swift_ft.errors import UsageError
from swift_ft.runtime.data.iterators import (
    further_iterators,
    iterators_of_script,
    kept_ahead,
    loader_goes_on,
    may_keep_position,
    refuse_counted_steps,
)
from swift_ft.session import Session
from tests.unit.runtime.data import feeder


class NoLoop:
    """Stands for what a session has by its first step."""

    _in_epochs = _steps_asked_for = True

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
    next(batches)
    assert name in iterators_of_script()
    del batches


def test_what_is_none() -> None:
    numbers, text, file, each = [1, 2], "abc", Path(__file__).open(), enumerate([1])  # noqa: SIM115
    counter, never_used = itertools.count(), own()
    with file:
        found = iterators_of_script()
    assert not {"numbers", "text", "file", "each", "counter", "never_used"} & {*found}
    del numbers, text, each, counter, never_used


class Shared:
    current: Iterator[int] = itertools.cycle([1])


class Feeder:
    def next_batch(self) -> int:
        return next(iterators_of_feeders["batches"])


def of_closure() -> Callable[[], int]:
    batches = iter([1, 2])
    return lambda: next(batches)


GIVEN = of_closure()
iterators_of_feeders = {"batches": itertools.cycle([1]), "numbers": itertools.count()}


@pytest.mark.parametrize(
    ("get", "name"),
    [
        (of_closure(), "get.batches"),
        (lambda: next(Shared.current), f"{__name__}.Shared.current"),
        (itertools.cycle([1]).__next__, "get"),
        (functools.partial(next, itertools.cycle([1])), "get"),
        (Feeder().next_batch, f"{__name__}.iterators_of_feeders['batches']"),
        (lambda: feeder.batch(), f"{feeder.__name__}.held"),
        (lambda first=GIVEN: first(), "get.batches"),
    ],
)
def test_one_that_a_function_uses(get: Callable[[], Any], name: str) -> None:
    """And nothing else: a counter goes back."""
    assert get() == 1
    assert further_iterators() == [name]


class Key:
    def __repr__(self) -> str:
        raise AttributeError("made without its name")


def test_things_that_do_not_say_what_they_are() -> None:
    """A method of a function without a name, and a key that cannot be shown."""
    method = types.MethodType(functools.partial(print), Feeder())
    table = {Key(): itertools.cycle([1])}

    def get() -> int:
        return len(table) if callable(method) else 0

    assert get() == 1
    assert "table[...]" in further_iterators()


def test_one_that_is_found_near_is_named_once() -> None:
    batches = iter([1])
    assert "batches" in iterators_of_script()
    assert further_iterators() == []
    del batches


def bar(iterable: Any) -> Iterator[Any]:
    """As a progress bar passes on what it shows."""
    yield from iterable


@pytest.mark.parametrize(
    ("loop", "counted"),
    [
        (lambda: enumerate(steps(2)), True),
        (lambda: enumerate(steps(2), start=1), True),
        (lambda: enumerate(bar(steps(2))), True),
        (lambda: bar(enumerate(steps(2))), True),
        (lambda: steps(2), False),
        (lambda: bar(steps(2)), False),
    ],
)
def test_steps_that_python_counts(loop: Callable[[], Any], counted: bool) -> None:
    others, refused = enumerate([7, 8]), 0
    for _ in loop():
        try:
            refuse_counted_steps()
        except UsageError:
            refused += 1
    assert refused == (2 if counted else 0)
    del others


@pytest.mark.parametrize("side_by_side", [True, False])
def test_steps_and_batches_side_by_side(side_by_side: bool) -> None:
    loop: Any = zip(steps(2), [7, 8], strict=False) if side_by_side else enumerate(steps(2))
    seen = [iterators_of_script() for _ in loop]
    assert [("zip" in names) for names in seen] == [side_by_side, side_by_side]


class Prefetcher:
    """In the manner of apex."""

    def __init__(self, batches: list[torch.Tensor]) -> None:
        self.loader, self.next_input = iter(batches), batches[0]


class Trainer:
    def __init__(self, batches: list[torch.Tensor]) -> None:
        self.prefetcher = Prefetcher(batches)


def test_an_object_that_holds_one() -> None:
    first, second = torch.ones(2), torch.zeros(2)
    prefetcher, trainer = Prefetcher([first]), Trainer([second])
    assert {"prefetcher.loader", "trainer.prefetcher.loader"} <= {*iterators_of_script()}
    names = {id(tensor): name for name, tensor in kept_ahead().values()}
    assert names[id(first)] == "prefetcher.next_input"
    assert names[id(second)] == "trainer.prefetcher.next_input"
    del prefetcher, trainer


class Position:
    def state_dict(self) -> dict[str, int]:
        return {"next": 3}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


@pytest.mark.parametrize(
    ("name", "part", "may"),
    [
        ("position", Position(), True),
        ("swift_ft.stop", Position(), False),
        ("scheduler", LinearLR(SGD([torch.zeros(1, requires_grad=True)], lr=1.0)), False),
        ("scaler", torch.amp.GradScaler("cpu", enabled=False), False),
        ("average", AveragedModel(torch.nn.Linear(1, 1)), False),
    ],
)
def test_which_parts_of_the_state_may_keep_a_position(name: str, part: Any, may: bool) -> None:
    assert may_keep_position(name, part) == may


def test_a_loader_that_goes_on() -> None:
    data = TensorDataset(torch.arange(4))
    batches = LoaderBatches(DataLoader(data))
    assert batches[0][0].item() == 0
    before = loader_goes_on()  # of an earlier test, until it is collected
    iterator = iter(DataLoader(data))
    assert loader_goes_on()
    del iterator
    gc.collect()
    assert loader_goes_on() == before
