"""The example training, which notes signals in files, and ends with 0 at some. For ``slow_until_told.py``.

HANDLES says as JSON who does what: ``{"notes": {"SIGUSR1": [ranks]}, "ends": {"SIGTERM": [ranks]}}``. When
one worker ends so, all others do at their next step.
"""

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import train_swift

import swift_ft

FOLDER = Path(os.environ["SWIFT_TEST_FOLDER"])
RANK = int(os.environ["RANK"])
HANDLES = json.loads(os.environ["HANDLES"])


def note(number: int, _frame: object) -> None:
    FOLDER.joinpath(f"{signal.Signals(number).name}-{RANK}").touch()


def save_and_end(number: int, frame: object) -> None:
    note(number, frame)
    FOLDER.joinpath("end").touch()
    sys.exit(0)


class Session(swift_ft.Session):
    def steps(self, iterations: int) -> Iterator[swift_ft.Step]:
        for step in super().steps(iterations):
            if FOLDER.joinpath("end").exists():
                FOLDER.joinpath(f"agrees-{RANK}").touch()
                sys.exit(0)
            yield step


for act, handler in (("notes", note), ("ends", save_and_end)):
    for name, ranks in HANDLES.get(act, {}).items():
        if RANK in ranks:
            signal.signal(signal.Signals[name], handler)
FOLDER.joinpath(f"worker-{RANK}").write_text(str(os.getpid()))
swift_ft.Session = Session  # type: ignore[misc]
main = train_swift.main
