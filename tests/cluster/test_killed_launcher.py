"""A launcher that is killed takes all that it has started with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.support.cluster import processes_of
from tests.support.waiting import wait_until

ENDS_S = 20.0
SCRIPT = """
import os, pathlib, sys, time
pathlib.Path(sys.argv[1], "up-" + os.environ["RANK"]).touch()
time.sleep(600)
"""


def test_nothing_outlives_a_killed_launcher(tmp_path: Path) -> None:
    """Neither machines, which would train on without anyone who starts others, nor their store."""
    script = tmp_path / "sleeps.py"
    script.write_text(SCRIPT)
    flags = ["--standalone", "--machines", "2", "--log-dir", str(tmp_path / "logs")]
    command = [sys.executable, "-m", "swift_ft.cli.run", *flags, str(script), str(tmp_path)]
    env = os.environ | {"SWIFT_TEST_FOLDER": str(tmp_path)}
    with (tmp_path / "output").open("wb") as output:
        launcher = subprocess.Popen(command, env=env, stdout=output, stderr=output)
        wait_until(lambda: len(list(tmp_path.glob("up-*"))) == 2, "both workers have begun", 120.0)
        launcher.send_signal(signal.SIGKILL)
        launcher.wait()
    wait_until(lambda: not processes_of(tmp_path), "all ended", ENDS_S)
    assert "the launcher of this agent is gone" in (tmp_path / "output").read_text()
