"""Batches by step from a loader that is read in order: repeated, after a jump, from a state, at the end."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch

from swift_ft.integrations.torchtitan_batches import StepBatches


class Loader:
    """As torchtitan's: its position is its own, whoever iterates, and so is what it has read ahead."""

    def __init__(self, length: int = 1000) -> None:
        self.place, self.length, self.read = 0, length, 0

    def __iter__(self) -> Iterator[Any]:
        while self.place < self.length:
            self.place += 1
            self.read += 1
            yield {"input": torch.tensor(self.place)}, torch.tensor(-self.place)

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def numbers(batches: list[Any]) -> list[int]:
    return [int(inputs["input"]) for inputs, _ in batches]


def test_each_step_has_its_own() -> None:
    batches = StepBatches(Loader(), 3, 0)
    assert [numbers(batches[step]) for step in range(3)] == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]


def test_a_repeated_step_has_the_same_and_nothing_is_read_for_it() -> None:
    loader = Loader()
    batches = StepBatches(loader, 2, 0)
    first = batches[0]
    first[0][0]["input"] = torch.tensor(99)  # a step moves its tensors to a device
    assert numbers(batches[1]) == [3, 4]
    assert [numbers(batches[step]) for step in (1, 0, 1)] == [[3, 4], [1, 2], [3, 4]]
    assert loader.read == 4


def test_steps_before_and_after_a_jump() -> None:
    batches = StepBatches(Loader(), 2, 0)
    for step in range(5):
        assert batches[step]
    assert numbers(batches[1]) == [3, 4]
    assert numbers(batches[7]) == [15, 16]


def test_from_the_state_of_the_same_reader_nothing_is_read_again() -> None:
    batches = StepBatches(Loader(), 2, 1)
    for step in range(5):
        assert batches[step]
    state = copy.deepcopy(batches.state_dict())
    loader = Loader()
    other = StepBatches(loader, 2, 1)
    other.load_state_dict(state)
    assert loader.state_dict() == {"place": 10}  # where torchtitan's own checkpoint would have it
    assert numbers(other[5]) == [11, 12]
    assert loader.read == 2


def test_the_state_of_another_reader_says_how_far_to_read() -> None:
    batches = StepBatches(Loader(), 2, 0)
    assert batches[0]
    loader = Loader()
    other = StepBatches(loader, 2, 1)
    other.load_state_dict(batches.state_dict())
    assert loader.state_dict() == {"place": 2}
    assert numbers(other[1]) == [3, 4]


def test_a_state_of_now_or_of_the_last_step_changes_nothing() -> None:
    """After a loss the small state is put back, and the interrupted step's batches are still there."""
    loader = Loader()
    batches = StepBatches(loader, 2, 0)
    before = batches.state_dict()
    assert numbers(batches[0]) == [1, 2]
    batches.load_state_dict(before)
    assert numbers(batches[0]) == [1, 2]
    assert loader.read == 2


def test_where_the_data_ends() -> None:
    batches = StepBatches(Loader(3), 2, 0)
    assert [numbers(batches[step]) for step in range(3)] == [[1, 2], [3], []]
