"""Hooks of a script are put back with a step, and those of libraries stay. Later ones are refused."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from swift_ft.checkpoint.step.rollback import Rollback
from swift_ft.checkpoint.step.script_hooks import is_own_hook
from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.errors import UnsupportedError

called: list[str] = []


def own(name: str) -> Callable[..., None]:
    def hook(*_: object, **__: object) -> None:
        called.append(name)

    return hook


def of_library(name: str) -> Callable[..., None]:
    hook = own(name)
    hook.__module__ = "torch.nn.utils.parametrize"
    return hook


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(input=x)
        return y


class Training:
    def __init__(self) -> None:
        self.net = Net()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.rollback = Rollback(TrainingState({"model": self.net, "optimizer": self.optimizer}))
        self.iteration = 0

    def begin(self) -> None:
        self.rollback.begin(self.iteration)

    def complete(self) -> None:
        self.rollback.completed()
        self.iteration += 1

    def calls(self) -> list[str]:
        """Of a forward pass, a backward pass and an update."""
        called.clear()
        self.net(torch.ones(1, 2, requires_grad=True)).sum().backward()
        self.optimizer.step()
        return [*called]


@pytest.fixture
def training() -> Training:
    return Training()


Register = Callable[[Training, Callable[..., None]], RemovableHandle]
WAYS: dict[str, Register] = {
    "forward": lambda t, hook: t.net.layer.register_forward_hook(hook),
    "forward, always": lambda t, hook: t.net.layer.register_forward_hook(hook, always_call=True),
    "forward, keywords": lambda t, hook: t.net.layer.register_forward_hook(hook, with_kwargs=True),
    "before, keywords": lambda t, hook: t.net.layer.register_forward_pre_hook(hook, with_kwargs=True),
    "first of all": lambda t, hook: t.net.register_forward_hook(hook, prepend=True),
    "backward": lambda t, hook: t.net.register_full_backward_hook(hook),
    "gradient": lambda t, hook: t.net.layer.weight.register_hook(hook),
    "accumulated": lambda t, hook: t.net.layer.weight.register_post_accumulate_grad_hook(hook),
    "update": lambda t, hook: t.optimizer.register_step_pre_hook(hook),
}


@pytest.mark.parametrize("way", WAYS)
def test_put_back(way: str, training: Training) -> None:
    """New ones are gone, removed ones are there and are called as before, in their order."""
    register = WAYS[way]
    first, second = register(training, own("first")), register(training, own("second"))
    before = training.calls()
    assert sorted(before) == ["first", "second"]
    training.begin()
    first.remove()
    register(training, own("third"))
    register(training, of_library("a library's"))
    training.rollback.back()
    found = training.calls()
    assert [name for name in found if name != "a library's"] == before
    assert found.count("a library's") == 1
    first.remove()
    second.remove()
    assert training.calls() == ["a library's"], "handles are still those of their hooks"


def test_all_are_removed_and_none_were_there(training: Training) -> None:
    handle = WAYS["forward"](training, own("one"))
    training.begin()
    handle.remove()
    WAYS["gradient"](training, own("other"))
    training.rollback.back()
    assert training.calls() == ["one"]


@pytest.mark.parametrize("removed", [False, True])
def test_a_later_step_may_not_leave_others_behind(removed: bool, training: Training) -> None:
    handle = WAYS["forward"](training, own("one"))
    for _ in range(3):
        training.begin()
        WAYS["update"](training, own("within")).remove()
        training.complete()
    training.begin()
    if removed:
        handle.remove()
    else:
        WAYS["gradient"](training, own("mask"))
    training.complete()
    said = r"registered or removed hooks \(own.<locals>.hook\)"
    with pytest.raises(UnsupportedError, match=said) as caught:
        training.begin()
    assert caught.value.fields["alike"]


def test_what_stays_the_same_is_not_refused(training: Training, caplog: pytest.LogCaptureFixture) -> None:
    """One in the place of another, those of libraries, and those of modules in other places."""
    handle, other = WAYS["forward"](training, own("one")), nn.Linear(2, 2)
    for _ in range(5):
        training.begin()
        handle.remove()
        handle = WAYS["forward"](training, own("one"))
        WAYS["gradient"](training, of_library("a library's"))
        other.register_forward_hook(own("other"))
        training.complete()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_the_first_step_may_register_some(training: Training, caplog: pytest.LogCaptureFixture) -> None:
    """As a module does that is called for the first time. A line says what else it may be."""
    for iteration in range(3):
        training.begin()
        if iteration == 0:
            WAYS["forward"](training, own("one"))
        training.complete()
    (said,) = [one for one in caplog.records if getattr(one, "event", "") == "hooks_of_first_step"]
    assert "own.<locals>.hook" in said.getMessage()


def test_moved_layers_have_their_own(training: Training) -> None:
    training.begin()
    training.complete()
    training.begin()
    WAYS["forward"](training, own("one"))
    training.rollback.forget()
    training.begin()
    training.complete()
    training.begin()


class Mask:
    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient

    def apply(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


@pytest.mark.parametrize(
    ("hook", "expected"),
    [
        (own("one"), True),
        (partial(own("one"), 1), True),
        (Mask(), True),
        (Mask().apply, True),
        (of_library("one"), False),
        (partial(torch.relu), False),
        (nn.ReLU().forward, False),
        (nn.ReLU(), False),
    ],
)
def test_whose_hook_it_is(hook: Any, expected: bool) -> None:
    assert is_own_hook(hook) == expected
