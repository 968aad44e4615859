"""The example training of a pipeline, with memory checkpoints, in which a log is damaged (DAMAGE)."""

import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import swift_ft
from tests.support.copies import wait_for_copy

EVERY = 2


class Copying(swift_ft.Session):
    """Copies every other iteration, and begins none before the last copy is complete."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, snapshot_every=EVERY, **options)

    def steps(self, iterations: int) -> Iterator[swift_ft.Step]:
        for step in super().steps(iterations):
            if not step.replayed:
                wait_for_copy(self, self.iteration - self.iteration % EVERY)
            yield step


swift_ft.Session = Copying  # type: ignore[misc]  # for the script that is imported now
runpy.run_path(str(Path(__file__).with_name("damaged_log.py")), run_name="__main__")
