"""Modules that change and are not in the state are an error; large tensors that do are named once."""

from __future__ import annotations

import copy
import logging
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from swift_ft.checkpoint.step.rollback import Rollback
from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.errors import IncompleteStateError

REMEDY = r'Session\(\{\.\.\., "target": .*target'


class Agent:
    """An object of the script's with the network that it learns and the one that it follows."""

    def __init__(self, net: nn.Module) -> None:
        self.net, self.target = net, copy.deepcopy(net).requires_grad_(False)


class Centred(nn.Module):
    """A criterion with a running centre, in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.center: torch.Tensor
        self.register_buffer("center", torch.zeros(3))


@pytest.fixture
def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))


@pytest.fixture
def rollback(net: nn.Sequential) -> Rollback:
    made = Rollback(TrainingState({"model": net}))
    made.watch()
    return made


def follow(target: nn.Module, net: nn.Module) -> None:
    """By ``.data``, as many scripts do: no counter of changes moves."""
    for ours, theirs in zip(target.parameters(), net.parameters(), strict=True):
        ours.data.lerp_(theirs.data + 1, 0.01)


def test_a_target_network(net: nn.Sequential, rollback: Rollback) -> None:
    target = copy.deepcopy(net).requires_grad_(False)
    rollback.begin(0)
    follow(target, net)
    with pytest.raises(IncompleteStateError, match=REMEDY):
        rollback.begin(1)


def test_a_wrapper_that_adds_something(one_process: None) -> None:
    """The state has the model in it: to pass the wrapper too would change nothing."""

    class Learner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ddp = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
            self.register_buffer("center", torch.zeros(2))

    learner = Learner()
    rollback = Rollback(TrainingState({"model": learner}))
    rollback.watch()
    rollback.begin(0)
    learner.get_buffer("center").add_(1)
    with pytest.raises(IncompleteStateError, match="keep what it adds in a module of its own"):
        rollback.begin(1)


@pytest.mark.parametrize("held", ["an object", "a list", "a dictionary", "a closure"])
def test_wherever_the_script_has_it(held: str, net: nn.Sequential, rollback: Rollback) -> None:
    target = copy.deepcopy(net)

    def forward(x: torch.Tensor) -> Any:
        return target(x)

    holders = {"an object": Agent(net), "a list": [target], "a dictionary": {"target": target}}
    holder = holders.get(held, forward)
    inner = holder.target if isinstance(holder, Agent) else target
    del holders
    rollback.begin(0)
    follow(inner, net)
    with pytest.raises(IncompleteStateError, match="changes while training and is not in"):
        rollback.begin(1)


class Follower:
    """A part of the state with a network that it says all of, a copy of, or nothing of."""

    def __init__(self, net: nn.Module, says: str) -> None:
        self.target, self.says = copy.deepcopy(net).requires_grad_(False), says

    def state_dict(self) -> dict[str, Any]:
        tensors = self.target.state_dict() if self.says != "nothing" else {}
        return {name: tensor.clone() if self.says == "a copy" else tensor for name, tensor in tensors.items()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.target.load_state_dict(saved)


@pytest.mark.parametrize("says", ["all", "a copy", "nothing"])
def test_behind_a_part_of_the_state(says: str, net: nn.Sequential) -> None:
    """It is the part's own, if its ``state_dict()`` has it."""
    follower = Follower(net, says)
    rollback = Rollback(TrainingState({"model": net, "follower": follower}))
    rollback.watch()
    rollback.begin(0)
    follow(follower.target, net)
    with nullcontext() if says != "nothing" else pytest.raises(IncompleteStateError, match=REMEDY):
        rollback.begin(1)


def test_one_that_changes_seldom(net: nn.Sequential, rollback: Rollback) -> None:
    """Between two looks: the next look sees it, and so does a checkpoint."""
    target = copy.deepcopy(net)
    for iteration in range(10):
        rollback.begin(iteration)
    rollback.carried.to_save()
    follow(target, net)
    with pytest.raises(IncompleteStateError, match=REMEDY):
        rollback.carried.to_save()
    for iteration in range(10, 15):
        rollback.begin(iteration)
    with pytest.raises(IncompleteStateError, match=REMEDY):
        rollback.begin(15)


def test_a_buffer_of_a_criterion(rollback: Rollback) -> None:
    criterion = Centred()
    rollback.begin(0)
    criterion.center.add_(1)
    with pytest.raises(IncompleteStateError, match="criterion"):
        rollback.begin(1)


def test_what_stays_or_is_held(net: nn.Sequential) -> None:
    """A frozen teacher, the model's own modules under other names, and modules that are in the state."""
    target, head = copy.deepcopy(net), net[1]
    teacher, lazy = copy.deepcopy(net), nn.LazyLinear(3)
    rollback = Rollback(TrainingState({"model": net, "target": target}))
    rollback.watch()
    for iteration in range(3):
        rollback.begin(iteration)
        follow(target, net)
        follow(head, net[1])
        assert teacher(torch.ones(2)) is not None
    assert list(lazy.parameters())
    rollback.carried.to_save()


