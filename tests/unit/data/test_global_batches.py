"""Every sample once, in one order, however many replicas share the batches."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from swift_ft.data import GlobalBatches, samples_by_iteration
from swift_ft.data.order import SampleOrder, shards_of
from swift_ft.data.shares import deal
from swift_ft.errors import UsageError
from tests.unit.data.test_batches import Noise, Squares, Stream

SAMPLES = 103


class Numbers(Dataset[Any]):
    """Each sample is its index, and some noise."""

    def __init__(self, samples: int = SAMPLES, identity: str = "") -> None:
        self._samples = samples
        self.identity = identity

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, random.random() + torch.rand(()).item()


class Together(Numbers):
    """Loads several samples at once, as Hugging Face's data sets do."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [(index, 0.0) for index in indices]


# -------------------------------------------------------------------------------------------------- the order


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("shard_size", [None, 1, 10, 103])
def test_each_sample_once_in_each_epoch(shuffle: bool, shard_size: int | None) -> None:
    order = SampleOrder(shards_of(SAMPLES, shard_size), shuffle=shuffle, seed=3)
    epochs = [order.at(epoch * SAMPLES, SAMPLES) for epoch in range(3)]
    assert all(sorted(epoch) == list(range(SAMPLES)) for epoch in epochs)
    assert (epochs[0] == epochs[1]) is not shuffle
    pieces = [sample for start in range(0, 3 * SAMPLES, 7) for sample in order.at(start, 7)]
    assert pieces[: 3 * SAMPLES] == [sample for epoch in epochs for sample in epoch]


def test_the_order_of_distributed_sampler() -> None:
    sampler: Any = DistributedSampler(Squares(), num_replicas=1, rank=0, shuffle=True, seed=5)
    order = SampleOrder([23], shuffle=True, seed=5)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        assert order.at(epoch * 23, 23) == list(sampler)


def test_shards_stay_together() -> None:
    order = SampleOrder([4, 1, 7], shuffle=True, seed=1)
    shards = [[0, 0, 0, 0, 1, 2, 2, 2, 2, 2, 2, 2][sample] for sample in order.at(0, 12)]
    assert len([1 for one, other in pairwise(shards) if one != other]) == 2
    assert order.at(0, 12) != sorted(order.at(0, 12))


def test_reading_back_and_forth() -> None:
    straight = SampleOrder(shards_of(SAMPLES, 10), shuffle=True, seed=2)
    expected = straight.at(0, 4 * SAMPLES)
    order = SampleOrder(shards_of(SAMPLES, 10), shuffle=True, seed=2)
    for start in (300, 5, 250, 3, 100, 98, 307, 0):
        assert order.at(start, 20) == expected[start : start + 20]


# ------------------------------------------------------------------------------------------------ the dealing


def test_shares() -> None:
    assert deal(16, 1, [1, 1, 1]) == [6, 5, 5]
    assert deal(16, 2, [1, 1, 1]) == [6, 6, 4]
    assert deal(16, 1, [3.0, 1.0]) == [12, 4]
    assert deal(16, 1, [1000.0, 1.0, 1.0]) == [14, 1, 1]
    assert deal(3, 1, [1000.0, 1.0, 1.0]) == [1, 1, 1]


@pytest.mark.parametrize("seed", range(20))
def test_shares_are_near_to_the_weights(seed: int) -> None:
    draw = random.Random(seed)
    weights = [draw.uniform(0.5, 2.0) for _ in range(draw.randint(1, 9))]
    units, unit = draw.randint(40, 90), draw.randint(1, 4)
    shares = deal(units * unit, unit, weights)
    assert sum(shares) == units * unit
    for share, weight in zip(shares, weights, strict=True):
        assert abs(share / unit - units * weight / sum(weights)) < 1
        assert share % unit == 0


DEALS: list[dict[str, Any]] = [
    {},
    {"replicas": 2},
    {"replicas": 5},
    {"replicas": 3, "weights": [1.0, 4.0, 2.0]},
    {"replicas": 12},
]


