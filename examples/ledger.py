"""A part of a worker: a file with one line for each iteration, right through losses."""

from __future__ import annotations

import os
from pathlib import Path

from swift_ft.extend import Interruption, Part, StepInfo
from swift_ft.recovery.job_state import State


class Ledger(Part):
    """Writes a line as an iteration begins, and takes it back before the iteration is repeated."""

    name = "ledger"

    def __init__(self, path: Path) -> None:
        self._path = path
        self._before = 0

    def open(self, state: State, begin: int) -> None:
        """A replacement finds what the lost worker has written, which may be more than it begins with."""
        lines = self._path.read_text().splitlines(keepends=True) if self._path.exists() else []
        self._path.write_text("".join(lines[:begin]))

    def begin(self, step: StepInfo) -> None:
        self._before = self._path.stat().st_size
        with self._path.open("a") as file:
            file.write(f"{step.iteration}\n")

    def put_back(self, interruption: Interruption) -> None:
        if interruption.in_step:
            os.truncate(self._path, self._before)
