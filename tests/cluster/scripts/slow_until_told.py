"""An example training that takes its time until the file ``go`` is in the test's folder.

So a test has time to do something to the run, however slow the machine is, and does not wait for its end.
"""

import importlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import swift_ft

GO = Path(os.environ["SWIFT_TEST_FOLDER"]) / "go"
QUICK = int(os.environ.get("QUICK", "8"))
"""Iterations that take little time all the same: a test waits for one of them."""
QUICK_S, SLOW_S, TICK_S = 0.3, 4.0, 0.1


class Session(swift_ft.Session):
    def steps(self, iterations: int) -> Iterator[swift_ft.Step]:
        for step in super().steps(iterations):
            if not step.replayed:
                wait_until_told(QUICK_S if step.index < QUICK else SLOW_S)
            yield step


def wait_until_told(at_most_s: float) -> None:
    for _ in range(round(at_most_s / TICK_S)):
        if GO.exists():
            return
        time.sleep(TICK_S)


swift_ft.Session = Session  # type: ignore[misc]
importlib.import_module(os.environ.get("EXAMPLE", "train_swift")).main()
