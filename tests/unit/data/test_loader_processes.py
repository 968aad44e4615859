"""Processes that load batches are forks: what the script changes in a data set later has to reach them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

from swift_ft.data import GlobalBatches, IndexedBatches, LoaderBatches
from swift_ft.data.forked_variables import ForkedVariables
from swift_ft.data.script_variables import objects_from


class Scale:
    """What a data set has for a transform."""

    def __init__(self) -> None:
        self.factor = 1.0

    def __call__(self, value: float) -> float:
        return value * self.factor


class Levels(Dataset[float]):
    bias = 0.0

    def __init__(self) -> None:
        self.level = 1.0
        self.scale = Scale()
        self.options = {"levels": [1.0, 1.0]}
        self.table = np.ones(2)
        self.tensor = torch.ones(2)
        self.samples: Any = list(range(5000))
        self.loaded = 0
        self.told: list[Any] = []

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> float:
        self.loaded += 1
        factor = self.level * self.options["levels"][0] * float(self.table[0]) * float(self.tensor[0])
        return self.scale(self.samples[index] * factor) + type(self).bias


class Told(Levels):
    """It is told which samples come next, in the process that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.shard_sizes = [6] * 4

    def prefetch(self, shards: Any) -> None:
        self.told = [*self.told, *shards]


def set_level(dataset: Levels) -> None:
    dataset.level = 2.0


def set_factor(dataset: Levels) -> None:
    dataset.scale.factor = 2.0


def set_option(dataset: Levels) -> None:
    dataset.options["levels"][0] = 2.0


def set_table(dataset: Levels) -> None:
    dataset.table[0] = 2.0


def set_tensor(dataset: Levels) -> None:
    dataset.tensor.fill_(2.0)


def set_bias(dataset: Levels) -> None:
    type(dataset).bias = 2.0


def set_new(dataset: Levels) -> None:
    """An object's own variable, where there was that of its class."""
    dataset.bias, type(dataset).bias = 1.0, 2.0


CHANGES: dict[str, Callable[[Levels], None]] = {
    "a variable": set_level,
    "one of a transform": set_factor,
    "an element": set_option,
    "an array": set_table,
    "a tensor": set_tensor,
    "one of the class": set_bias,
    "a new one": set_new,
}


@pytest.fixture(autouse=True)
def the_class() -> Iterator[None]:
    yield
    Levels.bias = Told.bias = 0.0


def indexed(dataset: Levels, num_workers: int) -> Any:
    return IndexedBatches(ConcatDataset([Subset(dataset, range(24))]), 4, num_workers=num_workers)


def in_all(dataset: Levels, num_workers: int) -> Any:
    return GlobalBatches(dataset, 4, replicas=1, num_workers=num_workers)


def collated(dataset: Levels, num_workers: int) -> Any:
    """The function for batches has the transform."""
    scale = dataset.scale
    dataset.scale = Scale()

    class Batch:
        def __init__(self) -> None:
            self.inner = scale

        def __call__(self, samples: list[float]) -> Any:
            return torch.tensor([self.inner(one) for one in samples])

    return IndexedBatches(dataset, 4, num_workers=num_workers, collate_fn=Batch())


@pytest.mark.parametrize("make", [indexed, in_all])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_counts_from_the_next_batch_on(make: Any, change: Any, caplog: Any) -> None:
    """As without processes, and so whatever comes between: a repeated batch, and a replacement's first."""
    found = {}
    for num_workers in (0, 1):
        Levels.bias = 0.0
        dataset = Levels()
        batches = make(dataset, num_workers)
        before = [batches[index].tolist() for index in (0, 1, 2)]
        change(dataset)
        after = [batches[index].tolist() for index in (2, 3, 3, 4, 1)]
        found[num_workers] = before, after
        assert before[2] != after[0]
        batches.close()
    assert found[1] == found[0]
    replacement = make(dataset, 1)
    assert replacement[3].tolist() == found[0][1][1]
    replacement.close()
    (line,) = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    assert "they begin again with it" in line


def test_a_change_in_a_function_for_batches() -> None:
    found = []
    for num_workers in (0, 1):
        dataset = Levels()
        scale = dataset.scale
        batches = collated(dataset, num_workers)
        first = batches[0].tolist()
        scale.factor = 3.0
        found.append([first, batches[1].tolist(), batches[1].tolist()])
        batches.close()
    assert found[0] == found[1]


@pytest.mark.parametrize("place", [lambda one: partial(print, one), lambda one: (1, (one,)), lambda one: ()])
def test_tuples_and_partial_functions_are_looked_into(place: Any) -> None:
    dataset = Levels()
    found = [*objects_from(place(dataset))]
    assert [one for one in found if one is dataset] == [dataset] * (place(dataset) != ())


def same_again(dataset: Levels) -> None:
    dataset.level = float("1.0")  # another object
    dataset.options["levels"][0] = float("1.0")


def nothing(_: Levels) -> None:
    pass


