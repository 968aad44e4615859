"""The store's record of the run that owns it, and of earlier runs.

run.json               of the newest run: its name, its topology, and the runs that it continues
runs/<run>/run.json    the same of each run. The newest of these mends the first one

Both have their own digest.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from swift_ft.checkpoint.folder import CheckpointFolder
from swift_ft.errors import CheckpointError, UsageError
from swift_ft.storage.digest import sealed
from swift_ft.storage.sealed_file import GONE, read_whole
from swift_ft.storage.store import Store

_logger = logging.getLogger(__name__)

RECORD = "run.json"
"""The path of the record that says which run a store belongs to."""

FORMAT = 1
"""Of the store's layout."""

RUNS = "runs"
"""The folder of everything in a store that belongs to a single run."""

_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")
_NEEDED = {"run_id", "topology", "earlier"}
_DIGEST = "digest"


def run_directory(run_id: str) -> str:
    """The store's folder of a run. The user's name for the run may hold any character."""
    return f"{RUNS}/{_UNSAFE.sub('_', run_id)}"


def write_record(store: Store, record: Mapping[str, Any]) -> None:
    """Say which run a store belongs to, and keep a copy, from which it is mended if it is damaged later."""
    whole = sealed({"format": FORMAT, **record})
    store.write_json(f"{run_directory(record['run_id'])}/{RECORD}", whole)
    store.write_json(RECORD, whole)


def read_record(store: Store) -> dict[str, Any] | None:
    """The record of the run that a store belongs to; None if it holds no run.

    Where that file is damaged or gone, the newest run's own copy of it is read instead, and said so.

    Raises:
        UsageError: the record is damaged, and there is no copy; or a newer version of swift_ft wrote it.
    """
    record, damage = _read(store, RECORD)
    if damage and (copy := _newest_copy(store)) is not None:
        _logger.warning(
            "%s: %s %s. What it said is known from the copy of run %s.",
            store.url,
            RECORD,
            damage,
            copy["run_id"],
            extra={"event": "record_mended"},
        )
        record, damage = copy, ""
    if record is None:
        if damage and (damage != GONE or CheckpointFolder(store).committed()):
            raise UsageError(_lost(store, damage))
        return None
    if record.get("format", 0) > FORMAT:
        raise UsageError(
            f"A newer version of swift_ft wrote {store.url} (format {record['format']}, this one knows "
            f"{FORMAT}): install that version, or choose another store."
        )
    if not record.keys() >= _NEEDED:
        raise UsageError(f"{store.url} holds no run of swift_ft: its {RECORD} is something else.")
    return record


def owner_of(store: Store) -> str:
    """The run that a store belongs to now; empty where its record does not say it.

    Raises:
        Exception: what the store's client raised.
    """
    record, _ = _read(store, RECORD)
    return str((record or {}).get("run_id", ""))


def _read(store: Store, path: str) -> tuple[dict[str, Any] | None, str]:
    """A record without its digest, and what is wrong with it; empty for an intact or a strange one."""
    record, damage = read_whole(store, path, _is_strange)
    return record, damage if damage in ("", GONE) else f"is damaged (it {damage})"


def _is_strange(content: Mapping[str, Any]) -> bool:
    """Whether another tool wrote it."""
    return _DIGEST not in content and not content.keys() >= _NEEDED


def _newest_copy(store: Store) -> dict[str, Any] | None:
    """Of the run that continues most others. None if there is no intact one."""
    copies = [record for run in store.list(RUNS) if (record := _copy(store, f"{RUNS}/{run}/{RECORD}"))]
    return max(copies, key=lambda record: len(record["earlier"]), default=None)


def _copy(store: Store, path: str) -> dict[str, Any] | None:
    record, damage = _read(store, path)
    return record if record is not None and not damage and record.keys() >= _NEEDED else None


def _lost(store: Store, damage: str) -> str:
    """The error's text where only checkpoints are left, which do not say how the run was divided."""
    what = f"{store.url}: {RECORD}, which says what run this is, {damage}, and there is no copy in {RUNS}/"
    folder = CheckpointFolder(store)
    committed = folder.committed()
    if not committed:
        return f"{what}. It has no committed checkpoint either: empty that folder, or choose another store."
    newest = f"iteration {committed[-1]}"
    with suppress(CheckpointError):
        newest += f", of {len(folder.parts_of(committed[-1]))} workers"
    return (
        f"{what}. Its {len(committed)} committed checkpoints (the newest of {newest}) are not touched by "
        f"that: put {RECORD} back from a backup and continue with --resume."
    )
