"""The facts of a check (``swift-run --check``): what each worker says of its protection, and where.

All workers of a check are on one host. They write into a folder that their launcher makes, and deletes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from swift_ft.plain import from_plain


@dataclass(frozen=True, slots=True, kw_only=True)
class PartFacts:
    """One part of ``Session(state)``.

    Attributes:
        name: as the script calls it.
        kind: weights, optimizer, scheduler, scaler, average or small object.
        made_of: its class.
        nbytes: of the tensors that it has; 0 for a small part.
        undoable: an optimizer whose last step can be undone.
    """

    name: str
    kind: str
    made_of: str
    nbytes: int = 0
    undoable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedWorker:
    """One worker, after the iterations of a check.

    Attributes:
        rank: the worker.
        machine: its slot.
        world_size: number of workers.
        iterations: that it has completed.
        step_s: seconds of the last one; None if it was not measured.
        store: the store that the script names, without credentials.
        checkpoint_every: iterations between two global checkpoints.
        snapshot_every: iterations between two memory checkpoints; None without them.
        parts: all that ``Session(state)`` has.
        pipeline: the worker's pipeline, in words; empty without one.
        replicas: that share gradients with this worker, itself included; 1 without any.
        shards: the place of its shards, in words; empty without any.
        between: names of what the script does between two steps.
        said: what the session has logged about the script: events, and lines.
        too_large: names of values that change in place and are too large to be put back.
        asks_index: the script has asked for the number of a step.
        loader_goes_on: a DataLoader's iterator of the script's own goes on from step to step.
        keeps_position: names of small parts that may hold a position in the data.
        forecast: what a loss of each machine leads to (``Forecast.to_dict()``); None where another worker
            has said it.
    """

    rank: int
    machine: int
    world_size: int
    iterations: int
    step_s: float | None
    store: str
    checkpoint_every: int
    snapshot_every: int | None
    parts: tuple[PartFacts, ...]
    pipeline: str = ""
    replicas: int = 1
    shards: str = ""
    between: tuple[str, ...] = ()
    said: tuple[tuple[str, str], ...] = ()
    too_large: tuple[str, ...] = ()
    asks_index: bool = True
    loader_goes_on: bool = False
    keeps_position: tuple[str, ...] = ()
    forecast: Mapping[str, Any] | None = None


class CheckFolder:
    """The folder of a check.

    Args:
        path: made by the launcher.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    @property
    def store(self) -> Path:
        """A folder that stands in for the script's store."""
        return self._path / "store"

    @property
    def logs(self) -> Path:
        """The folder for the output of workers."""
        return self._path / "logs"

    def note_session(self, rank: int) -> None:
        """A worker's script has made a session."""
        (self._path / f"session-{rank}").touch()

    def has_session(self, rank: int) -> bool:
        """Whether it has."""
        return (self._path / f"session-{rank}").exists()

    @property
    def sessions(self) -> int:
        """Workers whose scripts have made a session."""
        return len([*self._path.glob("session-*")])

    def write(self, facts: CheckedWorker) -> None:
        """Write what a worker says."""
        (self._path / f"facts-{facts.rank}.json").write_text(json.dumps(asdict(facts)))

    def read(self) -> list[CheckedWorker]:
        """All that workers have said, by rank."""
        texts = (path.read_text() for path in self._path.glob("facts-*.json"))
        found = [from_plain(CheckedWorker, json.loads(text)) for text in texts]
        return sorted(found, key=lambda facts: facts.rank)
