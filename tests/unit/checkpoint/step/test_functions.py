"""Variables that hold functions, methods and classes are put back: these never change in themselves."""

from __future__ import annotations

import functools
import math
import re
import threading
from collections import deque
from collections.abc import Callable
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from swift_ft.checkpoint.step.rollback import Rollback
from swift_ft.checkpoint.training_state import TrainingState


class Phased:
    """Steps in another way once it is warm."""

    def __init__(self) -> None:
        self.items: list[int] = []

    def warmup(self) -> str:
        return "warmup"

    def main(self) -> str:
        return "main"


PHASED = Phased()
KINDS: dict[str, tuple[Any, Any]] = {
    "methods": (PHASED.warmup, PHASED.main),
    "methods of lists": (PHASED.items.append, PHASED.items.remove),
    "methods of numbers": ((1).__add__, (1).__sub__),
    "functions of libraries": (functional.relu, functional.gelu),
    "functions of Python": (math.sin, math.cos),
    "functions of torch": (torch.relu, torch.sin),
    "functions of NumPy": (np.add, np.subtract),
    "remembering functions": (functools.cache(math.sin), functools.cache(math.cos)),
    "descriptors": (str.upper, str.lower),
    "classes of libraries": (nn.MSELoss, nn.L1Loss),
    "modules": (math, functional),
    "parts": (functools.partial(pow, 2), functools.partial(PHASED.main)),
    "pairs": ((PHASED.warmup, 1), (PHASED.main, 2)),
    "decimals": (Decimal(1), Decimal(2)),
    "patterns": (re.compile("a"), re.compile("b")),
}


@pytest.fixture
def rollback() -> Rollback:
    return Rollback(TrainingState({"model": nn.Linear(1, 1)}))


@pytest.mark.parametrize("kind", KINDS)
def test_variables_and_elements(kind: str, rollback: Rollback) -> None:
    before, after = KINDS[kind]
    holder, phase = SimpleNamespace(step=before), before
    todo, ring = [before, after], deque([before, after])
    beside = {"lock": threading.Lock(), "step": before}
    rollback.begin(0)
    holder.step = phase = after
    holder.more = after
    assert todo.pop(0) is before
    ring.append(before)
    beside["step"] = after
    rollback.back()
    assert holder.step is phase is before
    assert not hasattr(holder, "more")
    assert (todo, [*ring]) == ([before, after], [before, after])
    assert beside["step"] is before


@pytest.mark.parametrize("how", ["a method", "a part"])
def test_what_is_of_an_iterator_stays_where_that_is(how: str, rollback: Rollback) -> None:
    def of(numbers: list[int]) -> Any:
        take = iter(numbers).__next__
        return take if how == "a method" else functools.partial(take)

    holder = SimpleNamespace(take=of([1, 2]))
    rollback.begin(0)
    holder.take = of([3, 4])
    rollback.back()
    assert holder.take() == 3


def counts() -> int:
    """Gives itself a variable as it is first called."""
    vars(counts)["calls"] = vars(counts).get("calls", 0) + 1
    return int(vars(counts)["calls"])


class Counts:
    """So does its class."""


def count_in_class() -> int:
    vars_of: Any = Counts
    vars_of.calls = getattr(Counts, "calls", 0) + 1
    return int(vars_of.calls)


@pytest.mark.parametrize("count", [counts, count_in_class])
def test_what_is_there_for_the_first_time(count: Callable[[], int], rollback: Rollback) -> None:
    """A replacement has nothing in that place, and is given it all the same."""
    rollback.watch()
    rollback.begin(0)
    assert count() == 1
    rollback.back()
    assert count() == 1
    saved = rollback.carried.to_save()
    for owner in (counts, Counts):
        if "calls" in vars(owner):
            delattr(owner, "calls")
    rollback.carried.take_over(saved)
    assert count() == 2
    rollback.close()
    for owner in (counts, Counts):
        if "calls" in vars(owner):
            delattr(owner, "calls")


def counter() -> Callable[[], int]:
    calls = 0

    def count() -> int:
        nonlocal calls
        calls += 1
        return calls

    return count


class Tally:
    def __init__(self) -> None:
        self.count = counter()

    def add(self, by: int = 1) -> int:
        return self.count() * by


MADE: dict[str, Callable[[], Callable[[], int]]] = {
    "a function": counter,
    "a method": lambda: Tally().add,
    "a part": lambda: functools.partial(Tally().add, by=1),
    "a part of a function": lambda: functools.partial(counter()),
}


@pytest.mark.parametrize("kind", MADE)
def test_what_was_made_since_the_last_look(kind: str, rollback: Rollback) -> None:
    """The looks for all that there is come in the first steps, and in the 16th."""
    holder = SimpleNamespace(count=None)
    for iteration in range(5):
        rollback.begin(iteration)
    holder.count = MADE[kind]()
    rollback.begin(5)
    assert holder.count() == 1
    rollback.back()
    assert holder.count() == 1


def test_a_counter_beside_a_method_travels() -> None:
    """Each entry of such a dictionary is a variable, since a method has no copy."""
    net: Any = nn.Linear(1, 1)
    net.context = {"count": 0, "at_end": PHASED.main}
    state = TrainingState({"model": net})
    rollback = Rollback(state)
    rollback.watch()
    net.context["count"] = 7
    saved = rollback.carried.to_save()
    rollback.close()
    assert saved["model.context"] == {"count": 7}
