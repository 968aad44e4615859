"""A command that runs beside a benchmark or a demo ends with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from examples.commands import started

_SLEEPS = [sys.executable, "-c", "import time; time.sleep(600)"]
_STARTS = f"""
import sys, time
from pathlib import Path
from examples.commands import started

with started({_SLEEPS!r}, Path(sys.argv[1])) as process, started({_SLEEPS!r}, Path(sys.argv[1])) as other:
    print(process.pid, other.pid, flush=True)
    time.sleep(600)
"""


def test_sigterm_ends_the_commands_first(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _STARTS, str(tmp_path / "output")], stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout is not None
        pids = [int(pid) for pid in program.stdout.readline().split()]
        program.terminate()
        assert program.wait(60) == 128 + signal.SIGTERM
    assert len(pids) == 2
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_the_default_is_back_afterwards(tmp_path: Path) -> None:
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    with started(_SLEEPS, tmp_path / "output"), started(_SLEEPS, tmp_path / "other"):
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_handler_of_the_program_stays(tmp_path: Path) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _frame: heard.append(number))
    try:
        with started(_SLEEPS, tmp_path / "output"):
            os.kill(os.getpid(), signal.SIGTERM)
            assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)
