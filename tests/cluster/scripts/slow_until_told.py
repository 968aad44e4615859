"""An example training that takes its time until the file ``go`` is in the test's folder.

So a test has time to do something to the run, however slow the machine is, and does not wait for its end.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import train_swift

import swift_ft

GO = Path(os.environ["SWIFT_TEST_FOLDER"]) / "go"
STEP_S = 0.3


class Session(swift_ft.Session):
    def steps(self, iterations: int) -> Iterator[swift_ft.Step]:
        for step in super().steps(iterations):
            if not step.replayed and not GO.exists():
                time.sleep(STEP_S)
            yield step


swift_ft.Session = Session  # type: ignore[misc]
train_swift.main()
