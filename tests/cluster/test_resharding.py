"""A run is resumed with other shards: with more or fewer workers, or none that share anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.cluster import CHECKPOINT_EVERY, ClusterRun, run_cluster, training

SCRIPT = Path(__file__).parent / "scripts" / "resharded.py"
AT = 2 * CHECKPOINT_EVERY


def run(folder: Path, machines: int, *flags: str, iterations: int = AT) -> ClusterRun:
    script = training(folder, SCRIPT, iterations=iterations)
    return run_cluster(folder, machines=machines, flags=["--spares", "0", *flags], script=script)


def whole(folder: Path, machines: int) -> dict[str, torch.Tensor]:
    """The state after AT iterations, put together from what each worker had."""
    found: dict[str, torch.Tensor] = {}
    for rank in range(machines):
        parts: dict[str, Any] = torch.load(folder / "weights" / f"{machines}-{rank}.pt")
        for name, (box, values) in parts.items():
            if box is None:
                assert torch.equal(found.setdefault(name, values), values)
                continue
            shape, offset = box
            target = found.setdefault(name, torch.full(shape, float("nan")))
            target[tuple(slice(a, a + size) for a, size in zip(offset, values.shape, strict=True))] = values
    assert not any(tensor.isnan().any() for tensor in found.values())
    return found


@pytest.mark.parametrize(
    ("how", "first", "then"), [("fsdp", 2, 3), ("tensor parallelism", 2, 1), ("tensor parallelism", 2, 4)]
)
def test_the_state_is_what_it_was(
    how: str, first: int, then: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOW", "fsdp" if how == "fsdp" else "tp")
    monkeypatch.setenv("AT", str(AT))
    monkeypatch.setenv("LOCAL", str(tmp_path / "disks"))
    begun = run(tmp_path, first)
    assert begun.code == 0, begun.output[-3000:]
    expected = whole(tmp_path, first)
    resumed = run(tmp_path, then, "--resume", iterations=AT + 3)
    assert resumed.code == 0, resumed.output[-3000:]
    found = whole(tmp_path, then)
    assert found.keys() == expected.keys()
    assert "optimizer.exp_avg of model.0.weight" in found
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name
    (load,) = resumed.report["loads"]
    assert sum(load["own_disk"].values()) > 0
    assert (sum(load["peers"].values()) > 0) == (then > 1)
    assert (sum(load["store"].values()) > 0) == (then < first)
