"""A checkpoint whose bytes are not those that were saved is found by everyone who reads it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.local import LocalFileOpener
from torch import nn

from swift_ft.checkpoint.checkpointer import Checkpointer
from swift_ft.checkpoint.folder import CheckpointFolder
from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.errors import CheckpointError, DamagedCheckpointError
from swift_ft.offline.checkpoint_check import verify_checkpoint
from swift_ft.storage.digest import sealed
from swift_ft.storage.store import Store
from tests.support.damage import flip

PART = "checkpoints/00000010/rank-00000.g00001"
MARKER = "checkpoints/00000010/committed.json"
DATA, METADATA, MANIFEST = (f"{PART}/{name}" for name in ("__0_0.distcp", ".metadata", "digests.json"))
NAMED = {"iteration": 10, "run_id": "run", "parts": {"0": PART}}
DEADLINE_S = 60.0


def worker(folder: Path) -> tuple[Checkpointer, nn.Linear]:
    model = nn.Linear(20, 20)
    return Checkpointer(CheckpointFolder(Store(str(folder))), TrainingState({"model": model})), model


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A store with a committed checkpoint of one worker."""
    checkpointer, _ = worker(tmp_path)
    digests: dict[str, str] = {}
    checkpointer.save(10, PART, lambda digest: digests.update({PART: digest}))
    assert checkpointer.wait(DEADLINE_S)
    checkpointer.folder.commit(10, {0: PART}, "run", digests)
    return tmp_path


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize("at", [0.0, 0.3, 0.6, 0.999])
@pytest.mark.parametrize("name", [DATA, METADATA, MANIFEST, MARKER])
def test_a_flipped_bit(name: str, at: float, saved: Path) -> None:
    """Of a tensor, of DCP's description, of our own files: one is as bad as the other."""
    flip(saved / name, at)
    checkpointer, model = worker(saved)
    before = model.weight.detach().clone()
    with pytest.raises(DamagedCheckpointError) as caught:
        checkpointer.load(10, 0)
    assert caught.value.fields["iteration"] == 10
    assert Path(name).name in str(caught.value)
    assert torch.equal(model.weight, before)
    (found,) = verify_checkpoint(checkpointer.folder, 10).damaged
    assert Path(name).name in found


@pytest.mark.parametrize("damage", [Path.unlink, cut], ids=["absent", "cut short"])
@pytest.mark.parametrize("name", [DATA, METADATA, MANIFEST, MARKER])
def test_a_file_that_is_gone_or_cut_short(name: str, damage: Callable[[Path], None], saved: Path) -> None:
    """DCP's own error is no ``Exception``, and would end the worker instead of the attempt."""
    damage(saved / name)
    if (name, damage) in ((MANIFEST, cut), (MARKER, cut)):  # the last byte is a line break
        damage(saved / name)
    checkpointer, _ = worker(saved)
    with pytest.raises(DamagedCheckpointError, match="the checkpoint of iteration 10 is damaged"):
        checkpointer.load(10, 0)
    assert verify_checkpoint(checkpointer.folder, 10).damaged


def test_every_value_of_the_marker_is_proven(saved: Path) -> None:
    """A bit of a number or of a name can flip to another valid one."""
    marker = json.loads((saved / MARKER).read_text())
    for key in marker:
        other = {**marker, key: 20 if key == "iteration" else {} if key in ("parts", "digests") else "other"}
        renamed = {f"{k}x" if k == key else k: value for k, value in marker.items()}
        for forged in (other, renamed):
            (saved / MARKER).write_text(json.dumps(forged))
            with pytest.raises(DamagedCheckpointError, match=r"committed\.json does not match its digest"):
                worker(saved)[0].load(10, 0)


def test_a_bit_that_flips_on_its_way_is_read_again(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no damage: the next reading is right."""
    read, flips = LocalFileOpener.read, 1

    def noisy(self: LocalFileOpener, *size: int) -> bytes:
        nonlocal flips
        data = bytearray(read(self, *size))
        if flips and len(data) > 1000:
            flips -= 1
            data[500] ^= 1
        return bytes(data)

    monkeypatch.setattr(LocalFileOpener, "read", noisy, raising=False)
    worker(saved)[0].load(10, 0)
    assert not flips


def test_a_store_that_is_gone_is_no_damage(tmp_path: Path) -> None:
    """A lost mount is an empty folder. Nobody should give up the checkpoints that are in the real one."""
    with pytest.raises(CheckpointError, match="is it mounted") as caught:
        worker(tmp_path)[0].load(10, 0)
    assert not isinstance(caught.value, DamagedCheckpointError)


def test_a_checkpoint_that_is_intact(saved: Path) -> None:
    checked = verify_checkpoint(CheckpointFolder(Store(str(saved))), 10)
    assert (checked.damaged, checked.intact) == ((), True)


def test_all_files_of_a_part_are_verified_on_demand(saved: Path) -> None:
    """All that is wrong is named, not the first."""
    flip(saved / DATA, 0.5)
    (saved / METADATA).unlink()
    checked = verify_checkpoint(CheckpointFolder(Store(str(saved))), 10)
    assert not checked.intact
    data, metadata = sorted(checked.damaged, key=lambda line: ".metadata" in line)
    assert "__0_0.distcp does not match its digest" in data
    assert "worker 0" in data
    assert PART in data
    assert ".metadata is gone" in metadata


@pytest.mark.parametrize(
    ("marker", "damaged_file"),
    [
        (NAMED, "committed.json"),
        ({**NAMED, "digests": {}}, "committed.json"),
        (sealed({**NAMED, "digests": {}}), "digests.json"),
    ],
    ids=["no digests", "none of its own", "none of the part"],
)
def test_a_marker_that_lost_its_digests(marker: dict[str, Any], damaged_file: str, saved: Path) -> None:
    """What nothing proves is damaged: else a loss of digests would turn all verification off."""
    (saved / MARKER).write_text(json.dumps(marker))
    checkpointer, model = worker(saved)
    before = model.weight.detach().clone()
    with pytest.raises(DamagedCheckpointError, match=f"{damaged_file} does not match its digest"):
        checkpointer.load(10, 0)
    assert torch.equal(model.weight, before)
    (found,) = verify_checkpoint(checkpointer.folder, 10).damaged
    assert damaged_file in found
