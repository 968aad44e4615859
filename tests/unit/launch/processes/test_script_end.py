"""What the end of a script writes and says, also where something does not end."""

from __future__ import annotations

import atexit
import gc
import io
import threading
from pathlib import Path
from typing import Any

import pytest

from swift_ft.launch.processes import script_end


class HalfOpened(io.IOBase):
    """As a file of fsspec before it is open: it says that it is writable."""

    f: Any = None

    def writable(self) -> bool:
        return True

    def close(self) -> None:
        if self.f != "closed":
            self.f.close()


class Full(HalfOpened):
    """What it has to write is lost."""

    def close(self) -> None:
        if self.f != "closed":
            raise OSError(28, "No space left on device")


@pytest.mark.parametrize(("kind", "said"), [(HalfOpened, False), (Full, True)])
def test_what_is_lost_is_said(kind: type[HalfOpened], said: bool, capsys: pytest.CaptureFixture[str]) -> None:
    file = kind()
    script_end._try(file, "close")
    assert (f"Exception ignored in: {kind.__qualname__}.close" in capsys.readouterr().err) == said
    file.f = "closed"  # its destructor closes it once more


@pytest.mark.parametrize(("thread", "is_ours"), [("swift-housekeeper_0", True), ("uploads", False)])
def test_the_script_s_files_do_not_pay_for_a_store_that_hangs(
    thread: str,
    is_ours: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A thread of ours is left. One of the script's is its own affair, and may still write its files."""
    ended, late = threading.Event(), threading.Event()
    handled: list[str] = []
    file = (tmp_path / "metrics.csv").open("w")
    hangs = threading.Thread(target=ended.wait, name=thread)
    hangs.start()
    awaited: list[str] = []
    found: list[object] = []
    there_are = [threading.main_thread(), hangs]  # and not what other tests have left in this process
    monkeypatch.setattr(threading, "enumerate", lambda: there_are)
    monkeypatch.setattr(threading, "_shutdown", lambda: late.wait(60))
    monkeypatch.setattr(atexit, "_run_exitfuncs", lambda: handled.append("an exit handler"))
    monkeypatch.setattr(gc, "get_objects", lambda: [file])
    file.write("loss")

    def on_late(what: str) -> None:
        awaited.append(what)
        found.extend([list(handled), (tmp_path / "metrics.csv").read_text()])
        late.set()

    script_end.finish(0.01, on_late)
    ended.set()
    hangs.join()
    file.close()
    assert found == [["an exit handler"] * is_ours, "loss" * is_ours]
    assert awaited == ["" if is_ours else f"thread {thread}"]
    assert ("store" in caplog.text) == is_ours


class Exits:
    """A finalizer that would end the process."""

    def __del__(self) -> None:
        if self.armed:
            raise SystemExit(3)

    armed = True


def test_a_finalizer_ends_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """As in Python."""
    thing = Exits()
    script_end._finalize([thing])
    assert "Exception ignored in: Exits.__del__" in capsys.readouterr().err
    thing.armed = False


def test_a_handler_that_hangs_beside_a_store_that_hangs_is_awaited_for_as_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both have their time, and then the process ends: it would never do so otherwise."""
    late, ended = threading.Event(), threading.Event()
    hangs = threading.Thread(target=ended.wait, name="swift-housekeeper_0")
    hangs.start()
    there_are = [threading.main_thread(), hangs]
    monkeypatch.setattr(threading, "enumerate", lambda: there_are)
    monkeypatch.setattr(threading, "_shutdown", lambda: late.wait(60))
    monkeypatch.setattr(atexit, "_run_exitfuncs", lambda: ended.wait(60) if not late.is_set() else None)
    monkeypatch.setattr(gc, "get_objects", list)
    awaited: list[str] = []

    def on_late(what: str) -> None:
        awaited.append(what)
        late.set()

    script_end.finish(0.05, on_late)
    ended.set()
    hangs.join(60)
    assert awaited == ["an exit handler, or what closes a file,"]
