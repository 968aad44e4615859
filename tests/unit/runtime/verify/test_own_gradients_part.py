"""A replica notes its own gradients of the step after each checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from swift_ft.checkpoint.own_gradients import OwnGradients, read_own_gradients, write_own_gradients
from swift_ft.runtime.verify.own_gradients_part import OwnGradientsPart
from swift_ft.runtime.worker.part import Interruption, StepInfo
from swift_ft.storage.store import Store
from swift_ft.torch_core import outputs
from swift_ft.torch_core.outputs import Output

WEIGHT = outputs.gradient_of("weight")


@pytest.fixture
def kept() -> list[OwnGradients]:
    return []


@pytest.fixture
def noting(kept: list[OwnGradients]) -> Iterator[OwnGradientsPart]:
    """After each third iteration there is a checkpoint."""
    part = OwnGradientsPart(lambda iteration: iteration % 3 == 0, OwnGradients({"seed": "00"}), kept.append)
    yield part
    part.close()


def contribute(value: float) -> None:
    """What a replica's backward pass gives to the others, and something else that it gives."""
    gradient = torch.full((4,), value)
    outputs.show(Output("bucket 0 of gradients", {WEIGHT: gradient}, (0, 1)))
    gradient.zero_()  # the average comes into the same memory
    outputs.show(Output("allreduce on group 0", {"tensor 0": gradient}, (0, 1)))


def train(part: OwnGradientsPart, iteration: int, value: float) -> None:
    part.begin(StepInfo(iteration, 1))
    contribute(value)
    part.completed(StepInfo(iteration, 1))


def test_only_the_step_after_a_checkpoint_is_noted(
    noting: OwnGradientsPart, kept: list[OwnGradients]
) -> None:
    for iteration in range(5):
        train(noting, iteration, 1.0 + iteration)
        assert not outputs.are_watched()
    assert [[*own.digests] for own in kept] == [[0], [0, 3]]
    assert kept[-1].setup == {"seed": "00"}
    assert [[*of] for of in kept[-1].digests.values()] == [[WEIGHT]] * 2
    first, second = (of[WEIGHT] for of in kept[-1].digests.values())
    assert first != second


def test_a_step_that_is_repeated_is_noted_as_it_counts(
    noting: OwnGradientsPart, kept: list[OwnGradients]
) -> None:
    noting.begin(StepInfo(3, 1))
    contribute(7.0)
    noting.interrupted(Interruption())
    assert not outputs.are_watched()
    train(noting, 3, 2.0)
    train(noting, 6, 2.0)
    (once, again) = kept[-1].digests.values()
    assert once == again
    assert len(kept) == 2


def test_only_the_first_average_is_a_replica_s_own_work(
    noting: OwnGradientsPart, kept: list[OwnGradients]
) -> None:
    """A second one comes after an update by the first, as in a GAN."""
    train(noting, 0, 1.0)
    noting.begin(StepInfo(3, 1))
    contribute(1.0)
    contribute(2.0)
    noting.completed(StepInfo(3, 1))
    (once, first) = kept[-1].digests.values()
    assert once == first


def test_it_hears_beside_others(noting: OwnGradientsPart, kept: list[OwnGradients]) -> None:
    """A step may be verified as well."""
    heard: list[str] = []
    outputs.listen("verify", lambda output: heard.append(output.place))
    try:
        train(noting, 0, 1.0)
    finally:
        outputs.listen("verify", None)
    assert len(heard) == 2
    assert [*kept[0].digests[0]] == [WEIGHT]


def test_the_newest_are_read_back(tmp_path: Path) -> None:
    store, own = Store(tmp_path), OwnGradients({"key": "ff"})
    for iteration in range(0, 70, 10):
        own = own.with_step(iteration, {WEIGHT: iteration})
    write_own_gradients(store, "run", 1, own)
    (read,) = read_own_gradients(store, "run", 2).values()
    assert read == OwnGradients({"key": "ff"}, {step: {WEIGHT: step} for step in (30, 40, 50, 60)})


@pytest.mark.parametrize("damage", ["{", '{"setup": {}, "digests": {}}'])
def test_a_damaged_file_is_none(damage: str, tmp_path: Path) -> None:
    write_own_gradients(Store(tmp_path), "run", 0, OwnGradients())
    (file,) = tmp_path.rglob("*.gradients.json")
    file.write_text(damage)
    assert read_own_gradients(Store(tmp_path), "run", 1) == {}
