"""Checkpoints of earlier versions are still read.

Commit a872519 wrote ``data/before-the-house``: one AdamW step of the model below, at a counter of 11. Commit
c9156090 wrote ``data/signed-digests``, of the same training.
"""

from __future__ import annotations

import io
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from swift_ft.checkpoint.checkpointer import Checkpointer
from swift_ft.checkpoint.folder import CheckpointFolder
from swift_ft.checkpoint.state_digest import STORED_BEFORE, differing, tensor_digests
from swift_ft.checkpoint.state_payload import pack, unpack
from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.storage.store import Store
from swift_ft.torch_adapters.dcp.reader import PartReader
from swift_ft.torch_adapters.dcp.writer import staged, write_part

OLD = Path(__file__).parent / "data" / "before-the-house"
SIGNED = OLD.with_name("signed-digests")
PART = "checkpoints/00000010/rank-00000.g00001"


class Counter:
    value = 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


class Training:
    """The script that wrote the checkpoint; ``ran`` as far as it had then."""

    def __init__(self, *, ran: bool) -> None:
        torch.manual_seed(7)
        self.model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.5 if ran else 0.1)
        self.counter = Counter()
        if ran:
            self.counter.value = 11
            self.model(torch.arange(12.0).reshape(4, 3)).pow(2).sum().backward()
            self.optimizer.step()

    def state(self) -> TrainingState:
        return TrainingState({"model": self.model, "optimizer": self.optimizer, "counter": self.counter})


def test_a_checkpoint_of_before_is_loaded(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """The values are those that torch's own reader finds, bit for bit: another CPU would train others."""
    found = Training(ran=False)
    folder = CheckpointFolder(Store(str(OLD)))
    assert folder.committed() == [10]
    checkpointer = Checkpointer(folder, found.state())
    checkpointer.load(10, 0)
    assert [r.getMessage() for r in caplog.records if getattr(r, "event", "") == "checkpoint_unverified"]
    assert checkpointer.unverified == 10
    assert found.counter.value == 11
    assert found.optimizer.param_groups[0]["lr"] == 0.5
    dcp_to_torch_save(OLD / PART, tmp_path / "part.pt")
    saved = torch.load(tmp_path / "part.pt", weights_only=False)
    weights, moments = saved["models"]["model"], saved["optimizers"]["optimizer"]["state"]
    assert_close = partial(torch.testing.assert_close, rtol=0, atol=0)
    assert_close(dict(found.model.state_dict()), weights)
    assert_close({str(key): value for key, value in found.optimizer.state_dict()["state"].items()}, moments)


def test_a_part_has_the_same_files_and_paths_as_before(tmp_path: Path) -> None:
    """So that earlier versions read it, too."""
    store = Store(str(tmp_path))
    write_part(store, PART, staged(Training(ran=True).state().to_save()))
    old = PartReader(Store(str(OLD)), PART).read_metadata()
    new = PartReader(store, PART).read_metadata()
    assert new.state_dict_metadata == old.state_dict_metadata
    assert new.planner_data == old.planner_data
    files = [sorted(p.name for p in (root / PART).iterdir()) for root in (OLD, tmp_path)]
    assert files[0] == files[1]


def test_digests_of_before_are_compared(tmp_path: Path) -> None:
    """They are signed: of negative words they are not today's."""
    dcp_to_torch_save(SIGNED / PART, tmp_path / "part.pt")
    saved = torch.load(tmp_path / "part.pt", weights_only=False)
    digests = unpack(saved["plain"]["bytes"].getvalue())[STORED_BEFORE]
    found = Training(ran=False)
    checkpointer = Checkpointer(CheckpointFolder(Store(str(SIGNED))), found.state())
    checkpointer.load(10, 0)
    assert checkpointer.unverified is None
    tensors = found.state().named_tensors()
    assert tensor_digests(tensors, earlier=True) == digests
    assert differing(tensor_digests(tensors), digests)


class Scaled(nn.Linear):
    """Keeps something beside its tensors."""

    def __init__(self, kept: object) -> None:
        super().__init__(3, 3)
        self.kept = kept

    def get_extra_state(self) -> object:
        return self.kept

    def set_extra_state(self, state: object) -> None:
        self.kept = state


@pytest.mark.parametrize(
    ("kept", "at_start"),
    [
        (torch.arange(5, dtype=torch.uint8), torch.zeros(0, dtype=torch.uint8)),
        ({"a": 1.5, "b": [1, torch.ones(2)]}, {"a": 0.0, "b": [0, torch.zeros(2)]}),
        ("text", ""),
    ],
    ids=["tensor", "dict", "text"],
)
def test_what_modules_kept_beside_their_tensors_was_among_them(
    kept: Any, at_start: Any, tmp_path: Path
) -> None:
    """An earlier version gave DCP all that ``state_dict()`` had."""
    store = Store(str(tmp_path))
    old = TrainingState({"model": Scaled(kept)}).to_save()
    plain = unpack(old["plain"]["bytes"].getvalue())
    old["models"]["model"]["_extra_state"] = plain.pop("extra")["model"]["_extra_state"]
    old["plain"]["bytes"] = io.BytesIO(pack(plain))
    write_part(store, PART, staged(old))
    folder = CheckpointFolder(store)
    folder.commit(10, {0: PART}, "run", {})
    model = Scaled(at_start)
    Checkpointer(folder, TrainingState({"model": model})).load(10, 0)
    assert repr(model.kept) == repr(kept)
