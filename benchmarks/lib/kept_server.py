"""The process of a real server. One that ends by itself is started again, as a service manager does."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.lib.ports import wait_until

_LOOK_S = 0.2


class KeptServer:
    """A server of which tests and benchmarks expect what a real one gives: it may end, and comes back.

    Args:
        name: of the server, for errors.
        command: starts it; also again, on the files that it has left.
        log: its output is added there.
        env: its environment; None for that of this process.
    """

    def __init__(
        self, name: str, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None
    ) -> None:
        self._name, self._command, self._log, self._env = name, command, log, env
        self._changing = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._killed = threading.Event()

    def begin(self) -> None:
        """Starts it."""
        with self._changing:
            self._begin()

    def _begin(self) -> None:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdout=log,
                stderr=log,
                cwd=self._log.parent,
                env=self._env,
            )

    def keep(self, answers: Callable[[], bool]) -> None:
        """Waits until it answers. From then on it is started again if it ends by itself.

        Raises:
            RuntimeError: it does not answer in time; with the end of its log.
        """
        wait_until(answers, self._lives, self._name, self._log)
        self._killed = threading.Event()
        threading.Thread(target=self._watch, args=(self._killed,), name=self._name, daemon=True).start()

    def send_signal(self, number: signal.Signals) -> None:
        """Sends its process a signal."""
        with self._changing:
            if self._process is not None:
                self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, if it was started, until it is started again by hand."""
        self._killed.set()
        with self._changing:
            if self._process is not None:
                self._process.kill()
                self._process.wait()
                self._process = None

    def _lives(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _watch(self, killed: threading.Event) -> None:
        while not killed.wait(_LOOK_S):
            with self._changing:
                if not killed.is_set() and not self._lives():
                    self._begin()
