"""What a loader counts in objects of the script from one epoch to the next, in a replacement."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    WeightedRandomSampler,
)

from swift_ft.checkpoint.step.counted import counted_in
from swift_ft.checkpoint.step.places import Saved
from swift_ft.checkpoint.step.rollback import Rollback
from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.data import LoaderBatches

LENGTH = 3
SAMPLES = 2 * LENGTH


class Samples(Dataset[Tensor]):
    """Its own draws, a cache, and how often each was taken."""

    def __init__(self) -> None:
        self.drawn = random.Random(3)
        self.cache: dict[int, float] = {}
        self.taken: Counter[int] = Counter()
        self.level, self.marks = 1.0, list[int]()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        self.taken[index] += 1
        if index not in self.cache:
            self.cache[index] = torch.rand(()).item()
        return torch.tensor([self.drawn.random(), self.cache[index], self.taken[index], self.level])


class InTurn(Sampler[int]):
    def __init__(self) -> None:
        self.drawn = random.Random(4)

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        yield from self.drawn.sample(range(SAMPLES), SAMPLES)


class Masks:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, samples: list[Tensor]) -> Tensor:
        self.calls += 1
        return torch.cat([torch.stack(samples).flatten(), torch.tensor([float(self.calls)])])


class Stream(IterableDataset[int]):
    """It ends each epoch behind its last sample."""

    def __init__(self) -> None:
        self.epochs = self.place = 0

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        while self.place < SAMPLES:
            self.place += 1
            yield 100 * self.epochs + self.place
        self.place = 0
        self.epochs += 1


class Worker:
    """One whose model leads to the batches, as a variable of its script may."""

    def __init__(self, stream: bool = False) -> None:
        model: Any = nn.Linear(1, 1)
        self.data: Any = Stream() if stream else Samples()
        self.masks = Masks()
        options: dict[str, Any] = {} if stream else {"sampler": InTurn(), "collate_fn": self.masks}
        self.batches = model.batches = LoaderBatches(DataLoader(self.data, 2, **options))
        self.rollback = Rollback(TrainingState({"model": model}))
        self.rollback.watch()

    def step(self, index: int) -> list[float]:
        self.rollback.begin(index)
        batch: list[float] = self.batches[index].tolist()
        self.rollback.completed()
        return batch

    def train(self, steps: range) -> list[list[float]]:
        return [self.step(index) for index in steps]

    @property
    def saved(self) -> Saved:
        state = self.rollback.carried
        return state.unpacked(state.packed(state.to_save(), 2**20))

    def take_over(self, saved: Saved) -> None:
        self.rollback.carried.take_over(saved)


@pytest.fixture
def workers() -> Iterator[Any]:
    """Makes workers."""
    made: list[Worker] = []

    def make(*, stream: bool = False) -> Worker:
        made.append(Worker(stream))
        return made[-1]

    yield make
    for one in made:
        one.rollback.close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("at", [1, 2, 3, 4, 5, 6, 8])
def test_a_replacement(at: int, stream: bool, workers: Any) -> None:
    """It is given what there was as the epoch began, and reads the epoch from there."""
    lost, new = workers(stream=stream), workers(stream=stream)
    lost.train(range(at))
    new.take_over(lost.saved)
    assert new.train(range(at, 9)) == lost.train(range(at, 9))
    if not stream:
        assert new.masks.calls == lost.masks.calls == 9


@pytest.mark.parametrize("at", [3, 4, 5, 6])
def test_a_step_that_is_put_back(at: int, workers: Any) -> None:
    """It may have taken an epoch's first batch, or its last one."""
    survivor, new = workers(), workers()
    survivor.train(range(at))
    survivor.rollback.begin(at)
    expected = survivor.batches[at].tolist()
    survivor.rollback.back()
    new.take_over(survivor.saved)
    assert new.step(at) == survivor.step(at) == expected
    assert new.saved == survivor.saved
    assert new.train(range(at + 1, 9)) == survivor.train(range(at + 1, 9))


def test_a_survivor_that_has_the_same_beginning_reads_nothing_again(workers: Any) -> None:
    lost, survivor = workers(), workers()
    lost.train(range(5))
    survivor.train(range(5))
    survivor.take_over(lost.saved)
    assert survivor.masks.calls == 5
    assert survivor.train(range(5, 8)) == lost.train(range(5, 8))
    assert survivor.masks.calls == 8


