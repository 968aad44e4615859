"""The example training with other arguments of attach_pipeline() (HELPING, as JSON).

``"build"`` among them selects a fault of this argument: it is missing (``"none"``), it ``"raises"``, or it
builds a ``"wider"`` module than the script. ``"norm"`` puts a BatchNorm into every stage. ``"zeros"`` leaves
parameters with gradients of zero where the example leaves them with none. ``"without_dropout"`` puts
all Dropout modules in eval mode.
"""

import json
import os
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
original = train_swift.build_stage


class Normed(nn.Module):
    """A stage behind a normalisation that keeps running statistics."""

    def __init__(self, stage: nn.Module, sequence: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(sequence)
        self.stage = stage

    def forward(self, x: Any) -> Any:
        return self.stage(self.norm(x) if x.is_floating_point() else x)


def build_stage(stage_index: int, num_stages: int, config: Config) -> nn.Module:
    stage = original(stage_index, num_stages, config)
    return Normed(stage, config.sequence) if norm else stage


def faulty(index: int) -> nn.Module:
    if fault == "raises":
        raise MemoryError("there is no room for it")
    return nn.Linear(8, 8)


class Session(swift_ft.Session):
    def attach_pipeline(self, schedule: Any, **arguments: Any) -> None:
        if fault:
            arguments["build"] = None if fault == "none" else faulty
        for part in schedule._stage.submod.modules():
            if without_dropout and isinstance(part, nn.Dropout):
                part.eval()
        super().attach_pipeline(schedule, **{**arguments, **settings})


def zero_grad(self: torch.optim.Optimizer) -> None:
    clear_gradients(self, set_to_none=False)


if zeros:
    clear_gradients = torch.optim.AdamW.zero_grad
    torch.optim.AdamW.zero_grad = zero_grad  # type: ignore[assignment]
train_swift.build_stage = build_stage
swift_ft.Session = Session  # type: ignore[misc]
train_swift.main()
