"""An example training in which one worker kills machines, all of them at the very same time, and only once.

``"signal"`` names the signal. The checkpoint before that step is committed by then, however slow the disk is.

KILLS says as JSON which worker does so, and at the beginning of which step: ``{"by": rank, "iteration": n,
"replayed": false, "victims": [ranks], "example": "train_swift"}``. A victim's whole machine dies, so of a
machine one worker is named; ``"store"`` is the rendezvous store, and the worker's own machine comes last.
"""

import contextlib
import json
import os
import runpy
import signal
from collections.abc import Iterator
from pathlib import Path

import swift_ft
from swift_ft.worker_context import WorkerContext
from tests.support.commits import wait_for_commit

CONTEXT = WorkerContext.from_env()
RANK = int(os.environ["RANK"])
FOLDER = Path(os.environ["SWIFT_TEST_FOLDER"])
KILLS = json.loads(os.environ["KILLS"])


class Session(swift_ft.Session):
    def steps(self, iterations: int) -> Iterator[swift_ft.Step]:
        for step in super().steps(iterations):
            if (RANK, step.index, step.replayed) == (KILLS["by"], KILLS["iteration"], KILLS["replayed"]):
                wait_for_commit(self, step.index)
                kill()
            yield step


def kill() -> None:
    pids = [pids_of(victim) for victim in KILLS["victims"]]
    if not all(path.exists() for path in pids):
        return
    doomed = [int(pid) for path in pids for pid in path.read_text().split()]
    for path in pids:
        path.unlink()
    for pid in doomed:
        with contextlib.suppress(ProcessLookupError):  # a worker dies with its agent
            os.kill(pid, signal.Signals[KILLS["signal"]])


def pids_of(victim: int | str) -> Path:
    return FOLDER / f"pids{victim}"


def the_store() -> str:
    """The process id of the rendezvous store: the second process that the parent of all agents starts."""
    parent = Path(f"/proc/{CONTEXT.agent_pid}/stat").read_text().rpartition(")")[2].split()[1]
    return Path(f"/proc/{parent}/task/{parent}/children").read_text().split()[1]


if CONTEXT.started_in == 1:
    pids_of(RANK).write_text(f"{CONTEXT.agent_pid} {os.getpid()}")
    pids_of("store").write_text(the_store())
swift_ft.Session = Session  # type: ignore[misc]
runpy.run_module(KILLS["example"], run_name="__main__")
