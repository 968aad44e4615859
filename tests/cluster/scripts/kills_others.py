"""An example training, in which one worker kills machines, all of them at the very same time, and once.

KILLS says as JSON who does so, when a step begins: ``{"by": rank, "iteration": n, "replayed": false,
"victims": [slots], "example": "train_swift"}``; ``"store"`` among the slots is the rendezvous store, and the
worker's own machine comes last. Each machine has one worker.
"""

import importlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))

import swift_ft

RANK = int(os.environ["RANK"])
FOLDER = Path(os.environ["SWIFT_TEST_FOLDER"])
KILLS = json.loads(os.environ["KILLS"])


class Session(swift_ft.Session):
    def steps(self, iterations: int) -> Iterator[swift_ft.Step]:
        for step in super().steps(iterations):
            if (RANK, step.index, step.replayed) == (KILLS["by"], KILLS["iteration"], KILLS["replayed"]):
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
        os.kill(pid, signal.SIGKILL)


def pids_of(victim: int | str) -> Path:
    return FOLDER / f"pids{victim}"


def the_store() -> str:
    """What the parent of all agents started first."""
    parent = Path(f"/proc/{os.environ['SWIFT_AGENT_PID']}/stat").read_text().rpartition(")")[2].split()[1]
    return Path(f"/proc/{parent}/task/{parent}/children").read_text().split()[0]


if os.environ["SWIFT_LAUNCHED"] == "1":
    pids_of(RANK).write_text(f"{os.environ['SWIFT_AGENT_PID']} {os.getpid()}")
    pids_of("store").write_text(the_store())
swift_ft.Session = Session  # type: ignore[misc]
importlib.import_module(KILLS["example"]).main()
