"""What each process did in a recovery, in the store."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from swift_ft.checkpoint.recording_file import StoredRecording, clock_of_host, recording_names
from swift_ft.checkpoint.worker_files import WorkerFiles
from swift_ft.checkpoint.worker_history import HISTORIES
from swift_ft.errors import SwiftError
from swift_ft.observe.spans import Recording, Span
from swift_ft.storage.store import Store

RUN = "job.1-0a1b2c3d"
WORKER = StoredRecording(
    RUN,
    2,
    "worker 3",
    3,
    "m-1.0",
    1,
    "boot/time",
    Recording(
        5, 90, 1_000, (Span("load", 6, 20, "", {"iteration": 3}),), ((4, 6, 30),), ((5, 7),), left_out=1
    ),
)
AGENT = replace(WORKER, by="agent m-1", rank=None, slot=None)


@pytest.fixture
def files(tmp_path: Path) -> WorkerFiles:
    return WorkerFiles(Store(tmp_path), RUN)


def write(files: WorkerFiles, *recordings: StoredRecording) -> None:
    for stored in recordings:
        files.write(stored.file, asdict(stored))


def test_it_is_read_as_it_was_written(files: WorkerFiles, tmp_path: Path) -> None:
    write(files, WORKER, AGENT, replace(WORKER, generation=3))
    names = recording_names(files, {2})
    assert names == ["agent-m-1.0.g0002.trace.json", "rank-00003.g0002.trace.json"]
    assert [files.read(StoredRecording, name) for name in names] == [AGENT, WORKER]
    assert recording_names(files) == [*names, "rank-00003.g0003.trace.json"]
    assert recording_names(WorkerFiles(Store(tmp_path), "another"), {2}) == []
    assert files.names(HISTORIES) == []  # these are other files


def test_damage_is_named(files: WorkerFiles, tmp_path: Path) -> None:
    write(files, WORKER)
    (path,) = tmp_path.glob("runs/*/workers/*")
    path.write_text(path.read_text().replace('"load"', '"lead"'))
    with pytest.raises(SwiftError, match=r"rank-00003.g0002.trace.json does not match its digest"):
        files.read(StoredRecording, path.name)


def test_what_killed_processes_left_is_swept(files: WorkerFiles, tmp_path: Path) -> None:
    write(files, WORKER)
    folder = tmp_path / "runs" / RUN / "workers"
    begun = {
        name: folder / f"{name}.trace.json.12ab.tmp"
        for name in ("rank-00003.g0002", "rank-00003.g0004", "agent-m-1.0.g0002", "agent-m-2.1.g0002")
    }
    for path in begun.values():
        path.write_text("half of it")
    files.sweep({3: 4}, {"m-2.1"})
    assert {name for name, path in begun.items() if not path.exists()} == {
        "rank-00003.g0002",
        "agent-m-1.0.g0002",
    }


def test_processes_of_a_host_share_a_clock() -> None:
    assert clock_of_host() == clock_of_host() != ""
