"""Files that are parsed through a map, and whose content is read into buffers."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from swift_ft.storage import local_source
from swift_ft.storage.local_source import LocalSource

DATA = bytes(range(251)) * 100


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "x.bin"
    found.write_bytes(DATA)
    return found


def test_a_part_is_read_piece_by_piece(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_source, "_PIECE_BYTES", 1000)
    source = LocalSource(str(path))
    source.read_ahead()
    source.seek(77)
    buffer = bytearray(2500)
    pieces = list(source.read_into(memoryview(source.read_buffer(2500)), memoryview(buffer)))
    assert [piece.nbytes for piece in pieces] == [1000, 1000, 500]
    assert b"".join(pieces) == bytes(buffer) == DATA[77:2577]


def test_what_a_map_has_forgotten_is_still_there(path: Path) -> None:
    source = LocalSource(str(path))
    before = source.read()
    source.forget_pages()
    source.seek(0)
    assert source.read() == before == DATA


def test_an_empty_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    source = LocalSource(str(tmp_path / "empty"))
    source.read_ahead()
    source.forget_pages()
    assert (source.size(), source.read()) == (0, b"")
    assert list(source.read_into(memoryview(b""), memoryview(b""))) == []


def test_an_absent_file_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        LocalSource(str(tmp_path / "absent"))


def test_a_file_that_was_cut_short_raises(path: Path) -> None:
    source = LocalSource(str(path))
    part = memoryview(source.read_buffer(len(DATA)))
    os.truncate(path, 10_000)
    with pytest.raises(OSError, match="ends after 10000 bytes"):
        list(source.read_into(part, memoryview(bytearray(len(DATA)))))


@pytest.mark.parametrize("error", [errno.EINVAL, errno.EIO])
def test_a_disk_that_fails_raises_and_a_file_system_that_cannot_splice_does_not(
    path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    def fails(*_: object) -> int:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "sendfile", fails)
    source = LocalSource(str(path))
    if error == errno.EINVAL:
        source.read_ahead()
    else:
        with pytest.raises(OSError, match="Input/output"):
            source.read_ahead()


def test_a_file_is_closed_with_its_last_view(path: Path) -> None:
    before = open_files()
    source = LocalSource(str(path))
    assert open_files() > before
    del source
    assert open_files() == before


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
