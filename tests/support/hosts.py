"""A run on several hosts: a launcher for each, as a user starts them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.lib.ports import free_port
from tests.support.cluster import over_backend, processes_of, training
from tests.support.waiting import wait_until


class Hosts:
    """Launchers of a run on several hosts, each with its output in a file.

    Attributes:
        module: the launcher.
    """

    module = "swift_ft.cli.run"

    def __init__(self, folder: Path, iterations: int, host: str = "127.0.0.1") -> None:
        self.folder = folder
        self.endpoint = f"{host}:{free_port()}"
        self.script = training(folder, iterations=iterations)
        self.processes: dict[str, subprocess.Popen[str]] = {}

    @property
    def command(self) -> list[str]:
        """The script and its arguments, over the backend that is tested."""
        return over_backend(self.script)

    def start(self, name: str, node: int, *more: str) -> subprocess.Popen[str]:
        """A launcher that asks for a slot, with more flags."""
        flags = ["--nnodes", "2", "--rdzv-endpoint", self.endpoint, "--rdzv-id", "hosts"]
        flags += ["--node-rank", str(node), "--heartbeat-timeout", "6"]
        flags += ["--log-dir", str(self.folder / "logs")]
        return self.start_command(name, self.module, *flags, *more, *self.command)

    def start_command(self, name: str, module: str, *arguments: str) -> subprocess.Popen[str]:
        """Any command of the package, as a process of this run; it prints all, also where ``CI`` is set."""
        env = {**os.environ, "CI": "", "OMP_NUM_THREADS": "1", "SWIFT_TEST_FOLDER": str(self.folder)}
        with (self.folder / f"{name}.txt").open("w") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdout=log,
                stderr=log,
                text=True,
                env=env,
                start_new_session=True,
            )
        return self.processes[name]

    def output(self, name: str) -> str:
        """All that a launcher has written so far."""
        return (self.folder / f"{name}.txt").read_text()

    def wait_for(self, text: str, *names: str) -> None:
        """Wait until one of these launchers has written a text."""
        wait_until(lambda: any(text in self.output(name) for name in names), text)

    def end(self, *, interrupted_at_exit: bool = False) -> dict[str, int]:
        """The exit codes, once all have ended and left nothing behind.

        Args:
            interrupted_at_exit: a script's handler that raises may run while Python closes down already,
                which then prints a traceback of its own.
        """
        codes = {name: process.wait(timeout=120) for name, process in self.processes.items()}
        for name in codes:
            assert interrupted_at_exit or "Traceback" not in self.output(name)
            assert "terminate called" not in self.output(name)
        wait_until(lambda: not processes_of(self.folder), "the store's end")
        return codes
