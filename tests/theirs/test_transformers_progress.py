"""Everything that a Trainer has counted and logged travels with a session's state, and so do its batches."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

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


def test_batches_of_a_stream(tmp_path: Path) -> None:
    from swift_ft.integrations.transformers.batches import TrainBatches

    one = trainer(tmp_path, Stream(), max_steps=3, accelerator_config={"dispatch_batches": False})
    batches = TrainBatches(one.get_train_dataloader(), 6, seed=1, rank=0)
    found = list(batches.of(0, 0, 4))
    (again,) = batches.of(0, 1, 1)
    assert again["input_ids"].tolist() == [2, 3]
    assert again["drawn"].equal(found[1]["drawn"])
