"""The garbage of a store: what no recovery needs, and its deletion. The only module here that writes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa

from swift_ft.errors import UsageError
from swift_ft.logging.format.encoding import identity_of
from swift_ft.logging.format.segment import parse_segment_name
from swift_ft.offline.archive import read_journal
from swift_ft.offline.run_store import RunStore
from swift_ft.recovery.job_state import Phase
from swift_ft.storage.files import FileFacts
from swift_ft.storage.store import Store
from swift_ft.units import format_seconds

_LOGS = "log"
_HEADER_BYTES = 1 << 16
"""More than a segment's schema, which says who wrote it."""


@dataclass(frozen=True, slots=True)
class Garbage:
    """Something that could be deleted.

    Attributes:
        path: of a file or a folder in the store.
        size: bytes of all that is in it.
        why: no recovery needs it.
        is_folder: and not a file.
    """

    path: str
    size: int
    why: str
    is_folder: bool


@dataclass(frozen=True, slots=True)
class GarbageReport:
    """The files of a store that could be deleted.

    Attributes:
        url: of the store, without credentials.
        run_id: the run that owns it.
        may_be_alive: why that run may still be at work; empty if its journal says that it ended.
        garbage: by path.
        uploads: of objects that were never completed, which no listing shows.
        total_bytes: over all the garbage.
        store_bytes: of all files in the store, garbage included.
    """

    url: str
    run_id: str
    may_be_alive: str
    garbage: tuple[Garbage, ...]
    uploads: tuple[Garbage, ...]
    total_bytes: int
    store_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary."""
        return asdict(self)


def find_garbage(run: RunStore) -> GarbageReport:
    """Find what a resumed run would delete at its start, without deleting it, and old log segments.

    No committed checkpoint is garbage, whatever its age, and no segment that reaches the oldest of them.

    Raises:
        UsageError: the archived journal cannot be read.
        Exception: what the store's client raised.
    """
    files = run.store.find("")
    garbage = tuple(sorted(_garbage(run, files), key=lambda one: one.path))
    uploads = tuple(
        Garbage(path, size, "its upload was never completed", is_folder=False)
        for path, size in sorted(run.store.abandoned_uploads("").items())
    )
    return GarbageReport(
        url=run.store.url,
        run_id=run.run_id,
        may_be_alive=_why_alive(run, files),
        garbage=garbage,
        uploads=uploads,
        total_bytes=sum(one.size for one in (*garbage, *uploads)),
        store_bytes=sum(facts.size for facts in files.values()),
    )


def delete_garbage(
    run: RunStore, report: GarbageReport, *, over: bool, on_bytes: Callable[[int], None] = lambda count: None
) -> None:
    """Delete what was found. Files of a run that is alive would be among it.

    Args:
        run: the store.
        report: what was found in it.
        over: the user says that the run has ended, although its journal does not.
        on_bytes: called with the bytes of each thing that was deleted.

    Raises:
        UsageError: the run may be alive.
        Exception: what the store's client raised.
    """
    if report.may_be_alive and not over:
        raise UsageError(
            f"nothing was deleted: run {run.run_id} may be alive ({report.may_be_alive}). Wait for its end, "
            "or give --yes if you know that all its workers are gone"
        )
    for one in report.garbage:
        run.store.delete(one.path, recursive=one.is_folder)
        on_bytes(one.size)
    if report.uploads:
        run.store.abort_uploads("")
        on_bytes(sum(one.size for one in report.uploads))


def _why_alive(run: RunStore, files: Mapping[str, FileFacts]) -> str:
    journal = read_journal(run.store, run.run_id)
    later = journal.after_gaps()
    if journal.last_state().phase == Phase.ENDED or (later is not None and later.verdict is not None):
        return ""
    what = "its archived journal has no end" if journal.entries else "no journal is archived"
    times = [facts.modified for facts in files.values() if facts.modified is not None]
    if not times:
        return what
    return f"{what}, and its newest file is {format_seconds(max(0.0, time.time() - max(times)))} old"


def _garbage(run: RunStore, files: Mapping[str, FileFacts]) -> Iterator[Garbage]:
    store, folder = run.store, run.checkpoints

    def found(path: str, why: str) -> Garbage:
        if path in files:
            return Garbage(path, files[path].size, why, is_folder=False)
        below = (facts.size for name, facts in files.items() if name.startswith(f"{path}/"))
        return Garbage(path, sum(below), why, is_folder=True)

    for name in store.temporary_files(""):
        yield found(name, "left by a worker that was killed")
    for path in folder.uncommitted():
        yield found(path, "parts of a checkpoint that was never committed")
    committed = folder.committed()
    for iteration in committed:
        for path in folder.orphans(iteration):
            yield found(path, "left by an attempt to save this checkpoint that failed")
    for directory in store.list(_LOGS):
        for name in store.temporary_files(f"{_LOGS}/{directory}"):
            yield found(f"{_LOGS}/{directory}/{name}", "a segment whose writer was killed")
        for path, why in _old_segments(run, f"{_LOGS}/{directory}", committed[0] if committed else 0):
            yield found(path, why)


def _old_segments(run: RunStore, directory: str, oldest: int) -> Iterator[tuple[str, str]]:
    for file in run.store.list(directory):
        path, name = f"{directory}/{file}", parse_segment_name(file)
        if name is None:
            continue
        if name.max_iteration < oldest:
            yield path, f"all of it is older than the checkpoint of iteration {oldest}, the oldest one"
        elif (writer := _run_of(run.store, path)) in run.earlier:
            yield path, f"the log of run {writer}, which this one continued from a checkpoint"


def _run_of(store: Store, path: str) -> str:
    """The run that wrote a segment; empty if that cannot be read, and it is left alone."""
    header = next(store.read_pieces(path, _HEADER_BYTES), memoryview(b""))
    try:
        identity, _ = identity_of(pa.ipc.read_schema(pa.BufferReader(header)))
    except (ValueError, KeyError, OSError):  # Arrow's own errors are of these classes
        return ""
    return identity.run_id
