"""The example training, in which each replay waits for ever: for what only live training has."""

import threading
from collections.abc import Iterator

import train_swift

import swift_ft


class Session(swift_ft.Session):
    def steps(self, iterations: int) -> Iterator[swift_ft.Step]:
        for step in super().steps(iterations):
            if step.replayed:
                threading.Event().wait()
            yield step


swift_ft.Session = Session  # type: ignore[misc]
train_swift.main()
