"""Everything that a Trainer has counted and logged travels with a session's state, and so do its batches."""

from __future__ import annotations

import copy
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from swift_ft.errors import CheckpointError
from tests.support.integrations import needs

pytestmark = needs("transformers", "accelerate")


class Numbers(Dataset[dict[str, Any]]):
    """Each with a number drawn at random, as an augmentation is."""

    def __len__(self) -> int:
        return 13

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": index, "labels": index, "drawn": torch.rand(())}


class Stream(IterableDataset[dict[str, Any]]):
    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter([Numbers()[index] for index in range(13)])


def trainer(folder: Path, data: Any = None, **arguments: Any) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    class Counts(TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.place = f"rank of {folder.name}"
            self.seen: deque[int] = deque(maxlen=2)

    sizes = {"vocab_size": 8, "n_positions": 4, "n_embd": 4, "n_layer": 1, "n_head": 1}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    given = {"output_dir": str(folder), "use_cpu": True, "report_to": "none", "remove_unused_columns": False}
    made = Trainer(
        model,
        TrainingArguments(**given, per_device_train_batch_size=2, **arguments),
        train_dataset=data or Numbers(),
        callbacks=[Counts()],
    )
    made._metrics = {"train": defaultdict(list)}
    made._sums = defaultdict(lambda: defaultdict(float))
    made._tr_loss, made._total_loss_scalar = torch.tensor(0.0), 0.0
    return made


def progress(of: Any) -> Any:
    from swift_ft.integrations.transformers.progress import Place, Progress

    return Progress(of, Place(), lambda sums: sums)


def test_into_another_trainer(tmp_path: Path) -> None:
    one, other = trainer(tmp_path / "one"), trainer(tmp_path / "other")
    ours, theirs = progress(one), progress(other)
    one.state.global_step, one.state.is_world_process_zero = 3, False
    one.state.log_history += [{"loss": 0.1, "step": 1}, {"loss": float("inf"), "step": 2}]
    one.control.should_evaluate = True
    one.callback_handler.callbacks[-2].seen.extend([4, 5, 6])
    one._metrics["train"]["loss"].append(0.5)
    one._sums["eval"]["loss"] += 2
    one._tr_loss += 0.3
    one.current_flos = 7.0
    ours.place.epoch, ours.grad_norm = 2, torch.tensor(1.5)
    ours.share_sums()
    theirs.load_state_dict(ours.state_dict())
    assert (other.state.global_step, other.state.is_world_process_zero) == (3, True)
    assert other.state.log_history == one.state.log_history
    assert other.control.should_evaluate
    counts = other.callback_handler.callbacks[-2]
    assert (list(counts.seen), counts.seen.maxlen) == ([5, 6], 2)
    assert counts.place == "rank of other"  # it has not changed since the beginning
    assert (other._tr_loss.item(), other.current_flos) == (one._tr_loss.item(), 7.0)
    assert (theirs.place.epoch, theirs.grad_norm.item()) == (2, 1.5)
    other._metrics["train"]["entropy"].append(1.0)  # it still makes entries of its own
    other._sums["eval"]["entropy"] += 1
    other._sums["train"]["entropy"] += 1
    assert other._metrics["train"]["loss"] == [0.5]
    assert other._sums["eval"]["loss"] == 2


def _counts(of: Any) -> Any:
    return next(c for c in of.callback_handler.callbacks if type(c).__name__ == "Counts")


@pytest.mark.parametrize("count", [10, 1_025, 65_536])
def test_long_lists_of_numbers(count: int, tmp_path: Path) -> None:
    """A survivor has them as its step began, and a replacement gets them."""
    one, other = trainer(tmp_path / "one"), trainer(tmp_path / "other")
    losses = _counts(one).losses = []
    _counts(other).losses = []
    ours, theirs = progress(one), progress(other)
    losses += [float(number) for number in range(count)]
    state = ours.state_dict()
    losses.append(-1.0)  # by the interrupted step
    for loaded in (ours, theirs):
        loaded.load_state_dict(state)
    assert _counts(one).losses is losses
    assert losses == _counts(other).losses == [float(number) for number in range(count)]


NOT_PLAIN: dict[str, Callable[[], Any]] = {
    "tensors by name": lambda: {"w": torch.ones(2)},
    "tensor": lambda: torch.tensor(0.5),
    "tuple": lambda: (1, 2),
    "list of samples": lambda: [*range(70_000)],
}


@pytest.mark.parametrize("kind", NOT_PLAIN)
@pytest.mark.parametrize("start", [None, float("inf"), []], ids=repr)
def test_what_is_no_longer_plain_is_left_alone(start: Any, kind: str, tmp_path: Path) -> None:
    """An average that a callback makes in its first step, a best loss that becomes a tensor."""
    value = NOT_PLAIN[kind]()
    one, other = trainer(tmp_path / "one"), trainer(tmp_path / "other")
    _counts(one).best, _counts(other).best = copy.copy(start), copy.copy(start)
    ours, theirs = progress(one), progress(other)
    before = ours.state_dict()
    _counts(one).best = value
    after = ours.state_dict()
    ours.load_state_dict(after)
    assert _counts(one).best is value
    assert kind != "list of samples" or len(value) == 70_000
    theirs.load_state_dict(after)  # which gets it another way
    assert _counts(other).best == start
    ours.load_state_dict(before)  # the step that made it is repeated
    assert _counts(one).best == start


def test_callbacks_of_one_worker_only(tmp_path: Path) -> None:
    """Each callback gets its own values, whichever others there are on other workers."""
    one, other = trainer(tmp_path / "one"), trainer(tmp_path / "other")
    writer = other.pop_callback(type(_counts(other)))
    one.add_callback(type(_counts(one))())
    other.add_callback(type(_counts(one)))
    ours, theirs = progress(one), progress(other)
    counts = [c for c in one.callback_handler.callbacks if type(c) is type(_counts(one))]
    counts[0].seen.append(1)
    counts[1].seen.append(2)
    theirs.load_state_dict(ours.state_dict())
    assert [*_counts(other).seen] == [1]
    assert [*writer.seen] == []
    one.pop_callback(type(counts[0]))
    one.pop_callback(type(counts[1]))
    _counts(other).seen.append(3)
    theirs.load_state_dict(progress(one).state_dict())
    assert [*_counts(other).seen] == [1, 3]  # nobody else has it


def test_back_to_the_beginning_of_a_step(tmp_path: Path) -> None:
    one = trainer(tmp_path)
    ours = progress(one)
    one.state.log_history.append({"loss": 0.1, "step": 1})
    before = ours.state_dict()
    one.state.log_history.append({"loss": 0.2, "step": 2})
    one._metrics["train"]["loss"].append(0.5)
    later = ours.state_dict()
    ours.load_state_dict(before)
    assert one.state.log_history == [{"loss": 0.1, "step": 1}]
    assert one._metrics == {"train": {}}
    one.state.log_history.append({"loss": 0.2, "step": 2})
    assert ours.state_dict()["log_history"] == later["log_history"]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("arguments", [{}, {"train_sampling_strategy": "sequential"}])
def test_batches_in_the_loaders_own_order(workers: int, arguments: dict[str, Any], tmp_path: Path) -> None:
    """Each batch is the same whenever it is asked for, what is drawn at random included."""
    from swift_ft.integrations.transformers.batches import TrainBatches

    one = trainer(tmp_path, dataloader_num_workers=workers, **arguments)
    loader = one.get_train_dataloader()
    expected = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        expected += [batch["input_ids"].tolist() for batch in loader]
    batches = TrainBatches(loader, len(loader), seed=1, rank=0)
    found = [batch for epoch in range(2) for batch in batches.of(epoch, 0, len(loader))]
    assert [batch["input_ids"].tolist() for batch in found] == expected
    (again,) = batches.of(1, 3, 1)
    assert again["input_ids"].equal(found[len(loader) + 3]["input_ids"])
    assert again["drawn"].equal(found[len(loader) + 3]["drawn"])


class Levels(Numbers):
    """A curriculum: a callback sets the level as an epoch begins. The Trainer tells it the epoch."""

    level = 0
    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.level, "labels": self.epoch}


