"""Parts of files that are mapped: what cannot be read is not mapped, so that no reader is killed."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest

from swift_ft.storage import files
from swift_ft.storage.store import Store

PAGE = mmap.ALLOCATIONGRANULARITY


@pytest.fixture
def content(tmp_path: Path) -> bytes:
    data = bytes(range(251)) * (3 * PAGE // 251)
    (tmp_path / "x.bin").write_bytes(data)
    return data


def test_a_part_is_what_the_file_holds(content: bytes, tmp_path: Path) -> None:
    with (tmp_path / "x.bin").open("rb") as file:
        part = files.map_part(file.fileno(), PAGE, 100)
        assert part is not None
        assert bytes(part) == content[PAGE : PAGE + 100]


def test_no_part_begins_within_a_page_or_ends_behind_the_file(content: bytes, tmp_path: Path) -> None:
    with (tmp_path / "x.bin").open("rb") as file:
        assert files.map_part(file.fileno(), 10, 10) is None
        assert files.map_part(file.fileno(), 0, len(content) + 1) is None


def test_pages_that_cannot_be_read_are_not_offered(tmp_path: Path) -> None:
    """As on a disk that fails: to touch them would kill the process."""
    with (tmp_path / "x.bin").open("w+b") as file:
        file.write(bytes(4 * PAGE))
        file.flush()
        view = mmap.mmap(file.fileno(), 4 * PAGE, access=mmap.ACCESS_READ)
        assert files._is_read(view)
        file.truncate(PAGE)
        assert not files._is_read(view)


@pytest.mark.parametrize("piece_bytes", [PAGE, 2 * PAGE, 1000])
def test_pieces_are_the_same_without_maps(
    piece_bytes: int, content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path)
    pieces = [bytes(piece) for piece in store.read_pieces("x.bin", piece_bytes)]
    assert b"".join(pieces) == content
    monkeypatch.setattr(files, "map_part", lambda *_: None)
    assert [bytes(piece) for piece in store.read_pieces("x.bin", piece_bytes)] == pieces