@pytest.mark.parametrize("set_again", [nothing, same_again])
@pytest.mark.parametrize("kind", [Levels, Told])
def test_processes_go_on_where_the_script_changes_nothing(kind: Any, set_again: Any, caplog: Any) -> None:
    """Neither what the data set counts as it gives samples, nor what it notes of those that come next."""
    dataset = kind()
    batches = GlobalBatches(dataset, 4, replicas=1, num_workers=1)
    batches[0]
    ahead = batches._source._ahead
    for index in (0, 1, 2, 2, 3, 4, 5):
        batches[index]
        set_again(dataset)
    assert batches._source._ahead is ahead
    assert dataset.loaded > 0  # of repeated ones, here
    assert (len(dataset.told) > 0) == (kind is Told)
    assert not caplog.records
    batches.close()


def loader_over(dataset: Levels) -> LoaderBatches:
    return LoaderBatches(DataLoader(ConcatDataset([dataset]), 4, num_workers=1))


def handed_over(batches: LoaderBatches, to: LoaderBatches) -> None:
    """As a session does it with the variables of all objects."""
    vars(to._options).update(vars(batches._options))


def test_a_loader_whose_data_set_changes_in_the_middle_of_an_epoch(caplog: Any) -> None:
    """Its processes get it with the next epoch, as they do without us, and so do those of a replacement."""
    dataset, made = Levels(), Levels()
    dataset.place = made.place = "here"  # type: ignore[attr-defined]
    batches = loader_over(dataset)
    found = [batches[index].tolist() for index in (0, 1)]
    dataset.level, dataset.scale.factor = 2.0, 3.0
    found += [batches[index].tolist() for index in (2, 3)]
    assert found[2] == [8.0, 9.0, 10.0, 11.0]
    made.place = "there"  # type: ignore[attr-defined]
    replacement = loader_over(made)
    made.level, made.scale.factor = 2.0, 3.0
    handed_over(batches, replacement)
    assert [replacement[index].tolist() for index in (3, 2)] == [found[3], found[2]]
    assert (made.level, made.scale.factor, made.place) == (2.0, 3.0, "there")  # type: ignore[attr-defined]
    for one in (batches, replacement):
        one[4], one[5]
        assert one[6].tolist() == [0.0, 6.0, 12.0, 18.0]
    dataset.level = made.level = 1.0
    expected = batches[8].tolist()
    again = Levels()
    last = loader_over(again)
    again.level, again.scale.factor = 1.0, 3.0
    handed_over(batches, last)
    assert last[8].tolist() == expected == [48.0, 54.0, 60.0, 66.0]
    assert vars(last._options) == vars(batches._options)
    assert not caplog.records


def test_the_step_in_which_an_epoch_began_is_put_back() -> None:
    """Its batch is there still, and the values that the epoch has begun with are noted again."""
    dataset = Levels()
    batches = loader_over(dataset)
    dataset.level = 2.0
    batches[0]
    noted = dict(vars(batches._options))
    assert noted["epoch"] == 0
    vars(batches._options).clear()
    dataset.level = 1.0
    assert batches[0].tolist() == [0.0, 2.0, 4.0, 6.0]
    assert vars(batches._options) == noted


@pytest.mark.parametrize("change", [set_table, set_tensor, set_option, set_new])
def test_what_is_not_kept_with_an_epoch_of_a_loader(change: Any, caplog: Any) -> None:
    """It is said once."""
    dataset = Levels()
    batches = loader_over(dataset)
    batches[0]
    for index in (1, 2, 3):
        change(dataset)
        assert batches[index].tolist() == [4.0 * index + number for number in range(4)]
    assert [one.event for one in caplog.records] == ["changed_within_epoch"]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_loader_whose_data_set_changes_between_epochs(num_workers: int, caplog: Any) -> None:
    dataset = Levels()
    batches = LoaderBatches(DataLoader(dataset, 4, num_workers=num_workers))
    for index in range(6):
        batches[index]
    dataset.level = 2.0
    assert batches[6].tolist() == [0.0, 2.0, 4.0, 6.0]
    batches[7]
    assert not caplog.records


def test_how_much_is_looked_into() -> None:
    dataset = Levels()
    dataset.samples = [[0.0] * 1000 for _ in range(1000)]
    variables = ForkedVariables(dataset)
    dataset.samples[900][0] = 1.0
    assert not variables.changed()
    dataset.samples[900].append(1.0)
    assert variables.changed() == ["Levels.samples"]
    variables.note()
    dataset.samples[3][0] = 1.0
    assert variables.changed() == ["Levels.samples"]


def test_how_many_bytes_are_read_for_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small data set in memory is read by its processes, and not once more here for each batch."""
    dataset = Levels()
    dataset.samples = [{"x": np.zeros(100_000, np.uint8)} for _ in range(1000)]
    variables = ForkedVariables(dataset)
    read: list[int] = []

    def fingerprint_of(array: np.ndarray) -> int:
        read.append(array.nbytes)
        return 0

    monkeypatch.setattr("swift_ft.data.forked_variables.fingerprint_of", fingerprint_of)
    variables.changed()
    assert 1 < sum(read) <= 2**22
    monkeypatch.undo()
    variables.note()
    dataset.samples[3]["x"][7] = 1
    dataset.samples[999]["x"] = np.ones(1, np.uint8)
    assert variables.changed() == ["Levels.samples"]
