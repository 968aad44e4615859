"""A bundle for a bug report: all that the store tells of a run, without its tensors."""

from __future__ import annotations

import io
import json
import platform
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from swift_ft.checkpoint.folder import MARKER
from swift_ft.checkpoint.run_record import read_record
from swift_ft.checkpoint.worker_files import WorkerFiles
from swift_ft.checkpoint.worker_history import HISTORIES
from swift_ft.errors import UsageError, first_line
from swift_ft.offline.archive import read_journal
from swift_ft.offline.run_store import RunStore, store_errors
from swift_ft.program.secrets import without_secrets
from swift_ft.storage.store import Store

_PACKAGES = ("swift-ft", "torch", "pyarrow", "fsspec", "s3fs", "hdfs-native", "numpy")
_LARGEST_MARKER = 16 << 20


@dataclass(frozen=True, slots=True)
class Bundle:
    """A bundle that was written.

    Attributes:
        run_id: the run.
        members: names of what is in it.
        problems: what is missing or damaged, one line each; the bundle has them, too.
    """

    path: str
    size_bytes: int
    run_id: str
    members: tuple[str, ...]
    entries: int
    problems: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary."""
        return asdict(self)


def export_run(
    run: RunStore, run_id: str, path: Path, on_file: Callable[[int], None] = lambda count: None
) -> Bundle:
    """Write the bundle of a run.

    It holds the journal, the recoveries in it, what workers noted of their steps, the store's record, the
    markers of checkpoints, names and sizes of all files, and versions of this machine's packages. It holds no
    tensor, no credentials, and nothing of the environment.

    Args:
        run: its store, or that of a run which continued it.
        run_id: the run.
        path: of the file, which must not exist.
        on_file: called with the number of files that were read since the last call, by any thread.

    Raises:
        UsageError: there is no such run, the store cannot be read, or the file cannot be written.
    """
    journal = read_journal(run.store, run.named(run_id), on_file)
    members = dict(_members(run, run_id, on_file))
    members["journal.jsonl"] = "".join(f"{json.dumps(entry.to_dict())}\n" for entry in journal.entries)
    members["problems.txt"] = "".join(f"{problem}\n" for problem in journal.problems)
    members["recoveries.json"] = _json([recovery.to_dict() for recovery in journal.history.recoveries])
    _write(path, run_id, {name: without_secrets(run.store.redacted(text)) for name, text in members.items()})
    size = path.stat().st_size
    return Bundle(str(path), size, run_id, tuple(sorted(members)), len(journal.entries), journal.problems)


def _members(run: RunStore, run_id: str, on_file: Callable[[int], None]) -> Iterator[tuple[str, str]]:
    store = run.store
    with store_errors(store):
        yield "run.json", _json(read_record(store))
        files = store.find("")
        for name in sorted(files):
            if name.endswith(f"/{MARKER}") and files[name].size < _LARGEST_MARKER:
                yield name, _text(store, name)
                on_file(1)
        workers = WorkerFiles(store, run_id)
        for name in workers.names(HISTORIES):
            yield f"workers/{name}", _text(store, workers.path(name))
            on_file(1)
    yield "files.json", _json({name: asdict(file) for name, file in sorted(files.items())})
    yield "versions.json", _json({"store": store.url, **_versions()})


def _text(store: Store, name: str) -> str:
    """A marker as it is, damaged or not."""
    with store.open_read(name) as source:
        return bytes(source.read()).decode(errors="replace")


def _versions() -> dict[str, str]:
    found = {"Python": platform.python_version(), "system": platform.platform()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def _json(content: Any) -> str:
    return json.dumps(content, indent=1) + "\n"


def _write(path: Path, run_id: str, members: dict[str, str]) -> None:
    draft = path.with_name(f"{path.name}.tmp")
    folder = run_id.replace("/", "_")
    try:
        if path.exists():
            raise UsageError(f"{path} exists: give another name, or remove it")
        with tarfile.open(draft, "x:gz") as archive:
            for name, text in sorted(members.items()):
                data = text.encode()
                about = tarfile.TarInfo(f"{folder}/{name}")
                about.size = len(data)
                archive.addfile(about, io.BytesIO(data))
        draft.rename(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be written ({first_line(error)}): give another place") from error
