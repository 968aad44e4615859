"""Whose store is it: one run at a time, and nothing is overwritten unasked.

run.json    the run's name, its shape, and the runs that it went on from
"""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store as Rendezvous
from torch.distributed import DistError

from swift_ft.config import WorkerContext
from swift_ft.errors import (
    ForeignLogError,
    GaveUpError,
    RecoveryError,
    StoreInUseError,
    TopologyMismatchError,
    UsageError,
)
from swift_ft.logging import Store, parse_segment_name, read_segment
from swift_ft.logging.store import TEMPORARY_SUFFIX
from swift_ft.recovery.checkpoint import CheckpointFolder

__all__ = ["claim_store", "log_directory", "tidy_store"]

_RECORD = "run.json"
_CLAIMED = "claimed"
_LOG_ROOT = "log"


def log_directory(rank: int) -> str:
    """Where a worker logs."""
    return f"{_LOG_ROOT}/rank-{rank:05d}"


def claim_store(
    store: Store, context: WorkerContext, rendezvous: Rendezvous, topology: dict[str, Any], timeout_s: float
) -> int | None:
    """Make the store this run's own. Worker 0 decides, the others wait for it.

    Returns:
        The iteration of the last committed checkpoint, for the worker that decided; None for all others, and
        where there is no checkpoint.

    Raises:
        StoreInUseError, TopologyMismatchError: see the command line's ``--resume`` and
            ``--fresh``.
        GaveUpError: if worker 0 does not decide in time.
    """
    if context.rank != 0:
        try:
            rendezvous.wait([_CLAIMED], timedelta(seconds=timeout_s))
        except (DistError, RuntimeError) as error:
            raise GaveUpError(f"Worker 0 did not claim {store.url} within {timeout_s:g} s.") from error
        return None
    if rendezvous.check([_CLAIMED]):  # by a worker 0 that is no more, and may not have told
        found: int | None = json.loads(rendezvous.get(_CLAIMED))["checkpoint"]
        return found
    checkpoint = _decide(store, context, topology)
    rendezvous.set(_CLAIMED, json.dumps({"checkpoint": checkpoint}))
    return checkpoint


def tidy_store(store: Store) -> None:
    """When all workers are done: remove what those left that were killed while they tried the store."""
    for name in store.list(""):
        if name.endswith(TEMPORARY_SUFFIX):
            store.delete(name)


def _decide(store: Store, context: WorkerContext, topology: dict[str, Any]) -> int | None:
    record = store.read_json(_RECORD)
    used = record is not None and record["run_id"] != context.run_id
    if record is None and any(not name.endswith(TEMPORARY_SUFFIX) for name in store.list("")):
        raise StoreInUseError(
            f"{store.url} is not empty and holds no run of swift_ft: choose an empty place for the store.",
            path=store.url,
        )
    if used and not context.store_mode:
        raise StoreInUseError(
            f"{store.url} holds run {record and record['run_id']}: go on from its last checkpoint with "
            "--resume, delete it with --fresh, or choose another store.",
            path=store.url,
        )
    if used and context.store_mode == "fresh":
        store.delete_all()
        record = None
    earlier: list[str] = [*record["earlier"], record["run_id"]] if used and record is not None else []
    if used and record is not None:
        _check_topology(store, record["topology"], topology)
        _take_over_logs(store, {*earlier})
    if record is None and context.store_mode == "resume":
        raise UsageError(f"{store.url} holds nothing to resume: leave --resume away for the first run.")
    store.write_json(_RECORD, {"run_id": context.run_id, "topology": topology, "earlier": earlier})
    return max(CheckpointFolder(store).committed(), default=None)


def _check_topology(store: Store, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    differences = [
        f"{name} {theirs.get(name)} there, {ours[name]} here"
        for name in ours
        if theirs.get(name) != ours[name]
    ]
    if differences:
        raise TopologyMismatchError(
            f"The checkpoint in {store.url} was made by another topology ({'; '.join(differences)}): "
            "start with the same one, or choose another store.",
            path=store.url,
        )


def _take_over_logs(store: Store, known: set[str]) -> None:
    """Delete earlier logs, which a resumed run has no use for; but a stranger's are not ours to delete."""
    for folder in store.list(_LOG_ROOT):
        directory = f"{_LOG_ROOT}/{folder}"
        segments = [name for name in store.list(directory) if parse_segment_name(name) is not None]
        for name in segments[:1]:
            _check_owner(store, f"{directory}/{name}", known)
        store.delete(directory, recursive=True)


def _check_owner(store: Store, path: str, known: set[str]) -> None:
    refused: ForeignLogError | None = None
    for run_id in known:
        try:
            read_segment(store, path, run_id)
        except ForeignLogError as error:
            refused = error
        except RecoveryError:  # torn or corrupt: whose it is cannot be told, and nobody can use it
            return
        else:
            return
    if refused is not None:
        raise StoreInUseError(
            f"The log segment {path} in {store.url} belongs to another run: move it away, or choose "
            "another store.",
            path=path,
        )
