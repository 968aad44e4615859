"""A worker's measurements of its first iterations, kept in the store for estimates when the run is gone.

runs/<run>/workers/rank-00003.profile.json     with a digest; written again when a checkpoint has been timed
"""

from __future__ import annotations

from dataclasses import asdict

from swift_ft.checkpoint.store_claim import history_directory
from swift_ft.costs.job import Worker
from swift_ft.plain import from_plain
from swift_ft.storage.digest import sealed
from swift_ft.storage.read_only import read_at_once
from swift_ft.storage.sealed_file import read_whole
from swift_ft.storage.store import Store


def write_profile(store: Store, run_id: str, rank: int, worker: Worker) -> None:
    """Write or replace what a worker measured."""
    store.write_json(_path(run_id, rank), sealed(asdict(worker)))


def read_profiles(store: Store, run_id: str, world_size: int) -> dict[int, Worker]:
    """The measurements of a run's workers, by rank. Those without a whole file are missing.

    Raises:
        Exception: what the store's client raised.
    """
    there = {f"{history_directory(run_id)}/{name}" for name in store.list(history_directory(run_id))}
    ranks = [rank for rank in range(world_size) if _path(run_id, rank) in there]
    read = read_at_once(lambda rank: _read(store, _path(run_id, rank)), ranks)
    return {rank: worker for rank, worker in zip(ranks, read, strict=True) if worker is not None}


def _read(store: Store, path: str) -> Worker | None:
    """The content of a file; None if it is damaged."""
    plain, _ = read_whole(store, path)
    return from_plain(Worker, plain) if plain is not None else None


def _path(run_id: str, rank: int) -> str:
    return f"{history_directory(run_id)}/rank-{rank:05d}.profile.json"
