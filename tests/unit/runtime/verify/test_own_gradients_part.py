"""A replica notes its own work after each checkpoint: its gradients, and what they follow from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from swift_ft.checkpoint.own_gradients import (
    OwnStep,
    read_own_steps,
    write_own_steps,
)
from swift_ft.checkpoint.worker_files import WorkerFiles
from swift_ft.recovery.job_state import Checkpoints, State
from swift_ft.runtime.data.digest import digest_of
from swift_ft.runtime.verify.own_gradients_part import KeptSteps, OwnGradientsPart
from swift_ft.runtime.worker.part import Interruption, StepInfo
from swift_ft.storage.store import Store
from swift_ft.torch_core import outputs
from swift_ft.torch_core.outputs import Output

WEIGHT, BIAS = map(outputs.gradient_of, ("weight", "bias"))
Kept = dict[int, OwnStep]


class Replica:
    """One of two that holds a small model; its buckets have a gradient each."""

    def __init__(self) -> None:
        self.averaged: tuple[str, ...] = ("weight", "bias")
        self.takes_first_buffers, self.breaks = False, False
        self.model = nn.Linear(2, 2)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(0.5)

    def tensors(self) -> dict[str, torch.Tensor]:
        return {f"the parameter {name}": parameter for name, parameter in self.model.named_parameters()}

    def variables(self) -> tuple[str, dict[str, int]]:
        return "ff", {"rate": 7}

    def digest(self, given: Any) -> int:
        if self.breaks:
            raise RuntimeError("out of memory")
        return digest_of(given)

    def forward(self, value: float = 1.0) -> None:
        self.model(torch.full((1, 2), value))

    def backward(self, *names: str, value: float = 1.0) -> None:
        """What a backward pass gives to the other replica, and something else that the step gives."""
        for number, name in enumerate(names):
            gradient = torch.full((4,), value)
            outputs.show(Output(f"bucket {number} of gradients", {name: gradient}, (0, 1)))
            gradient.zero_()  # the average comes into the same memory
            outputs.show(Output("allreduce on group 0", {"tensor 0": gradient}, (0, 1)))


@pytest.fixture
def replica() -> Replica:
    return Replica()


@pytest.fixture
def kept() -> Kept:
    return {}


@pytest.fixture
def noting(replica: Replica, kept: Kept) -> Iterator[OwnGradientsPart]:
    """After each third iteration there is a checkpoint."""
    part = OwnGradientsPart(
        replica,
        replica,
        lambda iteration: iteration % 3 == 0,
        lambda: 2,
        kept.__setitem__,
        training=True,
    )
    yield part
    part.close()


def train(
    part: OwnGradientsPart, replica: Replica, iteration: int, given: float = 1.0, gradient: float = 1.0
) -> None:
    part.begin(StepInfo(iteration, 1))
    replica.forward(given)
    replica.backward(WEIGHT, BIAS, value=gradient)
    part.completed(StepInfo(iteration, 1))
    assert not outputs.are_watched()


def test_only_the_step_after_a_checkpoint_is_noted(
    noting: OwnGradientsPart, replica: Replica, kept: Kept
) -> None:
    for iteration in range(5):
        train(noting, replica, iteration, gradient=1.0 + iteration)
    assert [*kept] == [0, 3]
    assert [{*step.gradients} for step in kept.values()] == [{WEIGHT, BIAS}] * 2
    assert kept[0].gradients != kept[3].gradients
    assert (kept[0].begin, kept[0].epoch, kept[0].host) == (kept[3].begin, 2, kept[3].host)
    assert {*kept[0].begin} == {
        "the parameter weight",
        "the parameter bias",
        "the variable rate",
        "what the model is given in forward pass 1",
    }


UNLIKE = {
    "parameter": {"the parameter bias"},
    "batch": {"what the model is given in forward pass 1"},
    "pass": {"what the model is given in forward pass 2"},
    "buffers": {
        "what the model is given in forward pass 2",
        "the first replica's buffers in forward pass 2",
    },
}


@pytest.mark.parametrize("other", UNLIKE)
def test_what_the_gradients_follow_from_is_noted(
    other: str, noting: OwnGradientsPart, replica: Replica, kept: Kept
) -> None:
    train(noting, replica, 0)
    with torch.no_grad():
        replica.model.bias.add_(float(other == "parameter"))
    replica.takes_first_buffers = other == "buffers"
    noting.begin(StepInfo(3, 1))
    if other in ("pass", "buffers"):
        replica.forward()
    replica.forward(2.0 if other == "batch" else 1.0)
    replica.backward(WEIGHT, BIAS)
    unlike = {name for name in kept[3].begin if kept[3].begin.get(name) != kept[0].begin.get(name)}
    assert unlike == UNLIKE[other]


def test_a_step_that_is_repeated_is_noted_as_it_counts(
    noting: OwnGradientsPart, replica: Replica, kept: Kept
) -> None:
    noting.begin(StepInfo(3, 1))
    replica.forward()
    replica.backward(WEIGHT, value=7.0)
    noting.interrupted(Interruption())
    assert not outputs.are_watched()
    train(noting, replica, 3, gradient=2.0)
    train(noting, replica, 6, gradient=2.0)
    assert kept[3] == kept[6]


@pytest.mark.parametrize("names", [(), (BIAS,)])
def test_a_step_without_all_gradients_is_not_noted(
    names: tuple[str, ...], noting: OwnGradientsPart, replica: Replica, kept: Kept
) -> None:
    """Two that have none would be alike."""
    noting.begin(StepInfo(3, 1))
    replica.forward()
    replica.backward(*names)
    assert noting.buckets == len(names)
    assert not noting.is_complete
    noting.completed(StepInfo(3, 1))
    assert kept == {}


def test_nothing_is_listened_to_where_nothing_is_averaged_alone(
    noting: OwnGradientsPart, replica: Replica, kept: Kept
) -> None:
    """Some gradients are sparse: the step is not noted, and costs nothing."""
    replica.averaged, replica.breaks = (), True
    noting.begin(StepInfo(3, 1))
    assert not outputs.are_watched()
    replica.forward()
    replica.backward(WEIGHT, BIAS)
    noting.completed(StepInfo(3, 1))
    assert kept == {}
    replica.averaged, replica.breaks = ("weight", "bias"), False
    train(noting, replica, 6)
    assert [*kept] == [6]


def test_averages_are_not_a_replica_s_own_work(
    noting: OwnGradientsPart, replica: Replica, kept: Kept
) -> None:
    train(noting, replica, 0)
    noting.begin(StepInfo(3, 1))
    replica.forward()
    averages = {"the average of weight": torch.ones(4), "the average of bias": torch.ones(4)}
    outputs.show(Output("bucket 0 of averages", averages, received=True))
    assert (noting.buckets, kept.get(3)) == (0, None)
    replica.backward(WEIGHT, BIAS)
    assert kept[0] == kept[3]


def test_a_step_whose_forward_pass_is_not_seen_is_not_noted(
    noting: OwnGradientsPart, replica: Replica, kept: Kept
) -> None:
    noting.begin(StepInfo(3, 1))
    replica.backward(WEIGHT, BIAS)
    assert kept == {}


def test_only_the_first_average_is_a_replica_s_own_work(
    noting: OwnGradientsPart, replica: Replica, kept: Kept
) -> None:
    """A second one comes after an update by the first, as in a GAN."""
    train(noting, replica, 0)
    noting.begin(StepInfo(3, 1))
    replica.forward()
    replica.backward(WEIGHT, BIAS, value=1.0)
    replica.backward(WEIGHT, BIAS, value=2.0)
    noting.completed(StepInfo(3, 1))
    assert kept[0] == kept[3]


def test_it_hears_beside_others(noting: OwnGradientsPart, replica: Replica, kept: Kept) -> None:
    """A step may be verified as well."""
    heard: list[str] = []
    outputs.listen("verify", lambda output: heard.append(output.place))
    try:
        noting.begin(StepInfo(0, 1))
        replica.forward()
        replica.backward(WEIGHT, BIAS)
    finally:
        outputs.listen("verify", None)
    assert len(heard) == 4
    assert {*kept[0].gradients} == {WEIGHT, BIAS}


def test_an_error_ends_the_notes_and_not_the_training(
    noting: OwnGradientsPart, replica: Replica, kept: Kept, caplog: pytest.LogCaptureFixture
) -> None:
    """In a backward pass it would be taken for a lost connection, again and again."""
    replica.breaks = True
    for iteration in (0, 3, 6):
        train(noting, replica, iteration)
    assert kept == {}
    (line,) = [record.getMessage() for record in caplog.records]
    assert "Spares audit this worker no more" in line
    assert "out of memory" in line


def test_negative_zeros_are_no_difference(noting: OwnGradientsPart, replica: Replica, kept: Kept) -> None:
    """Gradients that are added to zeros have none, and those of a new process are added to nothing."""
    train(noting, replica, 0, gradient=0.0)
    train(noting, replica, 3, gradient=-0.0)
    assert kept[0].gradients == kept[3].gradients


STEP = OwnStep(1, "a processor", "00ff", {"the parameter weight": 3}, {WEIGHT: 4})


def test_notes_are_kept_as_long_as_their_checkpoints() -> None:
    job = SimpleNamespace(state=State(checkpoints=Checkpoints(committed=None)))
    said: list[object] = []
    kept = KeptSteps(job, lambda steps: said.append([*steps]), lambda: said.append("begun"))
    kept.keep(0, STEP)
    kept.keep(3, STEP)
    job.state = State(checkpoints=Checkpoints(committed=3))
    kept.keep(6, STEP)
    assert said == ["begun", [0], [0, 3], [3, 6]]


def test_notes_are_read_back(tmp_path: Path) -> None:
    files = WorkerFiles(Store(tmp_path), "run")
    assert read_own_steps(files, 1) == {}
    write_own_steps(files, 1, {20: STEP})
    assert (read_own_steps(files, 1), read_own_steps(files, 2)) == ({20: STEP}, {})


@pytest.mark.parametrize("damage", ["{", '{"20": {}}'])
def test_damaged_notes_are_none(damage: str, tmp_path: Path) -> None:
    files = WorkerFiles(Store(tmp_path), "run")
    write_own_steps(files, 0, {20: STEP})
    (file,) = tmp_path.rglob("*.gradients.json")
    file.write_text(damage)
    assert read_own_steps(files, 0) == {}
