"""The lines at the top of an epoch, run on a state of before, of after, and of the middle of the epoch."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import nn

from swift_ft.checkpoint.step.rollback import Rollback
from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.runtime.epoch_top import Epochs, EpochTop


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.noise = torch.Generator().manual_seed(1)
        self.tau, self.drawn = 1.0, list[float]()


class Process:
    """A process of a script with a loop over epochs."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = Net()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=1.0)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        self.state = TrainingState(
            {"model": self.net, "optimizer": self.optimizer, "scheduler": self.scheduler}
        )
        self.epochs = Epochs()
        self.state.small["swift_ft.epochs"] = self.epochs
        self.rollback = Rollback(self.state)
        self.rollback.watch()
        self.top = EpochTop(self.state, self.rollback.carried, self.epochs, seed=0)

    def lines(self, iteration: int, *, shrinks: bool = False) -> None:
        """Those at the top of an epoch."""
        self.top.begins(iteration)
        self.net.tau *= 0.9
        self.net.drawn[:] = [torch.rand((), generator=self.net.noise).item(), random.random(), self.rate]
        self.optimizer.step()  # else the scheduler warns
        self.scheduler.step()
        self.optimizer.param_groups[0]["lr"] *= 0.9
        if shrinks:
            with torch.no_grad():
                self.net.layer.weight.mul_(0.5)
        self.top.over()

    def first_step(self, iteration: int) -> str:
        why = self.top.settle(iteration)
        self.top.step_begins()
        return why

    @property
    def rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def sent(self) -> dict[str, Any]:
        saved = self.state.to_save()
        plain = self.state.unpack(saved["plain"]["bytes"].getvalue())
        return {"models": copy.deepcopy(saved["models"]), "optimizers": saved["optimizers"], "plain": plain}

    def take(self, sent: dict[str, Any]) -> None:
        self.state.take_over({k: v for k, v in sent.items() if k != "plain"}, sent["plain"])

    def shown(self) -> list[Any]:
        net = self.net
        return [
            net.tau, [*net.drawn], self.rate, self.scheduler.state_dict(), net.noise.get_state().tolist(),
            net.layer.weight.tolist(), self.epochs.state_dict(),
        ]  # fmt: skip


@pytest.fixture
def one() -> Process:
    return Process()


@pytest.mark.parametrize("shrinks", [False, True])
@pytest.mark.parametrize("iteration", [0, 1])
def test_a_replacement_within_an_epoch(one: Process, iteration: int, shrinks: bool) -> None:
    one.lines(0, shrinks=shrinks)
    one.first_step(0)
    with torch.no_grad():
        one.net.layer.weight.add_(float(iteration))
    other = Process()
    other.take(one.sent())
    other.lines(iteration, shrinks=shrinks)
    assert other.first_step(iteration) == ""
    assert other.shown() == one.shown()
    assert one.epochs.written == (("model.layer.weight",) if shrinks else ())


@pytest.mark.parametrize("iteration", [0, 1])
def test_what_a_replacement_has_of_an_earlier_iteration(
    one: Process, iteration: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The lines at the top may set it anew, so that it is named as the first step begins, and once."""
    one.lines(0)
    one.first_step(0)
    vars(one.net)["count"] = 3
    sent, other = one.sent(), Process()
    other.rollback.carried.own = other.rollback.carried.behind = frozenset({("model", "tau")})
    other.take(sent)
    other.rollback.carried.own = other.rollback.carried.behind = frozenset()
    other.lines(iteration)
    assert "earlier iteration" not in caplog.text
    other.first_step(iteration)
    assert "steps go on with model.tau, and this worker has it of an earlier iteration than" in caplog.text
    caplog.clear()
    other.top.step_begins()
    assert not caplog.records


def test_a_state_that_comes_without_variables(one: Process) -> None:
    """The script's are as it begins, also after the lines at the top; all else is what has come."""
    one.lines(0)
    one.first_step(0)
    sent = one.sent()
    del sent["plain"]["carried"]
    other = Process()
    other.take(sent)
    other.lines(1)
    assert other.first_step(1) == ""
    assert other.net.tau == 1.0
    assert (other.rate, other.epochs.state_dict()) == (one.rate, one.epochs.state_dict())


@pytest.mark.parametrize("in_step", [False, True])
def test_gradients_that_the_lines_drop(one: Process, in_step: bool) -> None:
    """In the middle of an epoch the replacement runs these lines with those of a step's end."""
    (weight, *_) = one.net.parameters()
    one.top.begins(0)
    one.optimizer.zero_grad()
    one.top.over()
    assert one.first_step(0) == ""
    weight.grad = torch.ones_like(weight) if in_step else None
    other = Process()
    other.take(one.sent())
    other.top.begins(1)
    other.optimizer.zero_grad()
    other.top.over()
    assert other.first_step(1) == ""
    assert [p.grad is not None for p in other.net.parameters()] == [in_step, False]


def test_gradients_of_a_state_of_the_epoch_s_beginning(one: Process) -> None:
    """It comes after these lines have run, and was saved before they had."""
    (weight, *_) = one.net.parameters()
    weight.grad = torch.ones_like(weight)
    sent = one.sent()
    one.top.begins(0)
    one.optimizer.zero_grad()
    one.top.over()
    one.take(sent)
    assert weight.grad is not None
    assert one.first_step(0) == ""
    assert weight.grad is None


def test_a_replacement_at_the_border(one: Process) -> None:
    other = Process()
    other.take(one.sent())
    for process in (one, other):
        process.lines(0)
        process.first_step(0)
    assert other.shown() == one.shown()


@pytest.mark.parametrize("shrinks", [False, True])
def test_a_return_to_the_beginning_of_the_same_epoch(one: Process, shrinks: bool) -> None:
    before = one.sent()
    one.lines(0, shrinks=shrinks)
    one.first_step(0)
    expected = one.shown()
    with torch.no_grad():
        one.net.layer.weight.add_(1.0)
    one.take(before)
    assert one.first_step(0) == ""
    assert one.shown() == expected


def test_one_that_has_run_its_lines_again_cannot_return(one: Process) -> None:
    before = one.sent()
    one.lines(0)
    one.first_step(0)
    other = Process()
    other.take(one.sent())
    other.lines(1)
    other.first_step(1)
    other.take(before)
    assert "beginning of epoch 0" in other.first_step(0)


def test_a_state_of_a_run_without_epochs(one: Process) -> None:
    """Its script had other loops: nobody has noted what was before the lines at the top."""
    assert not one.epochs.is_begun(0)
    assert one.epochs.is_begun(4)
