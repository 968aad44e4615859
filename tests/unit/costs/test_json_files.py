"""Files that tools write: whole, in the place that was named."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from swift_ft.costs.json_files import read_text, write_text
from swift_ft.errors import UsageError


def test_a_file_is_replaced_and_nothing_stays_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    for text in ("first", "second é"):
        write_text(path, text)
        assert read_text(path) == text
    assert [*tmp_path.iterdir()] == [path]


def test_the_file_behind_a_link_is_written(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    link, target = tmp_path / "link", tmp_path / "there" / "target"
    link.symlink_to(target)
    write_text(link, "text")
    assert link.is_symlink()
    assert target.read_text() == "text"


def test_a_pipe_stays_one(tmp_path: Path) -> None:
    path, heard = tmp_path / "pipe", list[str]()
    os.mkfifo(path)
    reader = threading.Thread(target=lambda: heard.append(path.read_text()), daemon=True)
    reader.start()
    write_text(path, "text")
    reader.join(60)
    assert heard == ["text"]
    assert path.is_fifo()


@pytest.mark.parametrize("place", ["nowhere/a", "."])
def test_a_place_that_takes_no_file_is_named(place: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be written"):
        write_text(tmp_path / place, "text")
