"""The sources of a program, as they were: whatever becomes of the files, and of who wrote them."""

from __future__ import annotations

import errno
import os
import signal
import struct
import sys
import tempfile
from pathlib import Path
from types import CodeType

import pytest

from swift_ft.program.kept_sources import KeptSources


def compiled(source: bytes) -> CodeType:
    return compile(source, "some.py", "exec")


def in_child(act: object) -> int:
    """Runs a function in a forked process. Returns its exit code."""
    assert callable(act)
    if (pid := os.fork()) == 0:
        code = 1
        try:
            code = int(act() or 0)
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_what_one_process_keeps_all_have(tmp_path: Path) -> None:
    sources, file = KeptSources(), tmp_path / "some.py"
    file.write_text("A = 1\n")
    assert in_child(lambda: not sources.keep(str(file), "pkg.some", compiled)) == 0
    file.write_text("A = 2\n")
    kept = sources.get(str(file))
    assert kept is not None
    assert (kept.source, kept.module) == (b"A = 1\n", "pkg.some")
    names: dict[str, object] = {}
    exec(kept.code, names)
    assert names["A"] == 1
    assert sources.keep(str(file), "pkg.some", compiled).source == b"A = 1\n"
    assert sources.has_module("some")
    assert not sources.has_module("pkg")


def test_what_changed_and_what_was_only_touched(tmp_path: Path) -> None:
    sources, file = KeptSources(), tmp_path / "some.py"
    file.write_text("A = 1\n")
    kept = sources.keep(str(file), "some", compiled)
    os.utime(file, (1, 1))
    assert not kept.has_changed()
    file.write_text("A = 2\n")
    assert kept.has_changed()
    file.write_text("A = 1\n")
    assert not kept.has_changed()
    file.unlink()
    assert kept.has_changed()


def test_a_writer_that_was_killed_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = KeptSources()
    first, second = tmp_path / "first.py", tmp_path / "second.py"
    first.write_text("A = 1\n")
    second.write_text("B = 2\n")
    write, length_bytes = os.pwrite, struct.calcsize("<Q")

    def dies_before_the_length(file: int, data: bytes, place: int) -> int:
        if len(data) == length_bytes:
            os.kill(os.getpid(), signal.SIGKILL)
        return write(file, data, place)

    def killed() -> None:
        monkeypatch.setattr(os, "pwrite", dies_before_the_length)
        sources.keep(str(first), "first", compiled)

    assert in_child(killed) == -signal.SIGKILL
    assert sources.get(str(first)) is None
    assert sources.keep(str(second), "second", compiled).source == b"B = 2\n"
    assert [kept.module for kept in sources.all()] == ["second"]


def test_what_cannot_be_compiled_is_not_kept(tmp_path: Path) -> None:
    sources, file = KeptSources(), tmp_path / "some.py"
    file.write_text("A =\n")
    with pytest.raises(SyntaxError):
        sources.keep(str(file), "some", compiled)
    assert sources.get(str(file)) is None


def test_processes_that_keep_at_the_same_time(tmp_path: Path) -> None:
    sources = KeptSources()
    files = [tmp_path / f"m{number}.py" for number in range(40)]
    for file in files:
        file.write_text(f"NAME = {file.stem!r}\n")
    children = []
    for _ in range(4):
        if (pid := os.fork()) == 0:
            for file in files:
                sources.keep(str(file), file.stem, compiled)
            os._exit(0)
        children.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 4
    assert sorted(kept.module for kept in sources.all()) == sorted(file.stem for file in files)
    assert "m1" not in sys.modules


def test_a_full_disk_fails_no_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The process runs what it has read, also after an edit; and says once what that means."""

    def no_room(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    sources = KeptSources()
    monkeypatch.setattr(os, "pwrite", no_room)
    for name in ("some", "other"):
        file = tmp_path / f"{name}.py"
        file.write_text("A = 1\n")
        assert sources.keep(str(file), f"pkg.{name}", compiled).source == b"A = 1\n"
        file.write_text("A = 2\n")
        assert sources.keep(str(file), f"pkg.{name}", compiled).source == b"A = 1\n"
        assert sources.has_module(name)
    (record,) = caplog.records
    assert "some.py and later sources of the program cannot be kept (No space left" in record.getMessage()
    monkeypatch.undo()
    (tmp_path / "last.py").write_text("A = 3\n")
    assert in_child(lambda: not sources.keep(str(tmp_path / "last.py"), "last", compiled)) == 0
    assert sources.has_module("last")


def test_without_a_folder_for_temporary_files_sources_are_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_folder(*_: object) -> None:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "TemporaryFile", no_folder)
    sources, file = KeptSources(), tmp_path / "some.py"
    file.write_text("A = 1\n")
    assert in_child(lambda: not sources.keep(str(file), "some", compiled)) == 0
    file.unlink()
    assert sources.keep(str(file), "some", compiled).source == b"A = 1\n"