def test_a_new_module_in_the_place_of_an_old_one(net: nn.Sequential, rollback: Rollback) -> None:
    """As a copy for an evaluation, made for each: nothing of it goes on."""
    for iteration in range(3):
        rollback.begin(iteration)
        best = copy.deepcopy(net)
        follow(net, net)
        assert best is not None


@pytest.mark.parametrize("kind", ["tensors", "arrays", "attribute"])
def test_large_values_are_named_once(kind: str, rollback: Rollback, caplog: pytest.LogCaptureFixture) -> None:
    """An average of weights in a dictionary, a table of NumPy's, and one that an object has."""
    large: Any = np.zeros(2**19) if kind == "arrays" else torch.zeros(2**19)
    same: Any = torch.zeros(2**19)
    holder = Agent(nn.Identity())
    vars(holder)["shadow"] = large if kind == "attribute" else {"weight": large}
    averages = {"weight": large, "same": same}
    with caplog.at_level(logging.WARNING):
        for iteration in range(3):
            rollback.begin(iteration)
            large += 1
    said = [record for record in caplog.records if getattr(record, "event", "") == "large_value_changes"]
    names = {record.variable for record in said}  # type: ignore[attr-defined]
    assert len(said) == len(names)
    assert names <= {"averages['weight']", "holder.shadow", "holder.shadow['weight']", "large"}
    assert "averages['weight']" in names
    assert averages["same"] is same


def test_a_batch_is_not_named(rollback: Rollback, caplog: pytest.LogCaptureFixture) -> None:
    x = torch.zeros(2**19)
    with caplog.at_level(logging.WARNING):
        for iteration in range(3):
            rollback.begin(iteration)
            x = torch.zeros(2**19) + iteration
            x += 1
            batch = {"x": torch.full((2**19,), float(iteration))}
            assert batch
    assert not caplog.records
    assert x.any()


@pytest.mark.parametrize("kind", ["a tensor", "an array"])
def test_a_large_value_of_the_loop_is_named(
    kind: str, rollback: Rollback, caplog: pytest.LogCaptureFixture
) -> None:
    """Each step reads what the one before has left in it."""
    ring: Any = torch.zeros(2**19) if kind == "a tensor" else np.zeros(2**19)
    other = torch.zeros(2**19)
    with caplog.at_level(logging.WARNING):
        for iteration in range(4):
            rollback.begin(iteration)
            ring[0] += 1
            other = other + 1  # another one is put back, whatever its size
    said = [record.variable for record in caplog.records]  # type: ignore[attr-defined]
    assert said == ["ring"]
    assert other.any()


class Sample:
    def __init__(self) -> None:
        self.weight = 1.0


CONTAINERS: dict[str, tuple[Any, Any, bool]] = {
    "a long list": ([0.5] * (2**16 + 1), lambda v: v.__setitem__(-1, v[-1] + 1), True),
    "many tensors": ([torch.zeros(1) for _ in range(1025)], lambda v: v[-1].add_(1), True),
    "many tensors by name": (
        {str(n): torch.zeros(1) for n in range(1025)},
        lambda v: v["1024"].add_(1),
        True,
    ),
    "many objects": ([Sample() for _ in range(1025)], lambda v: setattr(v[-1], "weight", 2.0), True),
    "what is only added": ([0.5] * (2**16 + 1), lambda v: v.append(1.0), False),
    "what is put back": ([0.5] * 2**15, lambda v: v.__setitem__(-1, v[-1] + 1), False),
    "many that stay": ([torch.zeros(1) for _ in range(1025)], lambda v: None, False),
}


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("kind", CONTAINERS)
def test_large_containers_are_named_once(
    kind: str, inner: bool, rollback: Rollback, caplog: pytest.LogCaptureFixture
) -> None:
    value, change, named = copy.deepcopy(CONTAINERS[kind])
    held = {"inner": value} if inner else value
    del value
    with caplog.at_level(logging.WARNING):
        for iteration in range(4):
            rollback.begin(iteration)
            change(held["inner"] if inner else held)
    said = [record for record in caplog.records if getattr(record, "event", "") == "large_value_changes"]
    assert [record.variable for record in said] == (["held['inner']" if inner else "held"] if named else [])  # type: ignore[attr-defined]


def test_a_batch_of_many_samples_is_not_named(rollback: Rollback, caplog: pytest.LogCaptureFixture) -> None:
    """A list of each step, which may get the place of the one before."""
    with caplog.at_level(logging.WARNING):
        for iteration in range(4):
            rollback.begin(iteration)
            batch = [{"x": iteration} for _ in range(1025)]
            assert batch
    assert not caplog.records