@pytest.mark.parametrize("deal", DEALS)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_global_batches_do_not_depend_on_the_replicas(
    deal: dict[str, Any], num_workers: int, tmp_path: Path
) -> None:
    """Neither do the random numbers that the data set draws."""
    replicas = deal.get("replicas", 1)
    options: dict[str, Any] = {"shuffle": True, "seed": 7, "shard_size": 10}
    alone = GlobalBatches(Numbers(), 12, **options)
    parts = [
        GlobalBatches(Numbers(), 12, replica=n, log=tmp_path, num_workers=num_workers, **options, **deal)
        for n in range(replicas)
    ]
    for index in (0, 1, 2, 8, 9, 3):  # epochs end within batches, and there are jumps
        numbers, noise = alone[index]
        found = [part[index] for part in parts]
        assert torch.equal(torch.cat([part[0] for part in found]), numbers)
        assert torch.equal(torch.cat([part[1] for part in found]), noise)
        assert samples_by_iteration(tmp_path)[index] == numbers.tolist()
    assert sum(part.weight for part in parts) == pytest.approx(replicas)
    for part in parts:
        part.close()


def test_replicas_that_change_amid_an_epoch() -> None:
    seen: list[int] = []
    for index, replicas in enumerate([1, 4, 4, 3, 2, 2, 5, 1]):
        for replica in range(replicas):
            seen += GlobalBatches(Numbers(96), 12, shuffle=True, replicas=replicas, replica=replica).samples(
                index
            )
    assert seen == SampleOrder([96], shuffle=True, seed=0).at(0, 96)


def test_samples_that_are_loaded_at_once() -> None:
    found = GlobalBatches(Together(), 12, shuffle=True)[3][0].tolist()
    assert found == SampleOrder([SAMPLES], shuffle=True, seed=0).at(36, 12)


def test_options_of_the_loader() -> None:
    batches = GlobalBatches(Numbers(), 4, collate_fn=lambda samples: [number for number, _ in samples])
    assert batches[1] == [4, 5, 6, 7]


def test_weights_make_the_mean_of_all_samples() -> None:
    losses = torch.rand(12)
    deal: dict[str, Any] = {"replicas": 3, "weights": [1.0, 4.0, 2.0]}
    parts = [GlobalBatches(Numbers(), 12, replica=n, **deal) for n in range(3)]
    means = [part.weight * losses[torch.tensor(part.samples(0))].mean() for part in parts]
    torch.testing.assert_close(sum(means) / 3, losses.mean())


