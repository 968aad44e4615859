"""Batches by index are those of DistributedSampler and DataLoader, whatever is asked for before."""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)

from swift_ft.checkpoint.step.counted import counted_in
from swift_ft.data import IndexedBatches, LoaderBatches
from swift_ft.errors import UsageError

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata's


class Squares(Dataset[Any]):
    """23 samples, which count how often they are loaded in this process."""

    def __init__(self) -> None:
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.loaded.append(index)
        return {"x": torch.tensor([index, index**2]), "name": f"sample {index}"}


class Noise(Squares):
    """Samples with random noise."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        noise = [torch.rand(()), random.random(), np.random.default_rng(np.random.randint(100)).random()]
        return {"x": torch.tensor([index, *noise]), "name": str(index)}


def same(one: Any, other: Any) -> bool:
    return torch.equal(one["x"], other["x"]) and one["name"] == other["name"]


def ordinary(epochs: int, batch_size: int, *, drop_last: bool, **sampling: Any) -> list[Any]:
    """What a script without us gets, epoch after epoch."""
    sampler: Any = DistributedSampler(Squares(), drop_last=drop_last, **sampling)
    found = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        found += list(DataLoader(Squares(), batch_size, sampler=sampler, drop_last=drop_last))
    return found


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("num_replicas", "rank"), [(1, 0), (3, 2)])
def test_the_order_of_three_epochs(num_workers: int, drop_last: bool, num_replicas: int, rank: int) -> None:
    sampling: dict[str, Any] = {"num_replicas": num_replicas, "rank": rank, "shuffle": True, "seed": 5}
    expected = ordinary(3, 4, drop_last=drop_last, **sampling)
    batches = IndexedBatches(Squares(), 4, drop_last=drop_last, num_workers=num_workers, **sampling)
    assert batches.batches_per_epoch * 3 == len(expected)
    assert all(same(batches[index], batch) for index, batch in enumerate(expected))
    batches.close()


def test_without_shuffling() -> None:
    expected = ordinary(2, 5, drop_last=False, num_replicas=2, rank=1, shuffle=False)
    batches = IndexedBatches(Squares(), 5, num_replicas=2, rank=1)
    assert all(same(batches[index], batch) for index, batch in enumerate(expected))


JUMPS = [0, 1, 2, 2, 3, 1, 2, 3, 9, 10, 9, 0, 17, 18, 11]
"""Repeated, back by more than one, to another epoch and back."""


@pytest.mark.parametrize("num_workers", [0, 2])
def test_jumps(num_workers: int) -> None:
    straight = IndexedBatches(Noise(), 4, shuffle=True, seed=1)
    expected = {index: straight[index] for index in range(max(JUMPS) + 1)}
    batches = IndexedBatches(Noise(), 4, shuffle=True, seed=1, num_workers=num_workers)
    for index in JUMPS:
        assert same(batches[index], expected[index]), index
    batches.close()


def test_a_jump_loads_nothing_else() -> None:
    dataset = Squares()
    batches = IndexedBatches(dataset, 4, shuffle=True)
    for index in (1000, 999, 0):
        dataset.loaded.clear()
        assert len(batches[index]["name"]) == len(dataset.loaded) == 4


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_random_numbers_of_the_training_stay(num_workers: int) -> None:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    batches = IndexedBatches(Noise(), 4, shuffle=True, num_workers=num_workers)
    first = batches[0]
    drawn = [torch.rand(1).item(), random.random(), np.random.random()]
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    assert drawn == [torch.rand(1).item(), random.random(), np.random.random()]
    assert not same(first, batches[len(first)])
    assert same(first, batches[0])
    batches.close()


def test_replicas_draw_different_noise() -> None:
    sampler = list(range(4))
    one, other = (IndexedBatches(Noise(), 4, sampler=sampler, rank=rank) for rank in (0, 1))  # type: ignore[arg-type]
    assert not same(one[0], other[0])


# ------------------------------------------------------------------------------- samplers that draw at random


class ByHand(Sampler[int]):
    """Draws from a global generator, or from one of its own."""

    def __init__(self, draw: Callable[[int], int]) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return 23

    def __iter__(self) -> Iterator[int]:
        yield from (self.draw(23) for _ in range(23))


class WithOwn(ByHand):
    def __init__(self, generator: Any) -> None:
        self.generators = {"first": generator}
        super().__init__(self._drawn)

    def _drawn(self, most: int) -> int:
        generator = self.generators["first"]
        name = {random.Random: "randrange", np.random.Generator: "integers"}.get(type(generator), "randint")
        return int(getattr(generator, name)(most))


class WithBits(WithOwn):
    def _drawn(self, most: int) -> int:
        return int(self.generators["first"].random_raw()) % most


class WithSeeds(WithOwn):
    def _drawn(self, most: int) -> int:
        (seed,) = self.generators["first"].spawn(1)
        return int(np.random.default_rng(seed).integers(most))


class Around(Sampler[int]):
    """A sampler in a sampler, as libraries make one for several replicas."""

    def __init__(self, inner: Any) -> None:
        self.sampler = inner

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[int]:
        yield from self.sampler


def weights() -> list[float]:
    return [1.0 + index % 3 for index in range(23)]


DRAWING: dict[str, Callable[[int], Any]] = {
    "weighted": lambda seed: WeightedRandomSampler(weights(), 23),
    "weighted, with a generator": lambda seed: WeightedRandomSampler(
        weights(), 23, generator=torch.Generator().manual_seed(seed)
    ),
    "random": lambda seed: RandomSampler(Squares()),
    "random, with a generator": lambda seed: RandomSampler(
        Squares(), generator=torch.Generator().manual_seed(seed)
    ),
    "by Python's": lambda seed: ByHand(lambda most: random.randrange(most)),
    "by NumPy's": lambda seed: ByHand(lambda most: int(np.random.randint(most))),
    "by one of Python": lambda seed: WithOwn(random.Random(seed)),
    "by one of NumPy": lambda seed: WithOwn(np.random.default_rng(seed)),
    "by an older one of NumPy": lambda seed: WithOwn(np.random.RandomState(seed)),
    "by bits of NumPy": lambda seed: WithBits(np.random.PCG64(seed)),
    "by seeds of NumPy": lambda seed: WithSeeds(np.random.SeedSequence(seed)),
    "within another": lambda seed: Around(
        RandomSampler(Squares(), generator=torch.Generator().manual_seed(seed))
    ),
}


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("make", DRAWING.values(), ids=DRAWING)
def test_the_order_of_a_sampler_that_draws_does_not_depend_on_when_it_is_asked_for(
    make: Callable[[int], Any], num_workers: int
) -> None:
    """A replacement asks for the first time in the middle of an epoch, in another step."""
    straight = IndexedBatches(Squares(), 4, sampler=make(1), rank=1)
    expected = [straight[index] for index in range(12)]
    assert not same(expected[0], expected[6])  # another order in each epoch
    random.seed(77)
    np.random.seed(77)
    torch.manual_seed(77)
    drawn = [torch.rand(1).item(), random.random(), np.random.random()]
    for first in (5, 8):
        random.seed(77)
        np.random.seed(77)
        torch.manual_seed(77)
        batches = IndexedBatches(Squares(), 4, sampler=make(1), rank=1, num_workers=num_workers)
        for index in (first, first + 1, first - 1):
            assert same(batches[index], expected[index]), index
        assert drawn == [torch.rand(1).item(), random.random(), np.random.random()]
        batches.close()


@pytest.mark.parametrize("make", DRAWING.values(), ids=DRAWING)
def test_replicas_draw_different_samples(make: Callable[[int], Any]) -> None:
    """By their rank, or as they have seeded a generator of the sampler's own."""
    one, other = (IndexedBatches(Squares(), 4, sampler=make(rank), rank=rank) for rank in (0, 1))
    assert [one[index]["name"] for index in range(3)] != [other[index]["name"] for index in range(3)]


