"""Batches in Lightning's order: what samplers draw at random, and any of them again in another process."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from tests.support.integrations import needs

pytestmark = [needs("lightning"), pytest.mark.filterwarnings("ignore")]  # Lightning's own, of its host
if importlib.util.find_spec("lightning") is not None:
    from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
    from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
    from lightning.pytorch.utilities.combined_loader import CombinedLoader

    from swift_ft.integrations.lightning.batches import RepeatableFetcher

SAMPLES = 40


class Numbers(Dataset[torch.Tensor]):
    """Each with a number drawn at random, as an augmentation is."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.stack([torch.tensor(float(index)), torch.rand(())])


class Shuffled(Sampler[int]):
    """Draws from Python's own generator."""

    def __init__(self, count: int = SAMPLES) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return iter(random.sample(range(self.count), self.count))

    def __len__(self) -> int:
        return self.count


class ShuffledShare(DistributedSampler[Any]):
    """A script's own, which Lightning leaves alone: draws as all ranks must."""

    def __iter__(self) -> Iterator[int]:
        return iter(random.sample(range(SAMPLES), SAMPLES)[self.rank :: 2])


class Buckets(BatchSampler):
    """Draws batches, not samples."""

    def __iter__(self) -> Iterator[list[int]]:
        batches = [*super().__iter__()]
        return iter([batches[place] for place in torch.randperm(len(batches))])


def fetcher(*loaders: Any, rank: int = 0, epoch: Callable[[], int] = lambda: 0) -> Any:
    combined = CombinedLoader([*loaders], "max_size_cycle")
    combined.limits = [float("inf")] * len(loaders)
    inner = _PrefetchDataFetcher()
    inner.setup(combined)
    iter(inner)
    return RepeatableFetcher(inner, 1, rank, epoch)


def divided(sampler: Any, rank: int, **options: Any) -> DataLoader[Any]:
    """As Lightning prepares a loader with a sampler of the script's."""
    share = DistributedSamplerWrapper(sampler, num_replicas=2, rank=rank, shuffle=True)
    return DataLoader(Numbers(), batch_size=4, sampler=share, **options)


def read(of: Any) -> list[list[torch.Tensor]]:
    """All batches of the next pass."""
    iter(of)
    return [next(of)[0] for _ in range(of.length)]


def numbers(batches: list[list[torch.Tensor]], loader: int = 0) -> list[int]:
    return [int(number) for batch in batches for number in batch[loader][:, 0]]


def all_of(orders: list[list[int]]) -> list[int]:
    return [number for order in orders for number in order]


SAMPLERS: dict[str, Callable[[], Any]] = {
    "a subset": lambda: SubsetRandomSampler(range(SAMPLES)),
    "weights": lambda: WeightedRandomSampler([1.0] * SAMPLES, SAMPLES, replacement=False),
    "a generator of its own": lambda: SubsetRandomSampler(range(SAMPLES), torch.Generator()),
    "Python's generator": Shuffled,
}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", SAMPLERS)
def test_all_workers_draw_one_order_and_share_it(kind: str, workers: int) -> None:
    ranks = [fetcher(divided(SAMPLERS[kind](), rank, num_workers=workers), rank=rank) for rank in range(2)]
    orders = []
    for _ in range(2):
        orders.append([numbers(read(of)) for of in ranks])
        assert sorted(all_of(orders[-1])) == [*range(SAMPLES)]
    assert orders[0] != orders[1]
    replacement = fetcher(divided(SAMPLERS[kind](), 1, num_workers=workers), rank=1)
    replacement.go_to(ranks[1].place() | {"passes": 1})
    assert numbers(read(replacement)) == orders[1][1]


def test_a_samplers_own_share_is_of_one_order() -> None:
    orders = [
        numbers(read(fetcher(DataLoader(Numbers(), 4, sampler=ShuffledShare(Numbers(), 2, rank)), rank=rank)))
        for rank in range(2)
    ]
    assert sorted(all_of(orders)) == [*range(SAMPLES)]


