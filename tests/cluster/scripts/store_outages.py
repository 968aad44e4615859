"""The example training, whose store fails for a while (OUTAGE, as JSON).

Worker 0 makes the folder ``place`` fail before it begins iteration ``begin``: it is ``full``, or ``gone``. It
works again as soon as ``until`` has happened: ``waits`` (a worker says that it waits for the store), or
``iteration``, before which worker 0 ends the outage and waits until all logs are written again. Before
iteration ``committed_by`` worker 0 waits for a checkpoint, if that is given. With ``hasty`` no worker waits
before it suspends its log. With ``of_log`` the place is that of the log on the machine's own disk.
"""

import contextlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import train_swift

import swift_ft
from swift_ft.config.worker_context import WorkerContext
from swift_ft.logging.writing import writer
from swift_ft.logging.writing.rotation import SegmentRotation
from swift_ft.runtime.pipeline.worker_log import WorkerLog
from swift_ft.storage import atomic_file
from swift_ft.storage.store import Store

CONTEXT = WorkerContext.from_env()
FOLDER = Path(os.environ["SWIFT_TEST_FOLDER"])
OUTAGE = json.loads(os.environ["OUTAGE"])
PLACE = Path(OUTAGE["place"])
DEADLINE_S = 60.0


def begin() -> None:
    if OUTAGE["how"] == "gone":
        PLACE.rename(PLACE.with_name("away"))
        return
    with (PLACE / "ballast").open("ab", buffering=0) as ballast:
        for size in (1 << 20, 4096):
            with contextlib.suppress(OSError):
                while ballast.write(b"x" * size) == size:
                    pass


def end() -> None:
    if OUTAGE["how"] == "gone":
        PLACE.with_name("away").rename(PLACE)
    else:
        (PLACE / "ballast").unlink()


def happened(what: str) -> int:
    return len(list(FOLDER.glob(f"{what}-*")))


def wait(what: str, count: int = 1) -> None:
    waiting = threading.Event()
    for _ in range(int(DEADLINE_S / 0.02)):
        if happened(what) >= count:
            return
        waiting.wait(0.02)
    raise TimeoutError(f"{what} did not happen {count} times")


def end_when_waited_for() -> None:
    wait("waits")
    end()


def note(kind: type, method: str, what: str) -> None:
    """A file in the folder of the test says that a method was called."""
    original = getattr(kind, method)

    def noted(self: object, *args: object) -> object:
        (FOLDER / f"{what}-{CONTEXT.rank}-{CONTEXT.started_in}").touch()
        return original(self, *args)

    setattr(kind, method, noted)


class Session(swift_ft.Session):
    def __init__(self, *args: Any, **options: Any) -> None:
        if OUTAGE.get("of_log"):  # whose segments wait there for their way to the store
            options["local"] = PLACE / f"machine-{CONTEXT.rank}"
        super().__init__(*args, **options)

    def steps(self, iterations: int) -> Iterator[swift_ft.Step]:
        for step in super().steps(iterations):
            if CONTEXT.rank == 0 and CONTEXT.started_in == 1 and not step.replayed:
                self._sabotage(step.index)
            yield step

    def _sabotage(self, iteration: int) -> None:
        if iteration == OUTAGE["begin"] and not happened("begun"):
            (FOLDER / "begun-0").touch()
            begin()
            if OUTAGE["until"] == "waits":
                threading.Thread(target=end_when_waited_for, daemon=True).start()
        lasts = OUTAGE["until"] != "waits" and happened("begun") and not happened("ended")
        if OUTAGE["how"] == "full" and lasts:
            begin()  # the run has deleted files that it needs no more
        if iteration == OUTAGE["until"] and not happened("ended"):
            (FOLDER / "ended-0").touch()
            wait("suspended", CONTEXT.world_size)
            end()
            wait("resumed", CONTEXT.world_size)
        if iteration == OUTAGE.get("committed_by"):
            waiting = threading.Event()
            while (self.metrics().committed or 0) < iteration - 3:
                waiting.wait(0.02)


note(Store, "_warn", "waits")
note(WorkerLog, "_note_gap", "suspended")
note(WorkerLog, "_note_end_of_gap", "resumed")
atomic_file._RESERVED_BYTES = 0  # else segments that are closed would free some room
if OUTAGE.get("hasty"):
    writer._TRY_AGAIN_S = 0.05
    wait_out = SegmentRotation._wait_out

    def without_patience(self: SegmentRotation, action: Callable[[], Any]) -> Any:
        self._patience_s = 0.0
        return wait_out(self, action)

    SegmentRotation._wait_out = without_patience
swift_ft.Session = Session  # type: ignore[misc]
train_swift.main()
