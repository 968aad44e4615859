"""Habits that are planted into scripts: the same for the same seed; each changes what a script computes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from swift_ft.testing.chaos.habits import Habit, random_habits
from swift_ft.testing.chaos.planted import planted

ITERATIONS = 4


class Block:
    """A step that records how its block ended."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.error: BaseException | None = None

    def __enter__(self) -> Block:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.error = error


class Loop:
    """A session without any machine."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state
        self.iteration = 0
        self.blocks: list[Block] = []

    def steps(self, iterations: int) -> Iterator[Block]:
        while self.iteration < iterations:
            self.blocks.append(Block(self.iteration))
            yield self.blocks[-1]
            self.iteration += 1


def trained(*habits: Habit) -> list[float]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = planted(Loop, habits)({"model": model, "optimizer": optimizer})
    for step in session.steps(ITERATIONS):
        with step:
            optimizer.zero_grad()
            model(torch.ones(2, 3) * (step.index + 1)).square().sum().backward()
            optimizer.zero_grad()
            model(torch.ones(2, 3)).square().sum().backward()
            optimizer.step()
    assert [block.index for block in session.blocks] == list(range(ITERATIONS))
    return [value for tensor in model.state_dict().values() for value in tensor.flatten().tolist()]


def test_a_seed_is_a_choice() -> None:
    choices = [random_habits(seed) for seed in range(200)]
    assert choices == [random_habits(seed) for seed in range(200)]
    assert {habit for choice in choices for habit in choice} == set(Habit)
    assert {len(choice) for choice in choices} == {1, 2}


@pytest.mark.parametrize("habit", [habit for habit in Habit if habit != Habit.SWALLOW])
def test_a_habit_changes_the_result_and_is_repeatable(habit: Habit) -> None:
    assert trained(habit) == trained(habit)
    assert trained(habit) != trained()


def test_an_error_is_swallowed_by_that_habit_alone() -> None:
    error = ValueError("of the script")

    def fail(*habits: Habit) -> Block:
        session = planted(Loop, habits)({})
        for step in session.steps(1):
            with step:
                raise error
        block: Block = session.blocks[0]
        return block

    assert fail(Habit.SWALLOW).error is None
    with pytest.raises(ValueError, match="of the script"):
        fail()
