"""What is in a function's defaults and in the arguments of a ``functools.partial`` goes back and travels."""

from __future__ import annotations

import functools
import random
from array import array
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from swift_ft.checkpoint.step.frozen import frozen
from swift_ft.checkpoint.step.rollback import Rollback
from swift_ft.checkpoint.training_state import TrainingState

Changes = Callable[[Any], Any]

KINDS: dict[str, tuple[Callable[[], Any], Changes]] = {
    "a list": (lambda: [1.0], lambda value: value.append(2.0)),
    "a dictionary": (lambda: {"sum": 0.0}, lambda value: value.update(sum=3.0, count=1)),
    "a deque": (lambda: deque([1.0], maxlen=2), lambda value: value.extend([2.0, 3.0])),
    "a tensor": (lambda: torch.zeros(2), lambda value: value.add_(1)),
    "an array": (lambda: np.zeros(2), lambda value: value.__iadd__(1)),
    "an array of Python's": (lambda: array("d", [1.0]), lambda value: value.append(2.0)),
    "a generator": (lambda: random.Random(1), lambda value: value.random()),
    "one in a pair": (lambda: ([1.0], 2), lambda value: value[0].append(2.0)),
}


def by_default(value: Any) -> Any:
    def smooth(by: int, history: Any = value) -> Any:
        return history

    return smooth


def by_name_only(value: Any) -> Any:
    def smooth(by: int, *, history: Any = value) -> Any:
        return history

    return smooth


def of_a_method(value: Any) -> Any:
    class Smooth:
        def of(self, by: int, history: Any = value) -> Any:
            return history

        def __call__(self, by: int) -> Any:
            return self.of(by)

    return Smooth()


def second(history: Any, by: int) -> Any:
    return history


def counting(calls: list[int] = []) -> None:  # noqa: B006
    calls.append(1)


HELD: dict[str, Callable[[Any], Any]] = {
    "a default": by_default,
    "a default that is given by name only": by_name_only,
    "a method's default": of_a_method,
    "an argument": lambda value: functools.partial(second, value),
    "an argument by name": lambda value: functools.partial(by_default(None), history=value),
    "an argument of a method": lambda value: functools.partial(of_a_method(None).of, history=value),
}


class Process:
    """A process of the script, whose model holds functions."""

    def __init__(self, *functions: Any) -> None:
        model: Any = nn.Linear(1, 1)
        model.functions = [*functions]
        self.net = model
        del functions  # this frame counts as the one that runs the loop
        self.rollback = Rollback(TrainingState({"model": self.net}))
        self.rollback.watch()
        self.carried = self.rollback.carried

    def saved(self) -> str:
        return self.carried.packed(self.carried.to_save(), 2**20)

    def take_over(self, saved: str) -> None:
        self.carried.take_over(self.carried.unpacked(saved))

    def content(self, number: int = 0) -> Any:
        return frozen(self.net.functions[number](1))

    def shown(self) -> str:
        return repr(self.content())


@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("kind", KINDS)
def test_it_goes_back_and_travels_in_place(kind: str, held: str) -> None:
    make, change = KINDS[kind]
    one, other = (Process(HELD[held](make())) for _ in range(2))
    before, first = one.saved(), one.shown()
    one.rollback.begin(0)
    change(one.net.functions[0](1))
    changed = one.shown()
    one.rollback.back()
    assert one.shown() == first
    change(one.net.functions[0](1))
    there = id(other.net.functions[0](1))
    other.take_over(one.saved())
    assert other.shown() == changed
    assert id(other.net.functions[0](1)) == there
    other.take_over(before)
    assert other.shown() == first


@pytest.mark.parametrize("held", HELD)
def test_functions_of_one_name(held: str) -> None:
    one, other = (Process(*(HELD[held]([number]) for number in range(3))) for _ in range(2))
    one.net.functions[1](1).append(7)
    other.take_over(one.saved())
    assert [other.content(number) for number in range(3)] == [[0], [1, 7], [2]]


@pytest.mark.parametrize("held", HELD)
def test_it_is_shared_with_a_variable_or_is_not_any_more(held: str) -> None:
    def make() -> Process:
        history = [1.0]
        process = Process(HELD[held](history))
        process.net.history = history
        process.rollback.watch()
        return process

    one, other = make(), make()
    one.net.history.append(2.0)
    other.take_over(one.saved())
    assert other.net.history == [1.0, 2.0]
    assert other.net.functions[0](1) is other.net.history
    one.net.history = [5.0]
    one.net.functions[0](1).append(3.0)
    other.take_over(one.saved())
    assert other.net.history == [5.0]
    assert other.content() == [1.0, 2.0, 3.0]


def test_a_part_that_two_paths_lead_to_is_noted_once() -> None:
    part = functools.partial(second, [1.0])
    process = Process(part, part)
    process.net.more = {"part": part}
    process.rollback.variables.look()
    assert len([path for path in process.rollback.variables.paths if "(arguments)" in path]) == 1
    part(1).append(2.0)
    saved = [values for values in process.carried.to_save().values() if [1.0, 2.0] in values.values()]
    assert len(saved) == 1


def test_a_keyword_that_is_given_another_value() -> None:
    one, other = (Process(functools.partial(dict[str, float], by=1, rate=0.5)) for _ in range(2))
    keywords = one.net.functions[0].keywords
    before = one.saved()
    one.rollback.begin(0)
    keywords.update(rate=0.25, more=1)
    one.rollback.back()
    assert keywords == {"by": 1, "rate": 0.5}
    keywords["rate"] = 0.25
    other.take_over(one.saved())
    assert other.net.functions[0].keywords == keywords
    other.take_over(before)
    assert other.net.functions[0].keywords == {"by": 1, "rate": 0.5}


def test_functions_without_such_arguments_have_no_place_for_them() -> None:
    def plain(value: int, rate: float = 0.1, *, name: str = "loss", pair: tuple[int, int] = (1, 2)) -> None:
        pass

    process = Process(plain, functools.partial(plain, 1))
    assert not [
        path for path in process.rollback.variables.paths if path.endswith(")") and "functions" in path
    ]


def test_what_a_step_makes_of_its_batch_does_not_travel() -> None:
    """A replacement has no such function yet, and needs none. One of a file it has."""
    process = Process()
    for index in range(2):
        process.rollback.begin(index)
        batch = torch.full((2,), float(index))

        def closure(x: torch.Tensor = batch) -> torch.Tensor:
            return x

        part = functools.partial(closure, x=batch)
        of_file = counting
        assert part() is closure()
        of_file()
    saved = process.carried.to_save()
    assert not [path for path in saved if "closure" in path or "part" in path]
    assert [values for path, values in saved.items() if "(defaults)" in path] == [{"calls": [1, 1]}]
    counting.__defaults__[0].clear()  # type: ignore[index]


@pytest.mark.parametrize("held", ["a default", "a default that is given by name only", "an argument"])
def test_functions_that_a_loop_goes_through(held: str) -> None:
    """The variable of such a loop is no place of its own: another process does not have it yet."""
    one, other = (Process(*(HELD[held]([number]) for number in range(2))) for _ in range(2))
    one.rollback.begin(0)
    for function in one.net.functions:
        function(1).append(7)
    one.rollback.completed()
    saved = one.saved()
    del function
    other.take_over(saved)
    assert [other.content(number) for number in range(2)] == [[0, 7], [1, 7]]
