"""The example training. Iteration 5 begins once the checkpoint of iteration 3 is complete."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import train_swift

import swift_ft

MARKERS = Path(os.environ["SWIFT_TEST_FOLDER"]) / "store"


class Session(swift_ft.Session):
    def steps(self, iterations: int) -> Iterator[swift_ft.Step]:
        for step in super().steps(iterations):
            if step.index == 5:
                wait_for_a_checkpoint()
            yield step


def wait_for_a_checkpoint() -> None:
    for _ in range(600):
        if any(MARKERS.glob("checkpoints/*/committed.json")):
            return
        time.sleep(0.05)
    raise TimeoutError("no checkpoint was committed")


swift_ft.Session = Session  # type: ignore[misc]
train_swift.main()