# --------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"batch_size": 3, "replicas": 4}, "cannot be dealt to 4 replicas"),
        ({"batch_size": 12, "unit": 4, "replicas": 4}, "at least 16 samples"),
        ({"batch_size": 12, "unit": 5}, "no whole number of units of 5"),
        ({"batch_size": SAMPLES + 1}, "does not fit into an epoch of 103"),
        ({"batch_size": 0}, "does not fit"),
        ({"batch_size": 4, "shard_size": 104}, "A shard of 104 samples does not fit into an epoch of 103"),
        ({"batch_size": 4, "shard_size": 0}, "between 1 and 103"),
        ({"batch_size": 4, "replicas": 2, "weights": [1.0]}, "1 weights for 2 replicas"),
        ({"batch_size": 4, "replicas": 2, "weights": [1.0, 0.0]}, "above 0"),
    ],
)
def test_what_cannot_be(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        GlobalBatches(Numbers(), **arguments)


def test_a_stream_has_no_order() -> None:
    with pytest.raises(UsageError, match="LoaderBatches"):
        GlobalBatches(Stream(), 2)
    with pytest.raises(IndexError):
        GlobalBatches(Numbers(), 2)[-1]


@pytest.mark.parametrize(
    ("dataset", "options", "words"),
    [
        (Numbers(102), {}, "number of samples was 103 when this run began, and is 102 now"),
        (Numbers(identity="b"), {}, "identity was 'a' when this run began, and is 'b' now"),
        (Numbers(identity="a"), {"batch_size": 8}, "global batch was 12"),
        (Numbers(identity="a"), {"seed": 1}, "seed= was 0"),
        (Numbers(identity="a"), {"shuffle": True}, "shuffle= was False"),
        (Numbers(identity="a"), {"shard_size": 10}, "sizes of the data set's shards"),
    ],
)
def test_another_order_in_a_run_that_is_continued(
    dataset: Numbers, options: dict[str, Any], words: str
) -> None:
    state = GlobalBatches(Numbers(identity="a"), 12, replicas=3).state_dict()
    GlobalBatches(Numbers(identity="a"), 12, replicas=2, replica=1).load_state_dict(state)
    with pytest.raises(UsageError, match=words):
        GlobalBatches(dataset, **{"batch_size": 12, **options}).load_state_dict(state)


def test_a_log_that_a_kill_has_cut_off(tmp_path: Path) -> None:
    first = GlobalBatches(Numbers(), 4, log=tmp_path)
    for index in range(2):
        first[index]
    (log,) = tmp_path.glob("replica0.jsonl")
    log.write_text(log.read_text() + '{"iteration": 2, "sta')
    again = GlobalBatches(Numbers(), 4, log=tmp_path)
    for index in (1, 2):
        again[index]
    assert samples_by_iteration(tmp_path) == {n: list(range(4 * n, 4 * n + 4)) for n in range(3)}
    log.write_text('{"iteration": 0, "start": 2, "samples": [1], "shares": "a", "time": 1}\n')
    with pytest.raises(ValueError, match="Iteration 0 has 0 samples before place 2"):
        samples_by_iteration(tmp_path)


def test_a_log_of_an_iteration_that_others_repeat(tmp_path: Path) -> None:
    for replicas in (3, 2):
        for replica in range(replicas):
            GlobalBatches(Numbers(), 12, replicas=replicas, replica=replica, log=tmp_path)[1]
    assert samples_by_iteration(tmp_path) == {1: list(range(12, 24))}


def test_the_random_numbers_of_the_training_stay() -> None:
    torch.manual_seed(3)
    random.seed(3)
    GlobalBatches(Noise(), 4, shuffle=True)[0]
    drawn = [torch.rand(1).item(), random.random()]
    torch.manual_seed(3)
    random.seed(3)
    assert drawn == [torch.rand(1).item(), random.random()]


def test_it_is_a_loader_s_order() -> None:
    """One replica without shards: the batches of DistributedSampler and DataLoader."""
    sampler: Any = DistributedSampler(Squares(), num_replicas=1, rank=0, shuffle=True, seed=5)
    batches = GlobalBatches(Squares(), 4, shuffle=True, seed=5)
    for index, batch in enumerate(DataLoader(Squares(), 4, sampler=sampler, drop_last=True)):
        assert torch.equal(batches[index]["x"], batch["x"])


# ---------------------------------------------------------------------------------------- shares that change


@pytest.mark.parametrize("num_workers", [0, 2])
def test_shares_that_change(num_workers: int) -> None:
    """From an iteration on, whatever was loaded in advance. One that is repeated is dealt as it was."""
    replicas = [
        GlobalBatches(Numbers(), 12, shuffle=True, seed=4, replicas=3, replica=n, num_workers=num_workers)
        for n in range(3)
    ]
    order = SampleOrder([SAMPLES], shuffle=True, seed=4)

    def dealt(iteration: int) -> list[list[int]]:
        parts = [batches[iteration][0].tolist() for batches in replicas]
        assert [sample for part in parts for sample in part] == order.at(iteration * 12, 12)
        return parts

    assert [len(part) for part in dealt(0)] == [4, 4, 4]
    dealt(1)
    for batches in replicas:
        batches.follow([(2, (5, 2, 5)), (4, (6, 1, 5))])
    counts = [[len(part) for part in dealt(n)] for n in (2, 3, 4, 1)]
    assert counts == [[5, 2, 5], [5, 2, 5], [6, 1, 5], [4, 4, 4]]
    assert [batches.shares_at(3) for batches in replicas] == [(5, 2, 5)] * 3
    assert replicas[0].shares == (4, 4, 4)
    for batches in replicas:
        batches.close()


def test_the_weight_is_that_of_the_last_batch() -> None:
    batches = GlobalBatches(Numbers(), 12, replicas=3, replica=1)
    assert batches.weight == 1
    batches.follow([(2, (5, 2, 5))])
    batches[1]
    assert batches.weight == 1
    batches[2]
    assert batches.weight == 2 * 3 / 12


def test_a_weight_that_nobody_asks_for(caplog: pytest.LogCaptureFixture) -> None:
    """It is said once, when the first such batch has been used."""
    batches = GlobalBatches(Numbers(), 12, replicas=2, weights=[3.0, 1.0])
    batches[0]
    assert not caplog.records
    batches[1]
    batches[2]
    (record,) = caplog.records
    assert "Replicas get 9, 3 samples" in record.message
    caplog.clear()
    asks = GlobalBatches(Numbers(), 12, replicas=2, weights=[3.0, 1.0])
    for n in range(3):
        assert asks[n] is not None
        assert asks.weight == 1.5
    assert not caplog.records