@pytest.mark.parametrize("back_to", [1, 2, 3, 4, 6])
def test_a_survivor_that_goes_back(back_to: int, workers: Any) -> None:
    """To a checkpoint of an earlier epoch, or of this one."""
    worker = workers()
    expected = worker.train(range(back_to))
    saved = worker.saved
    expected += worker.train(range(back_to, 9))
    worker.take_over(saved)
    assert worker.train(range(back_to, 9)) == expected[back_to:]


def test_between_two_epochs_the_script_sets_what_is_counted(workers: Any) -> None:
    """A replacement is given it before the script's own lines run there."""
    lost, new = workers(), workers()
    lost.train(range(3))
    new.take_over(lost.saved)
    for one in (lost, new):
        one.masks.calls = 7
    assert new.train(range(3, 9)) == lost.train(range(3, 9))
    assert lost.masks.calls == 7 + 6


def test_what_begins_to_count_in_the_middle_of_an_epoch(workers: Any) -> None:
    """The script has set it before, and it is handed over as it was when the epoch began."""
    lost = workers()
    get = Samples.__getitem__

    def late(data: Samples, index: int) -> Tensor:
        data.level += 1
        data.marks.append(index)
        return get(data, index)

    lost.data.level = 3.0
    lost.data.marks.append(7)
    lost.train(range(1, 4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Samples, "__getitem__", late)
        lost.step(4)
    assert counted_in(lost.data) >= {"level", "marks"}
    assert [(one["level"], one["marks"]) for one in lost.saved.values() if "level" in one] == [(3.0, [7])]
    assert (lost.data.level, lost.data.marks) == (5.0, [7, *lost.data.marks[1:]])
    assert len(lost.data.marks) == 3


class Heavy(Samples):
    """Its cache has too many tensors to travel."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []

    def __getitem__(self, index: int) -> Tensor:
        self.kept += [torch.zeros(1) for _ in range(500)]
        return super().__getitem__(index)


def test_what_cannot_be_handed_over_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """As soon as an epoch begins with it."""
    batches = LoaderBatches(DataLoader(Heavy(), 2))
    for index in range(LENGTH):
        batches[index]
    assert not caplog.records
    for index in range(LENGTH, 3 * LENGTH):
        batches[index]
    assert [one.event for one in caplog.records] == ["counted_not_handed_over"]  # type: ignore[attr-defined]
    assert "Heavy.kept (a list of 3,000 elements)" in caplog.text


class Weighted(InTurn):
    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.ones(SAMPLES)


class Plain(Dataset[int]):
    """It counts nothing."""

    level = 1

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        return index * self.level


def add_to(sampler: Any) -> None:
    sampler.weights += 1


def set_anew(sampler: Any) -> None:
    sampler.weights = sampler.weights + 1


@pytest.mark.parametrize("change", [add_to, set_anew])
@pytest.mark.parametrize("of_torch", [False, True])
@pytest.mark.parametrize("within", [False, True])
def test_weights_of_a_sampler(change: Any, of_torch: bool, within: bool, caplog: Any) -> None:
    """Named if they change within an epoch, as it goes on."""
    sampler = WeightedRandomSampler([1.0] * SAMPLES, SAMPLES) if of_torch else Weighted()
    batches = LoaderBatches(DataLoader(Plain(), 2, sampler=sampler))
    for index in range(3 * LENGTH):
        if index % LENGTH == within:
            change(sampler)
        batches[index]
    assert [one.event for one in caplog.records] == (["changed_within_epoch"] if within else [])
    if within:
        assert f"{type(sampler).__name__}.weights changed in the middle" in caplog.text


@pytest.mark.parametrize("data", [Plain, Samples])
def test_a_level_of_a_data_set(data: Any, caplog: Any) -> None:
    """Named if the data set counts: what it draws may depend on the level, also through its sampler."""
    dataset = data()
    sampler: Any = DistributedSampler(dataset, num_replicas=1, rank=0)
    batches = LoaderBatches(DataLoader(dataset, 2, sampler=sampler))
    for index in range(2 * LENGTH):
        batches[index]
        dataset.level = index
    events = [one.event for one in caplog.records]
    assert events == (["changed_within_epoch"] if data is Samples else [])
    assert ("Samples.level changed" in caplog.text) == (data is Samples)
