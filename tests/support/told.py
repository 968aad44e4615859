"""A run that takes its time until it is told to go on, and whose output can be read meanwhile."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.support.cluster import SLOW_UNTIL_TOLD, ClusterRun, command, processes_of, training
from tests.support.waiting import wait_until

_END_S = 150.0


class ToldJob:
    """A run of ``slow_until_told.py``.

    Args:
        folder: for all that it writes.
        machines: of it.
        flags: of the launcher.
        inject: faults.
        iterations: of the training.
        quick: that many of them take little time, as the test waits for one of them.
    """

    def __init__(
        self, folder: Path, *, machines: int, flags: Sequence[str], inject: str, iterations: int, quick: int
    ) -> None:
        self.folder = folder
        self.output = folder / "output.txt"
        script = [*training(folder, SLOW_UNTIL_TOLD, iterations=iterations), "--checkpoint-every", "100"]
        line = command(folder, machines=machines, flags=[*flags], inject=inject, script=script)
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "SWIFT_TEST_FOLDER": str(folder),
            "QUICK": str(quick),
        }
        with self.output.open("w") as out:
            self.process = subprocess.Popen(
                line, stdout=out, stderr=subprocess.STDOUT, env=env, start_new_session=True
            )

    def has_said(self, text: str) -> bool:
        """Whether a text is in the output of the run. If not, the run goes on."""
        ended, output = self.process.poll(), self.output.read_text()
        assert ended is None or text in output, output[-3000:]
        return text in output

    def wait_for(self, text: str) -> None:
        """Wait until a text is in the output."""
        wait_until(lambda: self.has_said(text), text)

    def end(self) -> ClusterRun:
        """Tell it to go on, and wait for its end."""
        (self.folder / "go").touch()
        code = self.process.wait(_END_S)
        assert not processes_of(self.folder)
        report = json.loads((self.folder / "events.json").read_text())
        return ClusterRun(self.folder, code, self.output.read_text(), report)

    def stop(self) -> None:
        """End it, if the test failed."""
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(60)
