"""A signal stops all runs at once, and leaves no process of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from swift_ft.testing.chaos import launchers
from swift_ft.testing.chaos.launchers import LauncherEnd, Launchers, StoppedError
from tests.support.waiting import wait_until

LAUNCHER = """
import os, pathlib, signal, subprocess, sys
signal.signal(signal.SIGTERM, {handler})
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
pathlib.Path("began.tmp").write_text(f"{{os.getpid()}} {{child.pid}}")
os.rename("began.tmp", "began")
child.wait()
"""


def begin(pool: ThreadPoolExecutor, runs: Launchers, folder: Path, handler: str) -> Future[LauncherEnd]:
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
    assert runs.run(["launcher"], tmp_path, 60.0, output=output, cwd=tmp_path).code == 3
    assert output.read_text() == "said\n"


def test_a_run_that_is_late_is_ended(tmp_path: Path) -> None:
    (tmp_path / "launcher.py").write_text("import time; time.sleep(600)")
    end = Launchers().run(["launcher"], tmp_path, 1.0, output=tmp_path / "output", cwd=tmp_path)
    assert end.code is None


@pytest.fixture
def handled() -> Iterator[None]:
    """Whatever the terminal of the tests says, a signal is not ignored."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in launchers._SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_signals_stop_as_long_as_somebody_listens(number: signal.Signals, handled: None) -> None:
    runs, before = Launchers(), signal.getsignal(number)
    with runs.stopped_by_signals():
        runs.check()
        os.kill(os.getpid(), number)
        with pytest.raises(StoppedError) as raised:
            runs.check()
        assert raised.value.number == number
    assert signal.getsignal(number) == before
    runs.check()


def test_a_tool_under_nohup_outlives_its_terminal(handled: None) -> None:
    runs = Launchers()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with runs.stopped_by_signals():
        os.kill(os.getpid(), signal.SIGHUP)
        runs.check()
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


TOOL = """
import sys, pathlib
from swift_ft.testing.chaos.launchers import LAUNCHERS
folder = pathlib.Path(sys.argv[1])
with LAUNCHERS.stopped_by_signals():
    print("ready", flush=True)
    LAUNCHERS.run(["launcher"], folder, 60.0, output=folder / "output", cwd=folder)
"""


def test_a_signal_ends_a_run_of_the_main_thread(tmp_path: Path) -> None:
    """As in the search for a smaller plan."""
    (tmp_path / "launcher.py").write_text("import time; time.sleep(600)")
    tool = subprocess.Popen(
        [sys.executable, "-c", TOOL, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert tool.stdout is not None
    assert tool.stdout.readline() == "ready\n"
    tool.send_signal(signal.SIGTERM)
    assert "StoppedError: stopped by SIGTERM" in tool.communicate(timeout=60)[1]


def test_a_tool_that_is_killed_leaves_no_run(tmp_path: Path) -> None:
    """Nobody would end it when it is late. The launcher gets the signal on which it ends its processes."""
    launcher = "import os, pathlib, signal, time\n"
    launcher += "signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path('ended').touch(), os._exit(0)))\n"
    launcher += "pathlib.Path('began').touch()\ntime.sleep(600)\n"
    (tmp_path / "launcher.py").write_text(launcher)
    with subprocess.Popen(
        [sys.executable, "-c", TOOL, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as tool:
        wait_until((tmp_path / "began").exists, "the beginning of a run")
        tool.kill()
    wait_until((tmp_path / "ended").exists, "the end of the run")


def test_a_run_that_is_over_leaves_nobody_to_watch_it(tmp_path: Path) -> None:
    (tmp_path / "launcher.py").touch()
    for _ in range(3):
        end = Launchers().run(["launcher"], tmp_path, 60.0, output=tmp_path / "output", cwd=tmp_path)
        assert end.code == 0
    own = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    commands = [Path("/proc", pid, "cmdline").read_bytes() for pid in own]
    assert not [command for command in commands if launchers._GUARD.encode() in command]
