"""A signal stops all runs at once, and leaves no process of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from swift_ft.testing.chaos import launchers
from swift_ft.testing.chaos.launchers import Launchers, StoppedError
from tests.support.waiting import wait_until

LAUNCHER = """
import os, pathlib, signal, subprocess, sys
signal.signal(signal.SIGTERM, {handler})
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
pathlib.Path("began.tmp").write_text(f"{{os.getpid()}} {{child.pid}}")
os.rename("began.tmp", "began")
child.wait()
"""


def begin(pool: ThreadPoolExecutor, runs: Launchers, folder: Path, handler: str) -> Future[int | None]:
    folder.mkdir()
    (folder / "launcher.py").write_text(LAUNCHER.format(handler=handler))
    began = pool.submit(runs.run, ["launcher"], folder, 60.0, output=folder / "output", cwd=folder)
    wait_until((folder / "began").exists, "the beginning of a run")
    return began


def assert_over(folder: Path) -> None:
    for pid in (folder / "began").read_text().split():
        wait_until(lambda pid=pid: not Path("/proc", pid).exists(), f"the end of process {pid}")  # type: ignore[misc]


@pytest.mark.parametrize("handler", ["signal.SIG_DFL", "signal.SIG_IGN"])
def test_all_that_run_are_stopped_with_their_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, handler: str
) -> None:
    """Also one that does not listen, and what lives in a session of its own."""
    monkeypatch.setattr(launchers, "_GRACE_S", 0.5)
    runs = Launchers()
    with ThreadPoolExecutor(2) as pool:
        folders = [tmp_path / "one", tmp_path / "other"]
        running = [begin(pool, runs, folder, handler) for folder in folders]
        runs.stop(signal.SIGINT)
        for one in running:
            with pytest.raises(StoppedError, match="stopped by SIGINT"):
                one.result(timeout=30)
    for folder in folders:
        assert_over(folder)
    with pytest.raises(StoppedError):  # no further one begins
        runs.run(["launcher"], tmp_path, 60.0, output=tmp_path / "output", cwd=folders[0])
    assert not (tmp_path / "output").exists()


def test_a_run_that_ends_in_time_gives_its_code_and_output(tmp_path: Path) -> None:
    (tmp_path / "launcher.py").write_text("import sys; print('said'); sys.exit(3)")
    runs, output = Launchers(), tmp_path / "output"
    assert runs.run(["launcher"], tmp_path, 60.0, output=output, cwd=tmp_path) == 3
    assert output.read_text() == "said\n"


def test_a_run_that_is_late_is_ended(tmp_path: Path) -> None:
    (tmp_path / "launcher.py").write_text("import time; time.sleep(600)")
    assert Launchers().run(["launcher"], tmp_path, 1.0, output=tmp_path / "output", cwd=tmp_path) is None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_stop_as_long_as_somebody_listens(number: signal.Signals) -> None:
    runs, before = Launchers(), signal.getsignal(number)
    with runs.stopped_by_signals():
        runs.check()
        os.kill(os.getpid(), number)
        with pytest.raises(StoppedError) as raised:
            runs.check()
        assert raised.value.number == number
    assert signal.getsignal(number) == before
    runs.check()


def test_a_signal_ends_a_run_of_the_main_thread(tmp_path: Path) -> None:
    """As in the search for a smaller plan."""
    (tmp_path / "launcher.py").write_text("import time; time.sleep(600)")
    code = (
        "import sys, pathlib\n"
        "from swift_ft.testing.chaos.launchers import LAUNCHERS\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "with LAUNCHERS.stopped_by_signals():\n"
        "    print('ready', flush=True)\n"
        "    LAUNCHERS.run(['launcher'], folder, 60.0, output=folder / 'output', cwd=folder)\n"
    )
    tool = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert tool.stdout is not None
    assert tool.stdout.readline() == "ready\n"
    tool.send_signal(signal.SIGTERM)
    assert "StoppedError: stopped by SIGTERM" in tool.communicate(timeout=60)[1]
