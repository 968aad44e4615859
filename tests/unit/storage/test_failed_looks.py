"""A look at a store that fails says nothing about what is there: no file counts as absent for it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import s3fs

from swift_ft.checkpoint.folder import MARKER, CheckpointFolder
from swift_ft.storage.remote import S3Files
from swift_ft.storage.store import Store

NUMBERS = [errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EACCES]


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    """One committed checkpoint, of iteration 20."""
    folder = CheckpointFolder(Store(str(tmp_path / "store")))
    part = folder.part(20, 0, 1)
    folder.store.write_json(f"{part}/data.json", {})
    folder.commit(20, {0: part}, "run", {})
    return folder


class Fails:
    """Calls with a path of some end fail, so often.

    Attributes:
        struck: how often one did.
    """

    def __init__(self, original: Callable[..., Any], end: str, number: int, times: int = 1) -> None:
        self._original, self._end, self._number, self._times = original, end, number, times
        self.struck = 0

    def __call__(self, path: Any = ".", *args: Any, **options: Any) -> Any:
        if self.struck < self._times and isinstance(path, str) and path.endswith(self._end):
            self.struck += 1
            raise OSError(self._number, os.strerror(self._number), path)
        return self._original(path, *args, **options)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_checkpoint_stays_whose_marker_could_not_be_seen(
    folder: CheckpointFolder, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "stat", fails := Fails(os.stat, f"/{MARKER}", number))
    folder.sweep()
    assert fails.struck == 1
    assert folder.committed() == [20]
    assert folder.store.list("checkpoints/00000020") == [MARKER, "rank-00000.g00001"]


@pytest.mark.parametrize("number", NUMBERS)
def test_no_older_checkpoint_is_taken_for_the_newest(
    folder: CheckpointFolder, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "stat", fails := Fails(os.stat, f"/{MARKER}", number, times=2))
    with pytest.raises(OSError, match=os.strerror(number)):
        CheckpointFolder(folder.store.at_once()).committed()
    with pytest.raises(OSError, match=os.strerror(number)):
        CheckpointFolder(folder.store.at_once()).uncommitted()
    assert fails.struck == 2


def test_no_file_is_left_out_of_a_listing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(str(tmp_path / "store"))
    for path in ("a.json", "inner/b.json", "inner/inmost/c.json"):
        store.write_json(path, {})
    monkeypatch.setattr(os, "scandir", fails := Fails(os.scandir, "/inmost", errno.EIO, times=2))
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        store.at_once().find("")
    assert sorted(store.find("")) == ["a.json", "inner/b.json", "inner/inmost/c.json"]
    assert fails.struck == 2


def test_a_folder_that_goes_while_others_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(str(tmp_path / "store"))
    for path in ("a.json", "inner/b.json"):
        store.write_json(path, {})
    monkeypatch.setattr(os, "scandir", fails := Fails(os.scandir, "/inner", errno.ENOENT))
    assert sorted(store.find("")) == ["a.json"]
    assert fails.struck == 1


def test_what_a_disk_keeps_for_its_repairs_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of samples may be a disk of its own."""
    store = Store(str(tmp_path / "store"))
    store.write_json("a.json", {})
    (tmp_path / "store" / "lost+found").mkdir()
    monkeypatch.setattr(os, "scandir", fails := Fails(os.scandir, "/lost+found", errno.EACCES))
    assert sorted(store.at_once().find("")) == ["a.json"]
    assert fails.struck == 1


class Bucket(s3fs.S3FileSystem):  # type: ignore[misc]  # s3fs has no types
    """A bucket with one object. The first look at it fails; there is nothing below it."""

    cachable = False

    def __init__(self) -> None:
        super().__init__(anon=True)
        self.struck = 0

    async def _info(self, path: str, *_: Any, **__: Any) -> dict[str, Any]:
        if not self.struck:
            self.struck += 1
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        if not path.endswith(MARKER):
            raise FileNotFoundError(path)
        return {"name": path, "type": "file", "size": 1}

    def find(self, path: str, *_: Any, **__: Any) -> list[str]:
        return []


def test_an_object_that_could_not_be_seen_is_not_absent() -> None:
    bucket = Bucket()
    files = S3Files(bucket)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        files.exists(f"bucket/{MARKER}")
    assert bucket.struck == 1
    assert files.exists(f"bucket/{MARKER}")
    assert not files.exists("bucket/other.json")
