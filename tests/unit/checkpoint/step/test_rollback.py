"""What an interrupted step puts back, and what a completed one does that is undone."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.pipelining import ScheduleGPipe
from torch.optim.swa_utils import AveragedModel

from swift_ft.checkpoint.step.rollback import Rollback
from swift_ft.checkpoint.training_state import TrainingState


class Counter:
    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


class Training:
    """A model with a buffer and a counter that each step moves on."""

    def __init__(self) -> None:
        self.model = torch.nn.BatchNorm1d(1)
        self.counter = Counter()
        self.rollback = Rollback(TrainingState({"model": self.model, "counter": self.counter}))

    @property
    def seen(self) -> tuple[int, int]:
        assert self.model.num_batches_tracked is not None
        return int(self.model.num_batches_tracked), self.counter.value

    def step(self, iteration: int) -> None:
        self.rollback.begin(iteration)
        self.model(torch.ones(2, 1))
        self.counter.value += 1


def test_back_to_the_beginning_of_the_step() -> None:
    training = Training()
    training.step(0)
    training.step(1)
    training.rollback.back()
    assert training.seen == (1, 1)


def test_back_to_a_step_that_was_completed() -> None:
    training = Training()
    training.step(0)
    training.step(1)
    training.rollback.back_to(1)  # the next one has not begun
    assert training.seen == (1, 1)


def test_back_to_the_step_before_the_interrupted_one() -> None:
    training = Training()
    for iteration in range(3):
        training.step(iteration)
    training.rollback.back()
    assert training.seen == (2, 2)
    training.rollback.back_to(1)
    assert training.seen == (1, 1)
    training.step(1)
    training.step(2)
    assert training.seen == (3, 3)


def test_the_end_of_a_step_that_a_replica_completed() -> None:
    training = Training()
    training.step(0)
    training.rollback.back()
    training.rollback.buffers_of(1)
    assert training.seen == (1, 0)  # the counter's state comes from the replica


def test_a_kernel_that_does_not_count_its_changes() -> None:
    """Batch normalisation changes running statistics without a new version."""
    training = Training()
    mean = training.model.running_mean
    assert mean is not None
    training.step(0)
    before, version = mean.clone(), mean._version
    training.step(1)
    assert mean._version == version
    assert not mean.equal(before)
    training.rollback.back()
    assert mean.equal(before)


def test_buffers_that_a_step_assigns_registers_and_removes() -> None:
    training = Training()
    training.model.register_buffer("mask", mask := torch.ones(3))
    training.rollback.begin(0)
    training.model.mask = torch.zeros(3)
    training.model.register_buffer("cache", torch.ones(1))
    training.model.running_var = None
    training.rollback.back()
    buffers = dict(training.model.named_buffers())
    assert buffers.keys() == {"running_mean", "running_var", "num_batches_tracked", "mask"}
    assert buffers["mask"] is mask
    assert mask.equal(torch.ones(3))


def test_large_buffers_are_copied_when_they_change() -> None:
    training = Training()
    training.model.register_buffer("queue", queue := torch.zeros(2**19))
    training.rollback.begin(0)
    training.rollback.begin(1)
    queue.data[7] = -0.0  # equal as a number, and not as bits
    training.rollback.begin(2)
    queue.data[7] = 1.0
    training.rollback.back()
    assert queue[7].signbit()
    training.rollback.back_to(1)
    assert not queue.signbit().any()


def test_back_two_steps_after_a_second_interruption() -> None:
    """The interrupted step was begun twice: the one before it is still known."""
    training = Training()
    for iteration in (0, 1, 2):
        training.step(iteration)
    training.rollback.back()
    training.step(2)
    training.rollback.back()
    training.rollback.back_to(1)
    assert training.seen == (1, 1)


@pytest.mark.parametrize("updated_late", [False, True])
def test_a_scaler_unscales_again(updated_late: bool) -> None:
    """Also one whose ``update()`` comes at the top of the next step."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    rollback = Rollback(TrainingState({"model": model, "optimizer": optimizer, "scaler": scaler}))

    def compute() -> None:
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        scaler.unscale_(optimizer)

    if updated_late:
        compute()
        scaler.step(optimizer)
    rollback.begin(0)
    for _ in range(2):
        if updated_late:
            scaler.update()
        compute()
        rollback.back()


def test_modes_of_torch() -> None:
    """A step is interrupted between the line that sets a mode and the one that sets it back."""
    training = Training()
    training.rollback.begin(0)
    torch.set_grad_enabled(False)
    training.rollback.back()
    enabled = torch.is_grad_enabled()
    torch.set_grad_enabled(True)
    assert enabled


class Criterion(torch.nn.Module):
    """A module that no state has, which counts, and keeps what it was given."""

    center: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.register_buffer("center", torch.zeros(1))
        self.generator = torch.Generator().manual_seed(3)
        self.calls, self.seen = 0, list[float]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(x.sum().item())
        self.center += x.mean()
        return (x * self.weight).sum() + torch.rand(1, generator=self.generator)


