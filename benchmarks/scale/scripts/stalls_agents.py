"""An example training on a loaded host, while agents stand still for a moment, again and again.

Worker 0 stops one agent after the other, and lets it go on again. STALLS says as JSON how often, for how many
seconds each, how many processes compute for nothing on each machine meanwhile, and in which folder notes are
kept. Training waits until all stalls are done.
"""

import json
import os
import random
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import swift_ft
from swift_ft.config.worker_context import WorkerContext

CONTEXT = WorkerContext.from_env()
RANK = int(os.environ["RANK"])
STALLS = json.loads(os.environ["STALLS"])
FOLDER = Path(STALLS["folder"])
LAST_STEP = 6
BUSY = "import os\nwhile os.getppid() == {parent}: sum(range(10000))"

done = threading.Event()


class Session(swift_ft.Session):
    """Waits in one of its last steps until all stalls are done."""

    def steps(self, iterations: int) -> Iterator[swift_ft.Step]:
        """As always."""
        for step in super().steps(iterations):
            if RANK == 0 and step.index == 1:
                threading.Thread(target=stall_agents, daemon=True).start()
            if RANK == 0 and step.index == LAST_STEP:
                done.wait()
            yield step


def stall_agents() -> None:
    """Stop agents for a moment, one after the other."""
    pids = [int(path.read_text()) for path in sorted(FOLDER.glob("agent*"))]
    chance = random.Random(0)
    for _ in range(STALLS["times"]):
        pid = chance.choice(pids)
        os.kill(pid, signal.SIGSTOP)
        threading.Event().wait(STALLS["seconds"])
        os.kill(pid, signal.SIGCONT)
        threading.Event().wait(STALLS["seconds"] * chance.uniform(0.5, 1.5))
    (FOLDER / "stalled").write_text(str(STALLS["times"]))
    done.set()


(FOLDER / f"agent{RANK}").write_text(str(CONTEXT.agent_pid))
busy = [
    subprocess.Popen([sys.executable, "-c", BUSY.format(parent=os.getpid())]) for _ in range(STALLS["busy"])
]
swift_ft.Session = Session  # type: ignore[misc]
try:
    runpy.run_module("train_swift", run_name="__main__")
finally:
    for process in busy:
        process.kill()
        process.wait()
