"""Processes that recipes start: a recipe's own, and those of a test's folder."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.support.cluster import processes_of
from tests.support.waiting import wait_until


def module(name: str, folder: Path) -> str:
    """A command line for a module of the package, as recipes take it, also behind an ssh."""
    kept = {name: os.environ[name] for name in ("PYTHONPATH", "SLURM_CONF") if name in os.environ}
    env = {**kept, "OMP_NUM_THREADS": "1", "SWIFT_TEST_FOLDER": str(folder)}
    return " ".join(["env", *(f"{key}={value}" for key, value in env.items()), sys.executable, "-m", name])


def environment(folder: Path, **more: str) -> dict[str, str]:
    """With the commands of this virtual environment on the path."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "OMP_NUM_THREADS": "1", "SWIFT_TEST_FOLDER": str(folder), "PATH": path, **more}


def start(command: Sequence[str], output: Path, env: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own, as a terminal or a container does.

    In the background of a shell, Ctrl-C is ignored, and a shell script cannot undo what it inherits.
    """
    heeding = ["env", "--default-signal=INT", *command]
    with output.open("wb") as log:
        return subprocess.Popen(heeding, stdout=log, stderr=log, env=env, start_new_session=True)


@contextmanager
def leaves_nothing(folder: Path) -> Iterator[None]:
    """At the end no process of a folder is left. If the test has failed, they are killed."""
    try:
        yield
        wait_until(lambda: not processes_of(folder), lambda: f"the end of {processes_of(folder)}")
    finally:
        for line in processes_of(folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(line.partition(":")[0]), signal.SIGKILL)