@pytest.mark.parametrize("workers", [0, 1])
def test_what_changes_between_epochs_is_seen(workers: int, tmp_path: Path) -> None:
    """By the processes that load batches, too: from an epoch's first batch to its last."""
    from swift_ft.integrations.transformers.batches import TrainBatches

    data = Levels()
    arguments = {"train_sampling_strategy": "sequential", "dataloader_num_workers": workers}
    loader = trainer(tmp_path, data, **arguments).get_train_dataloader()
    batches = TrainBatches(loader, len(loader), seed=1, rank=0)
    for epoch in range(3):
        data.level = 10 * epoch
        found = [batch for first in range(len(loader)) for batch in batches.of(epoch, first, 1)]
        assert {int(level) for batch in found for level in batch["input_ids"]} == {10 * epoch}
        assert {int(told) for batch in found for told in batch["labels"]} == {epoch}
        assert data.epoch == epoch
    data.level = 10
    (again,) = batches.of(1, 2, 1)
    assert (again["input_ids"][0], again["labels"][0]) == (10, 1)


@pytest.mark.parametrize("persistent", [False, True])
def test_processes_that_outlive_an_epoch(persistent: bool, tmp_path: Path) -> None:
    from swift_ft.integrations.transformers.batches import TrainBatches

    arguments = {"dataloader_num_workers": 1, "dataloader_persistent_workers": persistent}
    loader = trainer(tmp_path, **arguments).get_train_dataloader()
    batches = TrainBatches(loader, len(loader), seed=1, rank=0)
    whose = []
    for epoch in range(2):
        list(batches.of(epoch, 0, len(loader)))
        whose.append(batches._source._ahead)
    assert (whose[0] is whose[1]) == persistent


