"""What a script holds and is too large to travel is named where it has changed; what is not, travels."""

from __future__ import annotations

import copy
import logging
import random
import threading
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from swift_ft.checkpoint.step.rollback import Rollback
from swift_ft.checkpoint.step.traces import trace_of
from swift_ft.checkpoint.training_state import TrainingState

SMALL = 64
"""Bytes of a value that travels here."""


class Holder:
    """An object of the script's own."""

    def __init__(self, net: nn.Module) -> None:
        self.average = [copy.deepcopy(list(net.parameters()))]
        self.named: dict[str, Any] = {"weight": torch.zeros(SMALL), "count": 0}
        self.many = {str(number): torch.zeros(1) for number in range(1025)}
        self.table = np.zeros(SMALL)
        self.mixed: list[Any] = [torch.zeros(SMALL), {"at": (0, 1)}]
        self.params = list(net.parameters())
        self.last: Any = None
        self.context: dict[str, Any] = {"lock": threading.Lock(), "count": 0}  # each entry travels by itself
        self.hooks: list[Any] = [threading.Lock()]


class Process:
    """One of the script, with a session that has started."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = nn.Linear(2, 2)
        vars(self.net)["queue"] = torch.zeros(SMALL)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        self.held = Holder(self.net)
        vars(self.net)["holder"] = self.held
        self.state = TrainingState({"model": self.net, "optimizer": self.optimizer})
        self.rollback = Rollback(self.state)
        self.rollback.watch()
        self.rollback.begin(0)

    def step(self) -> None:
        loss = self.net(torch.ones(1, 2)).sum()
        loss.backward()
        self.held.last = {"loss": loss, "gradients": [p.grad for p in self.net.parameters()]}
        self.optimizer.step()
        self.optimizer.zero_grad()


Pair = Mapping[str, Process]
"""Two processes, where neither finds the other one among the variables of a test."""


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Pair:
    monkeypatch.setattr("swift_ft.checkpoint.step.frozen._MOST_BYTES", SMALL)
    return MappingProxyType({"one": Process(), "other": Process()})


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], set[str]]:
    """The variables that lines name."""
    caplog.set_level(logging.WARNING)
    return lambda: {r.variable for r in caplog.records if getattr(r, "event", "") == "variable_not_taken"}  # type: ignore[attr-defined]


def average_of(process: Process) -> Any:
    return [one.tolist() for one in process.held.average[0]]


def follow(process: Process) -> None:
    for ours, theirs in zip(process.held.average[0], process.net.parameters(), strict=True):
        ours.detach().mul_(0.5).add_(theirs, alpha=0.5)


def test_an_average_of_parameters(pair: Pair) -> None:
    """As guided-diffusion has it: parameters that are in no module. They travel, and are put back."""
    pair["one"].step()
    follow(pair["one"])
    after, first = average_of(pair["one"]), MappingProxyType({0: pair["other"].held.average[0][0]})
    assert after != average_of(pair["other"])
    pair["other"].state.take_over(pair["one"].state.to_save())
    assert average_of(pair["other"]) == after
    assert pair["other"].held.average[0][0] is first[0]
    assert first[0].requires_grad
    assert pair["other"].held.params[0] is pair["other"].net.weight
    pair["one"].rollback.begin(1)
    follow(pair["one"])
    pair["one"].rollback.back()
    assert average_of(pair["one"]) == after


def in_place(holder: Holder) -> None:
    holder.named["weight"].add_(1)


def through_data(holder: Holder) -> None:
    holder.named["weight"].data += 1


def another(holder: Holder) -> None:
    holder.named["weight"] = holder.named["weight"] * 0.9 + 0.1


def counted(holder: Holder) -> None:
    holder.named["count"] += 1


CHANGES: dict[str, Callable[[Process], Any]] = {
    "named": lambda p: in_place(p.held),
    "named by .data": lambda p: through_data(p.held),
    "named, another one": lambda p: another(p.held),
    "named, its count": lambda p: counted(p.held),
    "many": lambda p: p.held.many["1024"].add_(1),
    "table": lambda p: p.held.table.__setitem__(3, 1.0),
    "mixed": lambda p: p.held.mixed[1].update(at=(1, 1)),
    "queue": lambda p: vars(p.net)["queue"].add_(1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_named(change: str, pair: Pair, said: Callable[[], set[str]]) -> None:
    CHANGES[change](pair["one"])
    after = MappingProxyType(pair["one"].state.to_save())
    assert not said()
    name = "model.queue" if change == "queue" else f"model.holder.{change.split(',')[0].split()[0]}"
    pair["other"].state.take_over(dict(after))
    assert said() == {name}


@pytest.mark.parametrize("change", CHANGES)
def test_back_to_before_is_named(change: str, pair: Pair, said: Callable[[], set[str]]) -> None:
    before = MappingProxyType(pair["one"].state.to_save())
    CHANGES[change](pair["one"])
    pair["one"].state.take_over(dict(before))
    assert len(said()) == 1


def test_what_has_not_changed_is_not_named(pair: Pair, said: Callable[[], set[str]]) -> None:
    """Neither are the state's own tensors in a list, nor results and gradients of a step."""
    for _ in range(2):
        pair["one"].step()
        pair["one"].held.context["count"] += 1
    pair["other"].state.take_over(pair["one"].state.to_save())
    pair["one"].state.take_over(pair["other"].state.to_save())
    assert pair["other"].held.context["count"] == 2
    assert not said()


def test_what_the_script_made_before_its_first_step(pair: Pair, said: Callable[[], set[str]]) -> None:
    for name in pair:
        pair[name].held.named = {"weight": torch.ones(SMALL)}
        pair[name].rollback.carried.steps_begin()
    pair["other"].state.take_over(pair["one"].state.to_save())
    assert not said()


@pytest.mark.parametrize(
    ("value", "changed"),
    [
        ([0.0] * 100_000, [0.0] * 99_999 + [1.0]),
        ([0.0] * 5000, [0.0] * 4999 + [-0.0]),
        ([-1] * 5000, [-1] * 2500 + [-2] + [-1] * 2499),
        ({*range(2000)}, {*range(1, 2001)}),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (bytearray(5000), bytearray(4999) + b"a"),
        ([["a"] * 2000, np.zeros(1)], [["a"] * 1999 + ["b"], np.zeros(1)]),
        ((np.zeros(2), None), (np.ones(2), None)),
        (torch.eye(2).to_sparse(), None),
        ([torch.zeros(100), object], [torch.cat([torch.zeros(98), torch.ones(1), torch.zeros(1)]), object]),
        ([random.Random(1), object], [random.Random(2), object]),
        ([torch.Generator().manual_seed(1), 1], [torch.Generator().manual_seed(2), 1]),
        ([torch.zeros(2, device="meta"), 1], [torch.zeros(2, device="meta"), 2]),
    ],
)
def test_traces(value: Any, changed: Any) -> None:
    first = trace_of(value, lambda _: False)
    assert first == trace_of(copy.deepcopy(value), lambda _: False)
    assert first != trace_of(changed, lambda _: False)
    assert first.words
