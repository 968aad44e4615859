"""The example training, in which worker 1 holds the interpreter for HOLDS seconds in iteration 4.

Each of its replacements does so, too.
"""

import ctypes
import os
from collections.abc import Iterator

import train_swift

import swift_ft

SECONDS = int(os.environ["HOLDS"])
sleep = ctypes.PyDLL(None).sleep  # a call through PyDLL keeps the interpreter's lock


class Session(swift_ft.Session):
    def steps(self, iterations: int) -> Iterator[swift_ft.Step]:
        for step in super().steps(iterations):
            if os.environ["RANK"] == "1" and step.index == 4:
                sleep(SECONDS)
            yield step


swift_ft.Session = Session  # type: ignore[misc]
train_swift.main()
