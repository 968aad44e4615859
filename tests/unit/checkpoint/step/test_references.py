"""Dictionaries that are keyed by parameters or modules are found again in a process that has others."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn

from swift_ft.checkpoint.step.rollback import Rollback
from swift_ft.checkpoint.training_state import TrainingState


class Held:
    """What the script keeps for each parameter."""

    def __init__(self, net: nn.Sequential) -> None:
        self.velocity: dict[Any, Any] = {}
        self.by_id: dict[Any, Any] = {}
        self.by_pair: dict[Any, Any] = {}
        self.by_module: dict[Any, Any] = {}
        self.state: dict[Any, dict[str, Any]] = defaultdict(dict)
        self.groups: list[dict[str, Any]] = [{"params": list(net.parameters()), "rate": 0.1}]
        self.newest: Any = None
        self.by_object: dict[Any, Any] = {}


class Process:
    """One of the script, with a session that has started."""

    def __init__(self) -> None:
        self.net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        self.held = Held(self.net)
        vars(self.net)["held"] = self.held
        self.state = TrainingState({"model": self.net})
        self.rollback = Rollback(self.state)
        self.rollback.watch()
        self.rollback.begin(0)


@pytest.fixture
def pair() -> Mapping[str, Process]:
    """Two processes, where neither finds the other one among the variables of a test."""
    return MappingProxyType({"one": Process(), "other": Process()})


def change(held: Held, net: nn.Sequential, by: float) -> None:
    for p in net.parameters():
        if p not in held.velocity:
            held.velocity[p] = torch.zeros_like(p)
        held.velocity[p] += by
        held.by_id[id(p)] = held.by_id.get(id(p), 0) + by
        held.by_pair[p, "mean"] = by
        held.state[p]["step"] = by
        held.newest = p
    held.by_module[net[1]] = held.by_module.get(net[1], 0) + by
    held.groups[0]["rate"] = by


def test_another_process(pair: Mapping[str, Process]) -> None:
    change(pair["one"].held, pair["one"].net, 2)
    pair["other"].state.take_over(pair["one"].state.to_save())
    assert_is(pair["other"].held, pair["other"].net, 2)
    change(pair["other"].held, pair["other"].net, 1)
    pair["other"].state.take_over(pair["one"].state.to_save())
    assert_is(pair["other"].held, pair["other"].net, 2)


def assert_is(held: Held, net: nn.Sequential, by: float) -> None:
    names = [*net.parameters()]
    for found in (held.velocity, held.by_id, held.by_pair, held.state):
        assert len(found) == len(names)
    for p in names:
        assert held.velocity[p].eq(by).all()
        assert held.by_id[id(p)] == held.by_pair[p, "mean"] == held.state[p]["step"] == by
    assert held.newest is names[-1]
    assert held.by_module == {net[1]: by}
    assert held.groups[0]["rate"] == by
    assert all(p is q for p, q in zip(held.groups[0]["params"], names, strict=True))
    assert not held.state[nn.Parameter()]  # it makes entries of its own, as before


@pytest.mark.parametrize("key", [object(), torch.zeros(1), nn.Linear(1, 1), (1, torch.zeros(1)), int])
def test_a_key_that_no_other_process_has(
    key: Any, pair: Mapping[str, Process], caplog: pytest.LogCaptureFixture
) -> None:
    pair["one"].held.by_object[key] = 1
    pair["other"].state.take_over(pair["one"].state.to_save())
    assert [getattr(record, "variable", "") for record in caplog.records] == ["model.held.by_object"]
    assert caplog.records[0].levelno == logging.WARNING
    assert not pair["other"].held.by_object