@pytest.mark.parametrize("kind", ["shuffle", "batches"])
def test_the_script_decides_where_lightning_does_not_divide(kind: str) -> None:
    """Workers that have given torch other seeds read other batches, and those with the same seed the same."""

    def order(script_seed: int, rank: int) -> list[int]:
        torch.manual_seed(script_seed)
        options: dict[str, Any] = {"batch_size": 4, "shuffle": True}
        if kind == "batches":
            options = {"batch_sampler": Buckets(RandomSampler(Numbers()), 4, drop_last=False)}
        of = fetcher(DataLoader(Numbers(), **options), rank=rank)
        torch.manual_seed(99)  # as a step does
        return numbers(read(of))

    assert order(5, 0) == order(5, 1)
    assert order(5, 0) != order(6, 1)


def test_a_replacement_has_the_order_of_the_one_that_was_lost() -> None:
    """The script's own seed may be another one each time."""
    torch.manual_seed(5)
    lost = fetcher(DataLoader(Numbers(), 4, shuffle=True))
    expected = numbers(read(lost))
    torch.manual_seed(6)
    replacement = fetcher(DataLoader(Numbers(), 4, shuffle=True))
    iter(replacement)
    replacement.go_to(lost.place() | {"index": 0})
    assert numbers([next(replacement)[0] for _ in range(replacement.length)]) == expected


def test_loaders_of_equal_length_have_orders_of_their_own() -> None:
    of = fetcher(DataLoader(Numbers(), 4, shuffle=True), DataLoader(Numbers(), 4, shuffle=True))
    batches = read(of)
    assert numbers(batches, 0) != numbers(batches, 1)


def test_a_shorter_loader_begins_again_in_another_order() -> None:
    shorter = Shuffled(SAMPLES // 2)
    both = fetcher(DataLoader(Numbers(), 4, shuffle=True), DataLoader(Numbers(), 4, sampler=shorter))
    drawn = numbers(read(both), 1)
    assert sorted(drawn[: SAMPLES // 2]) == sorted(drawn[SAMPLES // 2 :]) == [*range(SAMPLES // 2)]
    assert drawn[: SAMPLES // 2] != drawn[SAMPLES // 2 :]


class Told(IterableDataset[torch.Tensor]):
    """Its samples depend on the epoch that it was told."""

    def __init__(self) -> None:
        self.epoch = 0
        self.calls: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.calls.append(epoch)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.tensor([[100.0 * self.epoch + index, 0.0] for index in range(8)]))

    def __len__(self) -> int:
        return 8


def test_only_the_script_tells_a_data_set_its_epoch() -> None:
    told, replaced = Told(), Told()
    of = fetcher(DataLoader(told, batch_size=4), epoch=lambda: 3)
    read(of)
    assert told.calls == []
    told.set_epoch(2)  # in on_train_epoch_start()
    expected = numbers(read(of))
    replacement = fetcher(DataLoader(replaced, batch_size=4), epoch=lambda: 3)
    iter(replacement)
    replacement.go_to(of.place() | {"index": 0})
    assert replaced.calls == [2]
    assert numbers([next(replacement)[0] for _ in range(2)]) == expected


class Epochs(SubsetRandomSampler):
    """Is told of its epoch, as by Lightning."""

    epochs: tuple[int, ...] = ()

    def set_epoch(self, epoch: int) -> None:
        self.epochs += (epoch,)


def test_samplers_are_told_the_epoch() -> None:
    sampler = Epochs(range(SAMPLES))
    read(fetcher(divided(sampler, 0), epoch=lambda: 3))
    assert sampler.epochs == (3,)


def test_workers_that_live_on_draw_as_those_of_a_replacement() -> None:
    """With persistent_workers=True, too, what the data set draws depends on the pass."""

    def loader() -> DataLoader[Any]:
        return DataLoader(Numbers(), 4, num_workers=1, persistent_workers=True)

    of, replacement = fetcher(loader()), fetcher(loader())
    first, second = read(of), read(of)
    replacement.go_to(of.place() | {"passes": 1})
    again = read(replacement)
    assert all(one[0].equal(other[0]) for one, other in zip(second, again, strict=True))
    assert not any(one[0].equal(other[0]) for one, other in zip(first, second, strict=True))
