"""What a script saves of a state that came from elsewhere has the bytes of what its source would save."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from swift_ft.checkpoint.memory_copy import load_block, write_block
from swift_ft.checkpoint.saved_form import with_strides
from swift_ft.checkpoint.state_payload import pack, unpack
from swift_ft.checkpoint.training_state import TrainingState
from tests.support.mixed_state import Mixed

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.01, momentum=0.9),
    "Adam": lambda groups: torch.optim.Adam(groups, amsgrad=True),
    "ASGD": torch.optim.ASGD,
    "Adafactor": torch.optim.Adafactor,
    "own": Mixed,
}


class Job:
    def __init__(self, kind: str) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Conv2d(4, 2, 3))
        self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # not in its types
        groups = [
            {"params": [*part.parameters()], "lr": rate}
            for part, rate in zip(self.model, (0.1, 0.2), strict=True)
        ]
        self.optimizer, self.more = OPTIMIZERS[kind](groups), nn.Module()
        self.scheduler = ReduceLROnPlateau(self.optimizer)
        parts = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        self.state = TrainingState(parts)
        _ = self.state.known

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.linspace(0, 1, 50).reshape(1, 2, 5, 5)).square().sum().backward()
        self.optimizer.step()
        self.scheduler.step(1.0)

    def saves(self) -> dict[str, bytes]:
        parts: list[Any] = [self.model, self.optimizer, self.scheduler]
        own = self.optimizer
        return saved([*(part.state_dict() for part in parts), own.param_groups, own.state, own.defaults])


def saved(value: Any) -> dict[str, bytes]:
    file = io.BytesIO()
    torch.save(value, file)
    with zipfile.ZipFile(file) as archive:
        return {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("steps", [0, 2], ids=["a new process", "a survivor"])
def test_of_a_state(kind: str, steps: int) -> None:
    source, other = Job(kind), Job(kind)
    for _ in range(3):
        source.step()
    for _ in range(steps):
        other.step()
    load_block(other.state, write_block(source.state, None))
    assert other.saves() == source.saves()
    for job in (source, other):
        job.step()
    assert other.saves() == source.saves()


def test_a_group_that_was_added_later() -> None:
    """Its options are in the order in which it was given them, and those of the defaults the same objects."""
    source, other = Job("Adam"), Job("Adam")
    for job in (source, other):
        job.more = nn.Linear(2, 2)
        job.state = TrainingState({"model": job.model, "optimizer": job.optimizer, "more": job.more})
        job.step()
    group = {"eps": 1e-7, "params": [*source.more.parameters()], "betas": source.optimizer.defaults["betas"]}
    source.optimizer.add_param_group({**group, "lr": 0.3})
    load_block(other.state, write_block(source.state, None))
    for found, expected in zip(other.optimizer.param_groups, source.optimizer.param_groups, strict=True):
        assert [key for key in found if key != "params"] == [key for key in expected if key != "params"]
    assert saved(other.optimizer.state_dict()) == saved(source.optimizer.state_dict())


def arrived(value: Any) -> Any:
    return unpack(pack(value))


def test_text_is_the_constants_of_that_text() -> None:
    history = arrived({"loss": [{"mode": "min", ("mode", 1): "max"}], "min": 0})
    (first,) = history["loss"]
    assert saved([history, "loss", "mode", "max"]) == saved(
        [{"loss": [{"mode": "min", ("mode", 1): "max"}], "min": 0}, "loss", "mode", "max"]
    )
    assert first["mode"] is "min"  # noqa: F632


def test_text_that_is_made_stays_several_objects() -> None:
    def made() -> list[str]:
        one, other = (f"layer{number}" for number in (1, 1))
        return [one, other, one]

    assert saved(arrived(made())) == saved(made())


def test_strides_of_another_shape_are_not_taken() -> None:
    """As where a change of the layout gives a worker other rows: two elements would share a place."""
    whole = torch.arange(32.0).reshape(8, 4)
    assert with_strides(whole, [1, 8]).stride() == (1, 8)
    assert torch.equal(with_strides(whole, [1, 8]), whole)
    for strides in ([1, 4], [1, 16], [1], [0, 1]):
        assert with_strides(whole, strides) is whole
