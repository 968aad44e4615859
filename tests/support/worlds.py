"""Runs whose worker 0 plans changes to other worlds (`cluster/scripts/changes_world.py`)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
import torch

from swift_ft.checkpoint.folder import CheckpointFolder
from swift_ft.checkpoint.layered_part import StateReader
from swift_ft.checkpoint.sliced_part import SlicedPart
from swift_ft.checkpoint.state_payload import StatePath
from swift_ft.recovery.entries import event_from_dict
from swift_ft.recovery.job_state import State
from swift_ft.recovery.protocol import step
from swift_ft.storage.store import Store
from swift_ft.torch_adapters.dcp.reader import PartReader
from tests.support.cluster import ClusterRun, run_cluster

CHANGES_WORLD = Path(__file__).parents[1] / "cluster" / "scripts" / "changes_world.py"
Change = tuple[int, list[int], list[str]]
"""From which iteration on it is planned, the machines of the next world by slot, and arguments or degrees."""


def run_changed(
    folder: Path,
    example: str,
    changes: Sequence[Change],
    args: Sequence[str],
    *,
    machines: int,
    inject: str = "",
    flags: Sequence[str] = (),
) -> ClusterRun:
    """Runs an example, with its arguments, whose worker 0 plans changes, to the end."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("EXAMPLE", example)
        environment.setenv("CHANGES", json.dumps(changes))
        script = [str(CHANGES_WORLD), *args]
        found = run_cluster(folder, machines=machines, script=script, inject=inject, flags=[*flags])
    assert found.code == 0, found.output[-3000:]
    assert bool(found.events("FaultInjected")) == bool(inject), "the fault did not strike"
    return found


def worlds_of(run: ClusterRun) -> list[State]:
    """The state of the job after each switch."""
    state, found = State(), []
    for event in run.report["events"]:
        before, state = state, step(state, event_from_dict(event))
        if state.worlds.present.number != before.worlds.present.number:
            found.append(state)
    return found


def given_up(run: ClusterRun) -> list[str]:
    """Why changes were given up."""
    state, found = State(), []
    for event in run.report["events"]:
        before, state = state, step(state, event_from_dict(event))
        if before.worlds.change is not None and state.worlds.change is None and state.worlds.given_up:
            found.append(state.worlds.given_up)
    return found


def saved_state(store: Path, iteration: int) -> dict[StatePath, torch.Tensor]:
    """All tensors of a checkpoint."""
    folder = CheckpointFolder(Store(store))
    return _whole(folder.reader(saved) for saved in folder.parts_of(iteration).values())


def taken_state(folder: Path) -> dict[StatePath, torch.Tensor]:
    """All tensors with which another world began, as its workers have written them (``TAKEN``)."""
    return _whole(PartReader(Store(folder), part.name) for part in folder.iterdir())


def _whole(parts: Iterable[StateReader]) -> dict[StatePath, torch.Tensor]:
    """All tensors, put together from the parts of workers."""
    found: dict[StatePath, torch.Tensor] = {}
    for part in map(SlicedPart, parts):
        for path, kind in part.kinds.items():
            ranges = part.ranges(path)
            whole = found.setdefault(path, torch.empty(part.whole(path), dtype=kind.dtype))
            whole[tuple(slice(*one) for one in ranges)] = part.read({path: ranges})[path]
    return found
