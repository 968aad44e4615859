"""The example training with other arguments of attach_pipeline() (HELPING, as JSON).

``"build"`` among them says what is wrong with it: ``"none"`` is given, it ``"raises"``, or it makes a
``"wider"`` module than the script. ``"norm"`` puts a BatchNorm into every stage.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))

import train_swift
from torch import nn

import swift_ft

settings = json.loads(os.environ["HELPING"])
fault = settings.pop("build", "")
norm = settings.pop("norm", False)
original = train_swift.build_stage


class Normed(nn.Module):
    """A stage behind a normalisation that keeps running statistics."""

    def __init__(self, stage: nn.Module, sequence: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(sequence)
        self.stage = stage

    def forward(self, x: Any) -> Any:
        return self.stage(self.norm(x) if x.is_floating_point() else x)


def build_stage(index: int, num_stages: int, config: Any) -> nn.Module:
    stage = original(index, num_stages, config)
    return Normed(stage, config.sequence) if norm else stage


def faulty(index: int) -> nn.Module:
    if fault == "raises":
        raise MemoryError("there is no room for it")
    return nn.Linear(8, 8)


class Session(swift_ft.Session):
    def attach_pipeline(self, schedule: Any, **arguments: Any) -> None:
        if fault:
            arguments["build"] = None if fault == "none" else faulty
        super().attach_pipeline(schedule, **{**arguments, **settings})


train_swift.build_stage = build_stage
swift_ft.Session = Session  # type: ignore[misc]
train_swift.main()
