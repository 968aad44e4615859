"""The example training with other arguments of attach_pipeline() (HELPING, as JSON).

``"build"`` among them selects a fault of this argument: it is missing (``"none"``), it ``"raises"``, or it
builds a ``"wider"`` module than the script. ``"norm"`` puts a BatchNorm into every stage. ``"zeros"`` leaves
parameters with gradients of zero where the example leaves them with none. ``"without_dropout"`` puts
all Dropout modules in eval mode.

``"habit"`` makes each stage read or change something besides its parameters: see :class:`Habit`.
"""

import json
import os
import random
from collections.abc import Iterator
from typing import Any

import torch
import train_swift
from gpt import Config
from torch import nn

import swift_ft

settings = json.loads(os.environ["HELPING"])
fault = settings.pop("build", "")
norm = settings.pop("norm", False)
zeros = settings.pop("zeros", False)
without_dropout = settings.pop("without_dropout", False)
habit = settings.pop("habit", "")
original = train_swift.build_stage


class Normed(nn.Module):
    """A stage behind a normalisation that keeps running statistics."""

    def __init__(self, stage: nn.Module, sequence: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(sequence)
        self.stage = stage

    def forward(self, x: Any) -> Any:
        return self.stage(self.norm(x) if x.is_floating_point() else x)


habits: "list[Habit]" = []
"""Of this worker: its own stage first, then those that are built to help."""


class Habit(nn.Module):
    """A stage whose output depends on other things than its parameters.

    ``"load"``: an attribute adds up what the stage is given, and every fifth step updates by it. ``"tau"``: a
    buffer that the step makes smaller. ``"scale"``: an attribute that the step sets by its index.
    ``"random"``: numbers of Python's. ``"counts"``: the loss counts its calls, with which each worker's step
    computes, as a worker that has no loss does with none. ``"draws"``: the loss draws numbers, and so
    does the step, afterwards.
    ``"cache"``: an attribute that the first forward pass fills. ``"freezes"``: from iteration 4 on, the
    first parameter is not trained.
    """

    tau: torch.Tensor

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.register_buffer("tau", torch.ones(1))
        self.stage = stage
        self.load = torch.zeros(100)
        self.scale = 1.0
        self.cache: torch.Tensor | None = None
        habits.append(self)

    def forward(self, x: Any) -> Any:
        if self.cache is None:
            self.cache = torch.ones(1)
        if habit == "load":
            self.load = self.load + x.detach().float().mean()
        scale = self.scale * (1 + 0.1 * random.random() if habit == "random" else 1.0)
        return self.stage(x) * self.tau * self.cache * scale

    @torch.no_grad()
    def after(self, index: int) -> None:
        """At the end of a step."""
        if habit == "tau":
            self.tau.mul_(0.9)
        if habit == "counts":
            for parameter in self.stage.parameters():
                parameter.mul_(1 + 0.001 * counting_loss.calls)
        if habit == "load" and index % 5 == 4:
            for parameter in self.stage.parameters():
                parameter.mul_(1 + 0.01 * self.load.mean())
            self.load = torch.zeros(100)


def drawing_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return original_loss(logits + 0.1 * torch.randn_like(logits), targets)


class CountingLoss:
    """Most workers have no use for it, but when they help."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return original_loss(logits, targets)


counting_loss = CountingLoss()


def step_with_habit(self: torch.optim.AdamW) -> None:
    if habit == "draws":
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad += 0.01 * torch.randn_like(parameter)
    original_step(self)
    for stage in habits[:1]:
        stage.after(Session.index)


def build_stage(stage_index: int, num_stages: int, config: Config) -> nn.Module:
    stage = original(stage_index, num_stages, config)
    if habit:
        return Habit(stage)
    return Normed(stage, config.sequence) if norm else stage


def faulty(index: int) -> nn.Module:
    if fault == "raises":
        raise MemoryError("there is no room for it")
    return nn.Linear(8, 8)


class Session(swift_ft.Session):
    index = 0

    def steps(self, *args: Any, **arguments: Any) -> Iterator[Any]:
        for step in super().steps(*args, **arguments):
            Session.index = step.index
            if habit == "scale":
                habits[0].scale = 1 + 0.1 * step.index
            if habit == "freezes" and step.index >= 4:
                next(habits[0].stage.parameters()).requires_grad_(False)
            yield step

    def attach_pipeline(self, schedule: Any, **arguments: Any) -> None:
        if fault:
            arguments["build"] = None if fault == "none" else faulty
        for part in schedule._stage.submod.modules():
            if without_dropout and isinstance(part, nn.Dropout):
                part.eval()
        super().attach_pipeline(schedule, **{**arguments, **settings})


def zero_grad(self: torch.optim.Optimizer) -> None:
    clear_gradients(self, set_to_none=False)


original_loss = train_swift.loss_fn
original_step = torch.optim.AdamW.step
if habit:
    torch.optim.AdamW.step = step_with_habit  # type: ignore[assignment]
if habit == "draws":
    train_swift.loss_fn = drawing_loss
if habit == "counts":
    train_swift.loss_fn = counting_loss
if zeros:
    clear_gradients = torch.optim.AdamW.zero_grad
    torch.optim.AdamW.zero_grad = zero_grad  # type: ignore[assignment]
train_swift.build_stage = build_stage
swift_ft.Session = Session  # type: ignore[misc]
train_swift.main()
