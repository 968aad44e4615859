"""An example training in which one worker kills machines, all of them at the very same time, and only once.

``"signal"`` names the signal. The checkpoint before that step is committed by then, however slow the disk is.

KILLS says as JSON which worker does so, and at the beginning of which step: ``{"by": rank, "iteration": n,
"replayed": false, "victims": [ranks], "example": "train_swift"}``. A victim's whole machine dies, so of a
machine one worker is named; ``"store"`` is the rendezvous store, and the worker's own machine comes last.
With ``"spare"`` it waits until a spare has joined.
"""

import json
import os
import runpy
import signal
from collections.abc import Iterator

import swift_ft
from swift_ft.config.worker_context import WorkerContext
from tests.support.commits import wait_for_commit, wait_for_spare
from tests.support.machines import kill_once, note_machine, note_store

CONTEXT = WorkerContext.from_env()
RANK = int(os.environ["RANK"])
KILLS = json.loads(os.environ["KILLS"])


class Session(swift_ft.Session):
    def steps(self, iterations: int) -> Iterator[swift_ft.Step]:
        for step in super().steps(iterations):
            if (RANK, step.index, step.replayed) == (KILLS["by"], KILLS["iteration"], KILLS["replayed"]):
                wait_for_commit(self, step.index)
                if KILLS["spare"]:
                    wait_for_spare(self)
                kill_once(*KILLS["victims"], by_signal=signal.Signals[KILLS["signal"]])
            yield step


if CONTEXT.started_in == 1:
    note_machine()
    note_store()
swift_ft.Session = Session  # type: ignore[misc]
runpy.run_module(KILLS["example"], run_name="__main__")