@pytest.mark.parametrize("kind", ["weights", "a subset", "batches"])
def test_a_sampler_with_a_generator_of_its_own(kind: str, tmp_path: Path) -> None:
    """Who reads an epoch at once draws as who has read those before."""
    from torch.utils.data import BatchSampler, SubsetRandomSampler, WeightedRandomSampler

    from swift_ft.integrations.transformers.batches import TrainBatches

    def batches(folder: str) -> Any:
        generator = torch.Generator().manual_seed(3)
        one = trainer(tmp_path / folder)
        sampler: Any = WeightedRandomSampler([1.0] * 13, 13, generator=generator)
        if kind != "weights":
            sampler = SubsetRandomSampler(range(13), generator=generator)
        if kind == "batches":
            sampler = BatchSampler(sampler, 2, drop_last=False)
        one._get_train_sampler = lambda *_: sampler
        loader = one.get_train_dataloader() if kind != "batches" else _of_batches(one, sampler)
        return TrainBatches(loader, len(loader), seed=1, rank=0), len(loader)

    one, count = batches("one")
    other, _ = batches("other")
    orders = [[b["input_ids"].tolist() for b in one.of(epoch, 0, count)] for epoch in range(2)]
    assert orders[0] != orders[1]
    assert [b["input_ids"].tolist() for b in other.of(1, 0, count)] == orders[1]


def _of_batches(of: Any, batches: Any) -> Any:
    """A loader with batches of the script's own."""
    from torch.utils.data import DataLoader

    return of.accelerator.prepare(DataLoader(Numbers(), batch_sampler=batches, collate_fn=of.data_collator))


def test_batches_of_a_stream(tmp_path: Path) -> None:
    from swift_ft.integrations.transformers.batches import TrainBatches

    one = trainer(tmp_path, Stream(), max_steps=3, accelerator_config={"dispatch_batches": False})
    batches = TrainBatches(one.get_train_dataloader(), 6, seed=1, rank=0)
    found = list(batches.of(0, 0, 4))
    (again,) = batches.of(0, 1, 1)
    assert again["input_ids"].tolist() == [2, 3]
    assert again["drawn"].equal(found[1]["drawn"])


@pytest.mark.parametrize("attributes", [None, [], "trainer", 3, {"trainer": []}, {"trainer": {"values": {}}}])
def test_attributes_that_are_none(attributes: Any, tmp_path: Path) -> None:
    """They would be taken for those of a training that has just begun."""
    ours = progress(trainer(tmp_path))
    saved = {**ours.state_dict(), "attributes": attributes}
    with pytest.raises(CheckpointError, match="attributes of"):
        ours.load_state_dict(saved)
