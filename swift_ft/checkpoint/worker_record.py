"""The store's record of a worker's pipeline, from which it can be replayed when the run is gone.

workers/rank-00003.json     its stages, the shapes of their messages, and which machines recover with its own
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from swift_ft.checkpoint.worker_files import write_for_tools
from swift_ft.plain import from_plain
from swift_ft.storage.store import Store

_FOLDER = "workers"


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """A worker's place in its pipeline, as the live job knows it.

    Attributes:
        stages: the pipeline stages on this worker.
        holds: names of the parts whose whole state is on it; workers that hold the same are replicas.
        pipeline: distinguishes its pipeline from the replicas of that one.
        group: the recovery group of its machine. Messages inside a group are not logged.
        linked: stages of other workers, besides the neighbouring ones, to which it also sends messages.
        together: other workers that are rebuilt and replay together with it, because of what the script
            communicates.
        microbatches: per iteration.
        shapes: of its stages' messages, by stage (`torch_adapters/pipelining/stage_metadata.py`).
        setup: what its script communicated before the first step
            (`coordination/setup_communication.py`).
        processor: on which it computes, in words; empty if it is not known. Another one may round otherwise.
    """

    stages: tuple[int, ...]
    holds: tuple[str, ...]
    pipeline: int
    group: int
    microbatches: int
    shapes: Mapping[int, dict[str, Any]]
    setup: Mapping[str, str] = field(default_factory=dict, compare=False)
    linked: tuple[int, ...] = ()
    together: tuple[int, ...] = ()
    processor: str = field(default="", compare=False)


def write_record(store: Store, rank: int, record: WorkerRecord) -> None:
    """Write or replace a worker's record."""
    write_for_tools(store, record_path(rank), asdict(record))


def read_record(store: Store, rank: int) -> WorkerRecord | None:
    """A worker's record; None if there is none: the worker has no pipeline, or never began a step."""
    facts = store.read_json(record_path(rank))
    return None if facts is None else from_plain(WorkerRecord, facts)


def sweep_records(store: Store) -> None:
    """Delete what workers left that were killed while they wrote their records."""
    store.sweep(_FOLDER)


def record_path(rank: int) -> str:
    """The file of a worker's record."""
    return f"{_FOLDER}/rank-{rank:05d}.json"
