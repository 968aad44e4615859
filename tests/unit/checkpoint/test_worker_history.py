"""The files in which workers note what they did."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import pytest

from swift_ft.checkpoint.worker_files import PROFILE, WorkerFiles, of_rank
from swift_ft.checkpoint.worker_history import HISTORIES, GenerationWork, WorkerHistory
from swift_ft.checkpoint.worker_record import WorkerRecord, read_record, sweep_records, write_record
from swift_ft.errors import SwiftError
from swift_ft.runtime.measures.worker_records import WorkerRecords
from swift_ft.storage import files as storage_files
from swift_ft.storage.digest import sealed, unsealed
from swift_ft.storage.store import Store

RUN = "job 7/é.1"
NAME = "rank-00003.g0002.json"


def history(*works: GenerationWork, rank: int = 3) -> WorkerHistory:
    return WorkerHistory(RUN, rank, 2, works)


def write(files: WorkerFiles, *histories: WorkerHistory) -> None:
    for one in histories:
        files.write(one.file, asdict(one))


def read(files: WorkerFiles, name: str = NAME) -> tuple[GenerationWork, ...]:
    return files.read(WorkerHistory, name).generations


@pytest.fixture
def files(tmp_path: Path) -> WorkerFiles:
    return WorkerFiles(Store(tmp_path), RUN)


def test_a_history_is_read_as_it_was_written(files: WorkerFiles) -> None:
    made = history(GenerationWork(2, began=1.5, until=3.25, steps=4), GenerationWork(5))
    write(files, history(GenerationWork(2)), made)  # again, with more
    write(files, history(rank=11))
    assert files.names(HISTORIES) == [NAME, "rank-00011.g0002.json"]
    assert files.read(WorkerHistory, NAME) == made
    assert read(files, "rank-00011.g0002.json") == ()


def test_other_files_are_no_histories(files: WorkerFiles, tmp_path: Path) -> None:
    write(files, history())
    (folder,) = (tmp_path / "runs").glob("*/workers")
    (folder / "rank-00003.g0002.json.1234.tmp").write_text("half of it")
    (folder / "notes.json").write_text("{}")
    assert files.names(HISTORIES) == [NAME]
    assert WorkerFiles(Store(tmp_path), "another").names(HISTORIES) == []


def test_living_workers_may_write_while_others_leftovers_are_swept(
    files: WorkerFiles, tmp_path: Path
) -> None:
    for rank in (3, 11):
        write(files, history(rank=rank))
    (folder,) = tmp_path.glob("runs/*/workers")
    names = ("rank-00003.g0002", "rank-00003.g0004", "rank-00011.g0002", "rank-00012.g0001")
    begun = {name: folder / f"{name}.json.12ab.tmp" for name in names}
    for path in begun.values():
        path.write_text("half of it")
    files.sweep({3: 4, 11: 2, 12: 1})  # worker 3 was replaced, and has written nothing yet
    assert {name for name, path in begun.items() if not path.exists()} == {"rank-00003.g0002"}
    assert len(files.names(HISTORIES)) == 2
    WorkerFiles(Store(tmp_path), "another").sweep({})


@pytest.mark.parametrize("kind", ["profile", "record"])
def test_what_a_living_worker_writes_as_others_leftovers_are_swept_is_written(
    kind: str, files: WorkerFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name does not say of which process it is."""
    store, written = Store(tmp_path), storage_files._write_durably
    swept: list[str] = []

    def written_and_swept(path: str, data: bytes) -> None:
        written(path, data)
        if not swept:
            swept.append(path)
            files.sweep({3: 4})
            sweep_records(store)

    monkeypatch.setattr(storage_files, "_write_durably", written_and_swept)
    if kind == "profile":
        files.write(of_rank(3, PROFILE), {})
        assert files.find(of_rank(3, PROFILE)) is not None
    else:
        record = WorkerRecord((3,), (), 0, 3, 4, {})
        write_record(store, 3, record)
        assert read_record(store, 3) == record
    assert swept
    assert not Path(swept[0]).exists()


def test_what_workers_of_a_larger_world_were_writing_is_swept(files: WorkerFiles, tmp_path: Path) -> None:
    """The present world has two workers: whoever was the third one is gone."""
    write(files, history(rank=0))
    (folder,) = tmp_path.glob("runs/*/workers")
    of_third = ("g0003.trace", "profile", "gradients")
    names = ("rank-00001.g0003", *(f"rank-00002.{kind}" for kind in of_third), "rank-00010.g0001")
    begun = {name: folder / f"{name}.json.12ab.tmp" for name in names}
    for path in begun.values():
        path.write_text("half of it")
    files.sweep({0: 3, 1: 3}, workers=2)
    assert [name for name, path in begun.items() if path.exists()] == ["rank-00001.g0003"]


def test_what_a_replaced_worker_0_was_writing_about_the_run_is_swept(
    files: WorkerFiles, tmp_path: Path
) -> None:
    write(files, history(rank=0))
    (run,) = tmp_path.glob("runs/*")
    begun = [run / f"{name}.12ab.tmp" for name in ("layers.json", "run.json")]
    kept = run / "layers.json"
    for path in (*begun, kept):
        path.write_text("{}")
    files.sweep({0: 1, 1: 3})  # it may be writing now
    assert all(path.exists() for path in begun)
    files.sweep({0: 2, 1: 1})
    assert not any(path.exists() for path in begun)
    assert kept.exists()


def test_damage_is_named(files: WorkerFiles, tmp_path: Path) -> None:
    write(files, history(GenerationWork(2, steps=4)))
    (path,) = tmp_path.glob("runs/*/workers/*")
    path.write_text(path.read_text().replace('"steps": 4', '"steps": 5'))
    with pytest.raises(SwiftError, match=r"rank-00003.g0002.json does not match its digest"):
        read(files)
    path.write_text("[]")
    with pytest.raises(SwiftError, match=r"rank-00003.g0002.json is no JSON object"):
        read(files)
    path.unlink()
    with pytest.raises(SwiftError, match=r"rank-00003.g0002.json is gone"):
        read(files)


def test_what_a_later_version_adds_is_ignored(files: WorkerFiles, tmp_path: Path) -> None:
    write(files, history(GenerationWork(2, steps=4)))
    (path,) = tmp_path.glob("runs/*/workers/*")
    content = unsealed(json.loads(path.read_text()))
    assert content is not None
    content["generations"][0]["joules"] = 12.0
    path.write_text(json.dumps(sealed(content)))
    assert read(files) == (GenerationWork(2, steps=4),)


def test_the_newest_is_written_in_the_background(files: WorkerFiles, tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as background:
        records = WorkerRecords(Store(tmp_path), RUN, 3, background)
        for steps in range(100):
            records.write_history(history(GenerationWork(2, steps=steps)))
    assert read(files)[0].steps == 99
    records.write_history(history(GenerationWork(2)))  # this process ends: no error, and nothing is written
    assert read(files)[0].steps == 99


def test_a_store_that_takes_nothing_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "runs").write_text("in the way")
    with ThreadPoolExecutor(1) as background:
        records = WorkerRecords(Store(tmp_path, patience_s=0.1), "run", 3, background)
        for steps in range(3):
            records.write_history(history(GenerationWork(2, steps=steps)))
            background.submit(int).result(60)
    events = [getattr(record, "event", "") for record in caplog.records]
    assert events.count("worker_file_not_written") == 1
