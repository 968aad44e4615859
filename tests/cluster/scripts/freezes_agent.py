"""An example training in which one worker has an agent frozen for a while, and only once.

FREEZES says as JSON which worker does so, at the beginning of which step, whose agent, and for how long:
``{"by": rank, "iteration": n, "victim": rank, "seconds": s}``.
"""

import json
import os
import runpy
import subprocess
from collections.abc import Iterator
from pathlib import Path

import swift_ft
from swift_ft.config.worker_context import WorkerContext

CONTEXT = WorkerContext.from_env()
RANK = int(os.environ["RANK"])
FOLDER = Path(os.environ["SWIFT_TEST_FOLDER"])
FREEZES = json.loads(os.environ["FREEZES"])


class Session(swift_ft.Session):
    def steps(self, iterations: int) -> Iterator[swift_ft.Step]:
        for step in super().steps(iterations):
            if (RANK, step.index, step.replayed) == (FREEZES["by"], FREEZES["iteration"], False):
                freeze()
            yield step


def freeze() -> None:
    path = FOLDER / f"agent{FREEZES['victim']}"
    if path.exists():
        pid = path.read_text()
        path.unlink()
        subprocess.Popen(["sh", "-c", f"kill -STOP {pid}; sleep {FREEZES['seconds']}; kill -CONT {pid}"])


if CONTEXT.started_in == 1:
    (FOLDER / f"agent{RANK}").write_text(str(CONTEXT.agent_pid))
swift_ft.Session = Session  # type: ignore[misc]
runpy.run_module("train_swift", run_name="__main__")