def test_replicas_that_divide_one_permutation() -> None:
    """They have seeded a generator alike for it."""

    class Divided(Sampler[int]):
        def __init__(self, rank: int) -> None:
            self.rank, self.generator = rank, torch.Generator().manual_seed(3)

        def __len__(self) -> int:
            return 10

        def __iter__(self) -> Iterator[int]:
            yield from torch.randperm(20, generator=self.generator)[self.rank :: 2].tolist()

    both = [IndexedBatches(Squares(), 5, sampler=Divided(rank), rank=rank) for rank in (0, 1)]
    for epoch in range(2):
        names = [
            name for batches in both for index in range(2) for name in batches[2 * epoch + index]["name"]
        ]
        assert sorted(names) == sorted(f"sample {index}" for index in range(20))


@pytest.mark.parametrize("drawing", ["weighted", "random, with a generator"])
def test_replicas_that_would_draw_the_same(drawing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    group = SimpleNamespace(is_initialized=lambda: True, get_world_size=lambda: 2)
    monkeypatch.setattr("swift_ft.data.draws.dist", group)
    batches = IndexedBatches(Squares(), 4, sampler=DRAWING[drawing](1))
    if drawing == "weighted":
        with pytest.raises(UsageError, match=r"rank=session.replica"):
            batches[0]
    else:  # the script has seeded it for each replica, or for all
        batches[0]
    IndexedBatches(Squares(), 4, sampler=DRAWING[drawing](1), rank=0)[0]
    IndexedBatches(Squares(), 4, shuffle=True)[0]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.arange(10)


class Sized(Stream):
    def __len__(self) -> int:
        return 10


class Empty(Squares):
    def __len__(self) -> int:
        return 3


def test_what_has_no_index() -> None:
    with pytest.raises(UsageError, match="map-style"):
        IndexedBatches(Stream(), 2)
    with pytest.raises(UsageError, match="a single batch"):
        IndexedBatches(Empty(), 4, drop_last=True)
    with pytest.raises(UsageError, match="__len__"):
        LoaderBatches(DataLoader(Stream(), 2))
    with pytest.raises(IndexError):
        IndexedBatches(Squares(), 2)[-1]


# ----------------------------------------------------------------------------------------- ready-made loaders


def shuffled(kind: Any, **options: Any) -> Any:
    return kind(Noise(), 4, shuffle=True, **options)


def distributed(kind: Any, **options: Any) -> Any:
    sampler: Any = DistributedSampler(Squares(), num_replicas=2, rank=1, seed=4)
    return kind(Squares(), 2, sampler=sampler, **options)


def of_a_generator(kind: Any, **options: Any) -> Any:
    """A sampler without one of its own: the loader's goes on, and its workers' seeds come from it."""
    sampler: Any = DistributedSampler(Noise(), num_replicas=2, rank=1, seed=4)
    return kind(Noise(), 2, sampler=sampler, generator=torch.Generator(), **options)


def with_replacement(kind: Any, **options: Any) -> Any:
    return kind(Squares(), 4, sampler=RandomSampler(Squares(), replacement=True), **options)


def stateful_loader() -> Any:
    return pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader


def test_a_loader_over_a_stream() -> None:
    batches = LoaderBatches(DataLoader(Sized(), 4))
    found = [batches[index].tolist() for index in (0, 1, 2, 3, 2, 1, 5)]
    a, b, c = [0, 1, 2, 3], [4, 5, 6, 7], [8, 9]
    assert found == [a, b, c, a, c, b, c]


@pytest.mark.parametrize("make", [shuffled, distributed, of_a_generator, with_replacement])
@pytest.mark.parametrize("stateful", [False, True])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_jumps_in_a_loader(make: Any, stateful: bool, num_workers: int) -> None:
    kind = stateful_loader() if stateful else DataLoader
    straight = LoaderBatches(make(kind, num_workers=num_workers), seed=2)
    expected = {index: straight[index] for index in range(max(JUMPS) + 1)}
    length = len(straight._loader)
    assert not same(expected[0], expected[length])  # another order in the next epoch
    batches = LoaderBatches(make(kind, num_workers=num_workers), seed=2)
    for index in JUMPS:
        assert same(batches[index], expected[index]), index


def test_workers_that_outlive_an_epoch() -> None:
    with pytest.raises(UsageError, match="leave out persistent_workers"):
        LoaderBatches(DataLoader(Squares(), 4, num_workers=1, persistent_workers=True))


class Resumed(Sized):
    """As torchdata shows it: it goes on from where the last reader was, and the next epoch from the begin."""

    def __init__(self) -> None:
        self.place, self.level, self.waiting = 0, 1, list[int]()

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.place < 10:
            self.place += 1
            self.waiting.append(self.place)
            yield torch.tensor(self.place * self.level)
        self.place = 0
        self.waiting.clear()


def test_a_data_set_that_counts() -> None:
    dataset = Resumed()
    batches = LoaderBatches(DataLoader(dataset, 4))
    found = [batches[index].tolist() for index in (0, 1, 2, 3, 4, 0, 5, 4)]
    a, b, c = [1, 2, 3, 4], [5, 6, 7, 8], [9, 10]
    assert found == [a, b, c, a, b, a, c, b]
    assert counted_in(dataset) == {"place", "waiting"}
    dataset.level = 2  # the script's own
    assert batches[5].tolist() == [18, 20]
    assert counted_in(dataset) == {"place", "waiting"}


class Visited(Squares):
    """Counts how often each sample was taken."""

    def __init__(self, visits: Any) -> None:
        super().__init__()
        self.visits = visits
        self.samples = np.arange(20_000)
        self.names = [*map(str, range(2000))]

    def __getitem__(self, index: int) -> Any:
        inner = isinstance(self.visits, dict) and "inner" in self.visits
        visits = self.visits["inner"] if inner else self.visits
        visits[index + 1] += 1
        return super().__getitem__(index)


VISITS: dict[str, Callable[[], Any]] = {
    "an array": lambda: np.zeros(20_000, np.int64),
    "a large array": lambda: np.zeros(2**18, np.int64),
    "a tensor": lambda: torch.zeros(20_000),
    "a dictionary": lambda: dict.fromkeys(range(2000), 0),
    "a list": lambda: [0] * 2000,
    "a counter": lambda: Counter(range(2000)),
    "an array in a dictionary": lambda: {"inner": np.zeros(40)},
}


@pytest.mark.parametrize("kind", VISITS)
def test_a_data_set_that_counts_in_something_large(kind: str) -> None:
    """It goes with the place in the epoch, and what does not change does not."""
    dataset = Visited(VISITS[kind]())
    before = copy.deepcopy(dataset.visits)
    batches = LoaderBatches(DataLoader(dataset, 4))
    length = len(batches._loader)
    batches[0]
    assert counted_in(dataset) == {"visits", "loaded"}
    after = copy.deepcopy(dataset.visits)
    assert not same_values(after, before)
    batches[length - 1], batches[length]
    batches[0]
    assert counted_in(dataset) == {"visits", "loaded"}
    if kind != "a large array":  # no step would put it back either
        assert same_values(dataset.visits, after)


def same_values(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and "inner" in one:
        return same_values(one["inner"], other["inner"])
    return bool((one == other).all()) if hasattr(one, "all") else bool(one == other)


def test_a_batch_that_the_script_has_changed() -> None:
    batches = LoaderBatches(DataLoader(Squares(), 4))
    expected = batches[1]["x"].clone()
    taken = batches[1]
    taken.pop("name")
    assert batches[1].keys() == {"x", "name"}
    taken["x"].add_(1)
    assert torch.equal(batches[1]["x"], expected)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("at", [1, 5, 6, 8])
def test_a_state_in_a_checkpoint(at: int, num_workers: int) -> None:
    """With a state, a replacement begins where the lost worker was, and not with the epoch."""
    kind = stateful_loader()
    lost = LoaderBatches(distributed(kind, num_workers=num_workers))
    expected = [lost[index] for index in range(at)]
    saved = lost.state_dict()
    expected += [lost[index] for index in range(at, at + 8)]
    loader = distributed(kind, num_workers=num_workers)
    replacement = LoaderBatches(loader)
    replacement.load_state_dict(saved)
    assert all(same(replacement[index], expected[index]) for index in range(at, at + 8))
    if num_workers == 0 and at == 5:
        assert len(loader.dataset.loaded) == 8 * 2


def test_the_state_of_another_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its loader is at samples of its own: the epoch is read again, with ours."""
    kind = stateful_loader()
    theirs = LoaderBatches(kind(EveryOther(1), 4))
    for index in range(3):
        theirs[index]
    saved = theirs.state_dict()
    monkeypatch.setattr("swift_ft.data.loader._rank", lambda: 5)
    batches = LoaderBatches(kind(EveryOther(0), 4))
    batches.load_state_dict(saved)
    assert batches[3].tolist() == [24, 26, 28, 30]
    assert batches[4].tolist() == [32, 34, 36, 38]


class EveryOther(IterableDataset[int]):
    """Even or odd numbers, with a state that says which comes next."""

    def __init__(self, first: int) -> None:
        self._first = self._next = first

    def __len__(self) -> int:
        return 40

    def __iter__(self) -> Iterator[int]:
        while self._next < 80:
            self._next += 2
            yield self._next - 2
        self._next = self._first

    def state_dict(self) -> dict[str, int]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._next = state["next"]
