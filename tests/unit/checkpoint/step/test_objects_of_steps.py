"""Other objects in each step are named, of libraries and of the script; which ones a list has is put back."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributions import Normal

from swift_ft.checkpoint.step.rollback import Rollback
from swift_ft.checkpoint.training_state import TrainingState


@pytest.fixture
def rollback() -> Rollback:
    return Rollback(TrainingState({"model": nn.Linear(1, 1)}))


def normal() -> Normal:
    return Normal(torch.zeros(1), torch.ones(1))


def named(
    rollback: Rollback,
    holder: Any,
    change: Callable[[Any, int], object],
    caplog: Any,
    event: str = "library_objects_change",
) -> list[str]:
    with caplog.at_level(logging.WARNING):
        for iteration in range(4):
            rollback.begin(iteration)
            change(holder, iteration)
    found = [one for one in caplog.records if getattr(one, "event", "") == event]
    assert len(found) <= 1, "each once"
    return [name for one in found for name in one.variables]


HOLDERS: dict[str, tuple[Callable[[], Any], Callable[[Any, int], object], str]] = {
    "an attribute": (
        lambda: SimpleNamespace(policy=normal()),
        lambda holder, _: setattr(holder, "policy", normal()),
        "holder.policy",
    ),
    "a list": (list, lambda holder, _: holder.append(normal()), "holder"),
    "a dictionary": (dict, lambda holder, step: holder.update({step: normal()}), "holder"),
    "what stays": (lambda: SimpleNamespace(policy=normal(), seen=[normal()]), lambda _, __: None, ""),
    "threads": (list, lambda holder, _: holder.append(threading.Lock()), ""),
    "handles": (
        list,
        lambda holder, _: holder.append(torch.autograd.profiler.record_function("x")),
        "",
    ),
}


class Record:
    """An object of the script's own."""

    def __init__(self, loss: float) -> None:
        self.loss = loss


@pytest.mark.parametrize(
    ("make", "change", "name"),
    [
        (list, lambda holder, step: holder.append(Record(step)), "holder"),
        (lambda: deque(maxlen=2), lambda holder, step: holder.append(Record(step)), "holder"),
        (dict, lambda holder, step: holder.update({step: Record(step)}), "holder"),
        (lambda: [Record(0.0)], lambda holder, step: setattr(holder[0], "loss", step), ""),
        (list, lambda holder, step: holder.append((step, 0.5)), ""),
        (list, lambda holder, _: holder.append(nn.Linear(1, 1)), ""),
        (
            lambda: SimpleNamespace(last=Record(0.0)),
            lambda holder, step: setattr(holder, "last", Record(step)),
            "",
        ),
    ],
    ids=["a list", "a deque", "a dictionary", "one that stays", "tuples", "modules", "a variable"],
)
def test_objects_of_the_scripts_own_are_named(
    make: Callable[[], Any],
    change: Callable[[Any, int], object],
    name: str,
    rollback: Rollback,
    caplog: pytest.LogCaptureFixture,
) -> None:
    holder = make()
    assert named(rollback, holder, change, caplog, "own_objects_change") == ([name] if name else [])


@pytest.mark.parametrize("kind", HOLDERS)
def test_what_is_named(kind: str, rollback: Rollback, caplog: pytest.LogCaptureFixture) -> None:
    make, change, name = HOLDERS[kind]
    assert named(rollback, make(), change, caplog) == [name] * bool(name)


def test_a_variable_of_the_loop(rollback: Rollback, caplog: pytest.LogCaptureFixture) -> None:
    """One that each step sets before it reads it is a result, and of no use later."""
    policy, seen = normal(), 0.0
    with caplog.at_level(logging.WARNING):
        for iteration in range(4):
            rollback.begin(iteration)
            seen += float(policy.mean)
            policy = normal()
            result = normal()
            seen += float(result.mean)
    (record,) = [one for one in caplog.records if getattr(one, "event", "") == "library_objects_change"]
    assert record.variables == ["policy"]  # type: ignore[attr-defined]
    assert seen == 0


@pytest.mark.parametrize("kind", [list, deque, dict])
def test_which_ones_a_container_has_is_put_back(kind: type, rollback: Rollback) -> None:
    first, second = normal(), normal()
    held: Any = {0: first} if kind is dict else kind([first])
    rollback.begin(0)
    if kind is dict:
        held[0], held[1] = second, second
    else:
        held[0] = second
        held.append(second)
    rollback.back()
    assert (list(held.values()) if kind is dict else list(held)) == [first]


def test_iterators_among_them_stay(rollback: Rollback) -> None:
    held: list[Any] = [normal()]
    rollback.begin(0)
    held += [iter([1]), normal()]
    rollback.back()
    assert len(held) == 3