@pytest.mark.parametrize("abandoned", [False, True])
def test_what_is_computed_for_another_worker_leaves_nothing_behind(abandoned: bool) -> None:
    """Its loss function is called in helps, which may end anywhere: with torch's modes set, too."""
    training = Training()
    criterion = training.counter.criterion = Criterion()  # type: ignore[attr-defined]
    training.step(0)
    training.model(torch.ones(2, 1)).sum().backward()
    kept = training.model.weight.grad
    assert kept is not None
    before, drawn = kept.clone(), criterion.generator.get_state()
    seen = criterion.seen
    helps = pytest.raises(ConnectionError) if abandoned else contextlib.nullcontext()
    with helps, training.rollback.aside():
        (criterion(torch.ones(2)) * criterion(training.model(torch.ones(2, 1)))).backward()
        training.counter.value += 1
        training.model.eval()
        criterion.requires_grad_(False)
        torch.set_grad_enabled(False)
        if abandoned:
            raise ConnectionError
    enabled = torch.is_grad_enabled()
    torch.set_grad_enabled(True)
    assert enabled
    assert training.model.training
    assert criterion.weight.requires_grad
    assert training.seen == (2, 1)
    assert (criterion.calls, criterion.seen, criterion.center.item()) == (0, [], 0)
    assert criterion.seen is seen
    assert criterion.generator.get_state().equal(drawn)
    assert criterion.weight.grad is None
    assert training.model.weight.grad is kept
    assert kept.equal(before)


def test_a_loss_function_that_only_a_pipeline_s_schedule_holds() -> None:
    schedule: Any = ScheduleGPipe.__new__(ScheduleGPipe)
    schedule._loss_fn = Criterion()
    training = Training()
    training.rollback.begin(0)
    schedule._loss_fn(torch.ones(1))
    training.rollback.back()
    assert (schedule._loss_fn.calls, schedule._loss_fn.seen) == (0, [])


def test_whether_steps_change_buffers() -> None:
    training = Training()
    training.rollback.begin(0)
    training.rollback.begin(1)
    assert not training.rollback.has_statistics(training.model)
    training.step(2)
    training.rollback.back()
    assert training.rollback.has_statistics(training.model)
    assert not training.rollback.has_statistics(torch.nn.Linear(2, 2))


def test_only_the_models_own_buffers_are_kept() -> None:
    """An averaged model counts its updates after the last forward pass: the count comes from the replica."""
    model = torch.nn.BatchNorm1d(3)
    average = AveragedModel(model)
    rollback = Rollback(TrainingState({"model": model, "ema": average}))
    rollback.begin(4)
    model(torch.randn(2, 3))
    rollback.back()
    assert model.num_batches_tracked is not None
    model.num_batches_tracked.fill_(17)
    average.n_averaged.fill_(5)  # as the state of a replica that has completed the step
    rollback.buffers_of(5, model)
    assert model.num_batches_tracked == 1
    assert average.n_averaged == 5


@pytest.mark.parametrize("plain", [True, False])
def test_the_random_state_of_the_host_is_put_back_in_either_form(plain: bool) -> None:
    state = TrainingState({"model": torch.nn.Linear(1, 1)})

    def draw() -> tuple[float, ...]:
        return random.gauss(0, 1), random.random(), float(np.random.randn()), float(np.random.rand())

    draw()  # of two normal numbers, the second one is kept
    saved = state.snapshot(plain=plain)
    drawn = draw(), draw()
    assert not plain or state.pack(saved)
    state.restore(saved)
    assert (draw(), draw()) == drawn
    state.restore(saved)
    assert (draw(), draw()) == drawn


class Average:
    """As in libraries of averaged weights: ``parameter.clone()`` is not detached."""

    def __init__(self, parameter: torch.Tensor) -> None:
        self.kept: list[torch.Tensor] | None = None
        self.parameter = parameter

    def store(self) -> None:
        self.kept = [self.parameter.clone()]

    def state_dict(self) -> dict[str, Any]:
        return {"kept": self.kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kept = state["kept"]


def test_a_small_part_may_hold_tensors_that_have_a_graph() -> None:
    model = nn.Linear(1, 1)
    average = Average(model.weight)
    state = TrainingState({"model": model, "average": average})
    rollback = Rollback(state)
    average.store()
    before = model.weight.detach().clone()
    rollback.begin(0)
    with torch.no_grad():
        model.weight.add_(1)
    average.store()
    saved = state.to_save()
    rollback.back()
    assert average.kept is not None
    assert torch.equal(average.kept[0], before)
    state.take_over(state.to_load({}) | saved)
    assert torch.equal(average.kept[0], before + 1)
