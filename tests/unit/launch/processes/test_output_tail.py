"""What is shown of the output of workers, and where."""

from __future__ import annotations

import io
import logging
import os
import threading
import time
from pathlib import Path

import pytest

from swift_ft.launch.processes import output_tail
from swift_ft.launch.processes.output_tail import OutputTail, Shown
from tests.support.waiting import wait_until


class Closed(io.StringIO):
    """An output that is read no more."""

    def write(self, text: str, /) -> int:
        raise BrokenPipeError(32, "Broken pipe")


@pytest.fixture(params=["changes", "looks"])
def told(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a kernel that tells of changes, and with one that does not."""
    if request.param == "looks":
        monkeypatch.setattr(output_tail, "_watch", lambda _: None)


@pytest.mark.usefixtures("told")
def test_lines_are_shown_behind_their_prefix(tmp_path: Path) -> None:
    out, err = io.StringIO(), io.StringIO()
    paths = [tmp_path / name for name in ("0.out", "1.out", "0.err")]
    paths[1].write_text("from before\n")
    tail = OutputTail(
        [
            Shown(str(paths[0]), out, "[0] "),
            Shown(str(paths[1]), out, "[1] "),
            Shown(str(paths[2]), err, "[0] "),
        ]
    )
    try:
        for number in range(3):
            with paths[0].open("a") as file, paths[2].open("a") as errors:
                file.write(f"line {number}\nand")
                file.flush()
                errors.write(f"{number} %\r")
            wait_until(lambda n=number: f"line {n}\n" in out.getvalue(), "a line")  # type: ignore[misc]
            wait_until(lambda n=number: f"[0] {n} %\r" in err.getvalue(), "progress")  # type: ignore[misc]
    finally:
        tail.stop()
    shown = out.getvalue().splitlines()
    assert [line for line in shown if line.startswith("[0]")] == [
        "[0] line 0",
        "[0] andline 1",
        "[0] andline 2",
        "[0] and",  # a line that had not ended
    ]
    assert [line for line in shown if line.startswith("[1]")] == ["[1] from before"]


@pytest.mark.usefixtures("told")
def test_an_output_that_is_gone_holds_up_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    out = io.StringIO()
    gone, other = tmp_path / "gone", tmp_path / "other"
    tail = OutputTail([Shown(str(gone), Closed(), ""), Shown(str(other), out, "")])
    with caplog.at_level(logging.WARNING):
        gone.write_text("a\n")
        wait_until(lambda: caplog.records, "the warning")
        gone.write_text("a\nb\n")
        other.write_text("c\n")
        tail.stop()
    assert out.getvalue() == "c\n"
    assert [record.__dict__["event"] for record in caplog.records] == ["output_ended"]


def test_what_was_written_last_is_shown_before_it_stops(tmp_path: Path) -> None:
    out, path = io.StringIO(), tmp_path / "out"
    tail = OutputTail([Shown(str(path), out, "")])
    path.write_bytes(b"x\n\xff\n" * 1000)
    tail.stop()
    tail.stop()
    assert out.getvalue() == "x\n\ufffd\n" * 1000


class Unread(io.StringIO):
    """An output that nobody reads until it is released, as a terminal after Ctrl-S."""

    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()

    def write(self, text: str, /) -> int:
        self.released.wait(60.0)
        return super().write(text)


@pytest.mark.usefixtures("told")
def test_an_output_that_is_not_read_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets the lines if it is read later."""
    monkeypatch.setattr(output_tail, "_LAST_S", 0.3)
    output, path = Unread(), tmp_path / "0.out"
    path.write_text("last words\n")
    before = set(os.listdir("/proc/self/fd"))  # noqa: PTH208
    tail = OutputTail([Shown(str(path), output, "[0] ")])
    began = time.monotonic()
    tail.stop()
    assert time.monotonic() - began < 30.0
    output.released.set()
    wait_until(lambda: output.getvalue() == "[0] last words\n", "the lines")
    wait_until(lambda: set(os.listdir("/proc/self/fd")) <= before, "its files are closed")  # noqa: PTH208
