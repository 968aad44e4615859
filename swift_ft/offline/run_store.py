"""The store of a run, alive or gone: opened to be read, unless a caller says that it changes it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from swift_ft.checkpoint.folder import CheckpointFolder
from swift_ft.checkpoint.run_record import read_record
from swift_ft.checkpoint.worker_files import WorkerFiles
from swift_ft.checkpoint.worker_profile import read_profiles
from swift_ft.costs.job import Worker
from swift_ft.errors import SwiftError, UsageError, first_line
from swift_ft.storage.read_only import ReadOnlyStore
from swift_ft.storage.store import Store

_PATIENCE_S = 10.0
"""An operator waits: a store behind a network that does not answer in this time is reported."""


@dataclass(frozen=True, slots=True)
class RunStore:
    """The store of a run.

    Attributes:
        store: where all of it is. Writing to it is an error, unless it was opened to be changed.
        run_id: the newest run that used it.
        topology: of that run, as its session recorded it.
        earlier: the runs that it continued, oldest first.
        settings: of its session: ``checkpoint_every``, and ``log_disk_bytes`` of each worker (None for no
            limit).
    """

    store: Store
    run_id: str
    topology: dict[str, Any]
    earlier: tuple[str, ...]
    settings: dict[str, Any]

    @property
    def checkpoints(self) -> CheckpointFolder:
        """The checkpoints in it."""
        return CheckpointFolder(self.store)

    def named(self, run_id: str | None) -> str:
        """The name of one of its runs; that of the newest for None.

        Raises:
            UsageError: it holds no such run.
        """
        if run_id is not None and run_id not in (self.run_id, *self.earlier):
            known = ", ".join((*self.earlier, self.run_id))
            raise UsageError(f"{self.store.url} holds no run {run_id}: it has {known}")
        return run_id or self.run_id

    def profiles(self) -> dict[int, Worker]:
        """The measurements of the newest run's workers, by rank.

        Raises:
            UsageError: the store cannot be read.
        """
        with store_errors(self.store):
            workers = self.topology["machines"] * self.topology["workers"]
            return read_profiles(WorkerFiles(self.store, self.run_id), workers)


def open_run_store(url: str, *, writable: bool = False) -> RunStore:
    """Open the store that a session was given.

    Args:
        writable: it is to be changed.

    Raises:
        UsageError: there is no such store, it holds something else, or it cannot be read; in one line with
            what to do.
    """
    store = (Store if writable else ReadOnlyStore)(url, patience_s=_PATIENCE_S)
    if not store.remote:
        store = store.at_once()
    with store_errors(store):
        record = read_record(store)
        names = store.list("") if record is None else []
    if record is None:
        what = "holds no run of swift_ft" if names else "does not exist or is empty"
        raise UsageError(f"{store.url} {what}: give the store that the script gave to swift_ft.Session")
    return RunStore(store, record["run_id"], record["topology"], tuple(record["earlier"]), record["settings"])


@contextmanager
def store_errors(store: Store, done: str = "read") -> Iterator[None]:
    """Turn what the client of a store raises in the block into one line for its user.

    Args:
        store: that is used.
        done: what the block does with it, as a participle.

    Raises:
        UsageError: that cannot be done.
    """
    try:
        yield
    except Exception as error:
        # Clients of stores behind a network raise all kinds of errors.
        if isinstance(error, UsageError) or not (store.remote or isinstance(error, OSError | SwiftError)):
            raise
        cause = store.redacted(first_line(error))
        raise UsageError(
            f"{store.url} cannot be {done} ({cause}): check the path, the network and your credentials"
        ) from error
