"""What an interrupted step puts back, and what a completed one does that is undone."""

from __future__ import annotations

import torch

from swift_ft.recovery.rollback import Rollback
from swift_ft.recovery.state import TrainingState


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


def test_forward_again() -> None:
    training = Training()
    training.step(0)
    training.rollback.back()
    training.rollback.forward()
    assert training.seen == (1, 0)  # the counter's state comes from the replica
