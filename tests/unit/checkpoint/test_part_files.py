"""Files of checkpoints that are nearer than the store."""

from __future__ import annotations

import io
import logging
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from torch import nn

from swift_ft.checkpoint.checkpointer import Checkpointer
from swift_ft.checkpoint.folder import CheckpointFolder
from swift_ft.checkpoint.part_files import LoadedBytes, LocalParts, PartFiles
from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.storage.digest import digest_of_file
from swift_ft.storage.store import Store

PATH = "checkpoints/00000020/rank-00001.g00002/__0_0.distcp"
CONTENT = bytes(range(256)) * 40
EXPECTED = digest_of_file(io.BytesIO(CONTENT))


@pytest.fixture
def local(tmp_path: Path) -> LocalParts:
    return LocalParts(tmp_path / "disk", "s3://bucket/run")


def write(local: LocalParts, content: bytes = CONTENT, path: str = PATH) -> None:
    with local.written(path) as more:
        more(content[:100])
        more(memoryview(content[100:]))


def read(files: PartFiles, path: str = PATH) -> bytes | None:
    file = files.nearer(path, EXPECTED)
    if file is None:
        return None
    with file:
        return file.read()


def from_peer(content: bytes) -> Any:
    return lambda path: io.BytesIO(content)


def test_own_disk_first(local: LocalParts) -> None:
    write(local)
    files = PartFiles(local)
    files.peer = from_peer(CONTENT)
    assert read(files) == CONTENT
    assert files.take_loaded() == LoadedBytes(own_disk=len(CONTENT))
    assert files.take_loaded() == LoadedBytes()


def test_then_another_machine_s(local: LocalParts) -> None:
    files = PartFiles(local)
    files.peer = from_peer(CONTENT)
    assert read(files) == CONTENT
    assert files.take_loaded() == LoadedBytes(peers=len(CONTENT))


def test_nowhere(local: LocalParts) -> None:
    assert read(PartFiles(local)) is None
    assert read(PartFiles(None)) is None


@pytest.mark.parametrize("damaged", [CONTENT[:-1], CONTENT[:-1] + b"?", b""])
def test_a_copy_that_is_not_what_was_saved(
    damaged: bytes, local: LocalParts, caplog: pytest.LogCaptureFixture
) -> None:
    write(local, damaged)
    files = PartFiles(local)
    assert read(files) is None
    assert "A near copy of" in caplog.text
    files.peer = from_peer(CONTENT)
    assert read(files) == CONTENT
    assert files.take_loaded() == LoadedBytes(peers=len(CONTENT))


def test_a_machine_that_does_not_answer(local: LocalParts, caplog: pytest.LogCaptureFixture) -> None:
    def refused(path: str) -> IO[bytes]:
        raise ConnectionRefusedError(path)

    files = PartFiles(local)
    files.peer = refused
    assert read(files) is None
    assert "the next place that has it is asked" in caplog.text


def test_a_file_of_unknown_content_is_not_taken(local: LocalParts) -> None:
    write(local)
    assert PartFiles(local).nearer(PATH, None) is None


def test_a_disk_that_takes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The checkpoint itself is not hurt."""
    (tmp_path / "disk").write_text("a file where the folder should be")
    local = LocalParts(tmp_path / "disk", "s3://bucket/run")
    write(local)
    assert "There is no copy of" in caplog.text
    assert local.parts() == []


def test_a_disk_that_fills_up(local: LocalParts, caplog: pytest.LogCaptureFixture) -> None:
    with local.written(PATH) as more:
        more(CONTENT[:100])
        more.__self__._file.close()  # type: ignore[attr-defined]
        more.__self__._file = FullDisk()  # type: ignore[attr-defined]
        more(CONTENT[100:])
        more(b"nothing is tried any more")
    assert "No space left" in caplog.text
    with pytest.raises(FileNotFoundError):
        local.find(PATH)


class FullDisk(io.BytesIO):
    def write(self, data: Any) -> int:
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    "path", ["checkpoints/../../../etc", "checkpoints/a/b/c/d", "x", "checkpoints/../../a"]
)
def test_what_is_no_file_of_a_part(path: str, local: LocalParts) -> None:
    write(local)
    with pytest.raises(FileNotFoundError):
        local.find(path)


def test_older_checkpoints_go(local: LocalParts) -> None:
    for iteration in (10, 20, 30):
        write(local, path=f"checkpoints/{iteration:08d}/rank-00001.g00002/__0_0.distcp")
    local.drop_before(20)
    assert local.parts() == [f"checkpoints/{i:08d}/rank-00001.g00002" for i in (20, 30)]


def test_another_store_s_copies_are_others(local: LocalParts, tmp_path: Path) -> None:
    write(local)
    assert LocalParts(tmp_path / "disk", "s3://bucket/other").parts() == []


def test_a_part_is_loaded_from_its_copies(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also when the store lost all but the marker and the list of files: nothing else is read there."""
    caplog.set_level(logging.INFO)
    folder = CheckpointFolder(Store(str(tmp_path / "store")))
    model = nn.Linear(8, 8)
    state = TrainingState({"model": model, "optimizer": torch.optim.AdamW(model.parameters())})
    checkpointer = Checkpointer(folder, state, LocalParts(tmp_path / "disk", folder.store.url))
    saved: list[str] = []
    checkpointer.save(20, path := folder.part(20, 0, 1), saved.append)
    assert checkpointer.wait(30)
    folder.commit(20, {0: path}, "run", {path: saved[0]})
    before = model.weight.detach().clone()
    size = 0
    for file in (tmp_path / "store" / path).iterdir():
        if file.name != "digests.json":
            size += file.stat().st_size
            file.unlink()
    with torch.no_grad():
        model.weight.zero_()
    checkpointer.load(20, 0)
    assert torch.equal(model.weight, before)
    assert checkpointer.files.take_loaded() == LoadedBytes(own_disk=size)
