"""A helper's own state is put aside and comes back bit for bit (paper §5.2)."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.runtime.helpers.offload import offload


@pytest.fixture
def state() -> TrainingState:
    """After two steps, with gradients, buffers and a tensor that is a view of another."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 64))
    first = model[0]
    assert isinstance(first, torch.nn.Linear)
    model.register_buffer("part", first.weight.detach()[2:5])
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.randn(8, 64)).sum().backward()
        optimizer.step()
    return TrainingState({"model": model, "optimizer": optimizer})


def taken(state: TrainingState) -> int:
    storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in state.tensors()}
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.parametrize("memory_bytes", [0, 20_000, None])
def test_all_of_it_is_reloaded(state: TrainingState, memory_bytes: int | None, tmp_path: Path) -> None:
    before = [tensor.clone() for tensor in state.tensors()]
    addresses, whole = [id(tensor) for tensor in state.tensors()], taken(state)
    folder = tmp_path / "tier"
    with offload(state.tensors(), memory_bytes=memory_bytes, folder=folder):
        assert taken(state) <= whole if memory_bytes is None else taken(state) <= memory_bytes
    assert [id(tensor) for tensor in state.tensors()] == addresses
    assert all(torch.equal(a, b) for a, b in zip(state.tensors(), before, strict=True))
    assert list(folder.iterdir()) == []
    model = state.modules["model"]
    weight, part = model.get_parameter("0.weight"), model.get_buffer("part")
    weight.data[2, 0] = 7.0
    assert part[0, 0] == 7.0  # still a view


def test_it_is_reloaded_after_a_failure(state: TrainingState) -> None:
    before = [tensor.clone() for tensor in state.tensors()]
    with pytest.raises(RuntimeError, match="gone"), offload(state.tensors(), memory_bytes=0):
        raise RuntimeError("a member is gone")
    assert all(torch.equal(a, b) for a, b in zip(state.tensors(), before, strict=True))


def test_a_full_disk_changes_nothing(state: TrainingState, monkeypatch: pytest.MonkeyPatch) -> None:
    before, room = [tensor.clone() for tensor in state.tensors()], [20_000]
    original = tempfile.TemporaryFile

    class Full:
        def __init__(self, **options: Any) -> None:
            self._file = original(**options)

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *_: object) -> None:
            self._file.close()

        def write(self, data: memoryview) -> int:
            room[0] -= len(data)
            if room[0] < 0:
                raise OSError(28, "No space left on device")
            return int(self._file.write(data))

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

    monkeypatch.setattr(tempfile, "TemporaryFile", Full)
    with (
        pytest.raises(OSError, match="No space left"),
        offload(state.tensors(), memory_bytes=0),
    ):
        pytest.fail("it was put aside")
    assert room[0] < 0
    assert all(torch.equal(a, b) for a, b in zip(state.tensors(), before, strict=True))
