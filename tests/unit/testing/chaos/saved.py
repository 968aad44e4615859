"""Checkpoints of a small state, as workers of a run would leave them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from swift_ft.checkpoint.folder import CheckpointFolder
from swift_ft.checkpoint.manifest import write_manifest
from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.storage.store import Store
from swift_ft.torch_adapters.dcp.writer import staged, write_part


@dataclasses.dataclass
class Mean:
    """A dataclass of the script."""

    value: float
    weights: list[float]


class Range(NamedTuple):
    """A named tuple of the script."""

    low: float
    high: float


class Meters:
    """Of a script, with objects of its own."""

    def __init__(self, value: float) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        """Objects of both."""
        return {"mean": Mean(self.value, [1.0]), "range": Range(0.0, self.value)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it back."""
        self.value = state["mean"].value


def state_of(weight: float = 1.0, meter: float = 3.0) -> dict[str, Any]:
    """A model, its optimizer after a step, and objects of the script."""
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, weight)
    nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "meters": Meters(meter)}


def save(
    folder: Path, *states: dict[str, Any], parts: dict[int, int] | None = None, iteration: int = 4
) -> str:
    """A checkpoint of some parts, and the worker's to which each belongs."""
    checkpoints = CheckpointFolder(Store(str(folder)))
    paths = [checkpoints.part(iteration, rank, 1) for rank in range(len(states))]
    digests = {
        path: write_manifest(
            checkpoints.store,
            path,
            write_part(checkpoints.store, path, staged(TrainingState(state).to_save())),
        )
        for path, state in zip(paths, states, strict=True)
    }
    owners = parts or {rank: rank for rank in range(len(states))}
    checkpoints.commit(iteration, {rank: paths[part] for rank, part in owners.items()}, "run", digests)
    (folder / "run.json").touch()  # a store's, as all runs have it
    return str(folder)
