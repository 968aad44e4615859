"""A checkpoint of version 0.1.0 is read as it was written, and today's code writes the same names and kinds.

:func:`write` has written ``data/version-0.1.0``: one AdamW step of the model below, at a counter of 11.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from swift_ft.checkpoint.checkpointer import Checkpointer
from swift_ft.checkpoint.folder import CheckpointFolder
from swift_ft.checkpoint.state_digest import tensor_digests
from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.offline.checkpoint_check import verify_checkpoint
from swift_ft.storage.store import Store
from swift_ft.torch_adapters.dcp.reader import PartReader

BEFORE = Path(__file__).parent / "data" / "version-0.1.0"
PART = "checkpoints/00000010/rank-00000.g00001"
VARIABLES: dict[str, Any] = {"__main__": {"seen": 3, "rates": (0.5, None), "names": {"a": b"x", 7: ["b"]}}}
DEADLINE_S = 60.0


class Counter:
    value = 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


class Scaled(nn.BatchNorm1d):
    """Keeps something beside its tensors."""

    def __init__(self, kept: Any) -> None:
        super().__init__(2)
        self.kept = kept

    def get_extra_state(self) -> Any:
        return self.kept

    def set_extra_state(self, state: Any) -> None:
        self.kept = state


class Training:
    """The script that wrote the checkpoint; ``ran`` as far as it had then."""

    def __init__(self, *, ran: bool) -> None:
        torch.manual_seed(7)
        self.scaled = Scaled({"scales": torch.arange(3.0), "text": "kept"} if ran else None)
        self.model = nn.Sequential(nn.Linear(3, 2), self.scaled)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.5 if ran else 0.1)
        self.counter = Counter()
        self.variables: dict[str, Any] = VARIABLES if ran else {}
        if ran:
            self.counter.value = 11
            self.model(torch.arange(12.0).reshape(4, 3)).pow(2).sum().backward()
            self.optimizer.step()

    def state(self) -> TrainingState:
        state = TrainingState({"model": self.model, "optimizer": self.optimizer, "counter": self.counter})
        carried = SimpleNamespace(to_save=lambda: self.variables, take_over=self.take_over)
        state.carried = cast(Any, carried)
        return state

    def take_over(self, saved: dict[str, Any]) -> None:
        self.variables = saved


def write(store: Store) -> None:
    """The checkpoint of what the script has trained."""
    state, digests = Training(ran=True).state(), dict[str, str]()
    checkpointer = Checkpointer(CheckpointFolder(store), state)
    of_tensors = tensor_digests(state.named_tensors())
    checkpointer.save(10, PART, lambda digest: digests.update({PART: digest}), of_tensors)
    assert checkpointer.wait(DEADLINE_S)
    checkpointer.folder.commit(10, {0: PART}, "run", digests)


def test_a_checkpoint_of_before_is_loaded(tmp_path: Path) -> None:
    """The values are those that torch's own reader finds, bit for bit: another CPU would train others."""
    found = Training(ran=False)
    folder = CheckpointFolder(Store(str(BEFORE)))
    assert folder.committed() == [10]
    assert verify_checkpoint(folder, 10).intact
    Checkpointer(folder, found.state()).load(10, 0)
    assert found.counter.value == 11
    assert found.optimizer.param_groups[0]["lr"] == 0.5
    assert found.variables == VARIABLES
    assert found.scaled.kept["text"] == "kept"
    dcp_to_torch_save(BEFORE / PART, tmp_path / "part.pt")
    saved = torch.load(tmp_path / "part.pt", weights_only=False)
    weights, moments = saved["models"]["model"], saved["optimizers"]["optimizer"]["state"]
    assert_close = partial(torch.testing.assert_close, rtol=0, atol=0)
    assert_close({key: found.model.state_dict()[key] for key in weights}, weights)
    assert_close({str(key): value for key, value in found.optimizer.state_dict()["state"].items()}, moments)
    assert_close(found.scaled.kept["scales"], torch.arange(3.0))


def test_a_part_has_the_same_files_and_paths_as_before(tmp_path: Path) -> None:
    """So that version 0.1.0 reads it, too."""
    write(store := Store(str(tmp_path)))
    old = PartReader(Store(str(BEFORE)), PART).read_metadata()
    new = PartReader(store, PART).read_metadata()
    assert new.state_dict_metadata == old.state_dict_metadata
    assert new.planner_data == old.planner_data
    files = [sorted(p.name for p in (root / PART).iterdir()) for root in (BEFORE, tmp_path)]
    assert files[0] == files[1]
