"""The example training, in which worker 0 freezes the rendezvous store in every other phase (PHASES).

PHASES says as JSON: ``{"warm_up": n, "steps": of a phase, "folder": where times go}``. Each worker writes
when each of its steps began, and what CPU time it had used by then.
"""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import train_swift

import swift_ft
from swift_ft.config.worker_context import WorkerContext

PHASES = json.loads(os.environ["PHASES"])
CONTEXT = WorkerContext.from_env()


class Session(swift_ft.Session):
    """Whose steps are timed."""

    def steps(self, iterations: int) -> Iterator[swift_ft.Step]:
        """The usual steps, some of them while the store is frozen."""
        times: list[tuple[float, float]] = []
        freezes = CONTEXT.rank == 0
        pid = store() if freezes else 0
        try:
            for step in super().steps(iterations):
                if freezes and step.index >= PHASES["warm_up"]:
                    phase, first = divmod(step.index - PHASES["warm_up"], PHASES["steps"])
                    if first == 0:
                        last = step.index + PHASES["steps"] > iterations
                        stalled = phase % 2 and not last
                        os.kill(pid, signal.SIGSTOP if stalled else signal.SIGCONT)
                times.append((time.perf_counter(), time.process_time()))
                yield step
        finally:
            if freezes:
                os.kill(pid, signal.SIGCONT)
        Path(PHASES["folder"], f"{CONTEXT.rank}.json").write_text(json.dumps(times))


def store() -> int:
    """The process of the rendezvous store: the second one that the parent of all agents starts."""
    parent = Path(f"/proc/{CONTEXT.agent_pid}/stat").read_text().rpartition(")")[2].split()[1]
    return int(Path(f"/proc/{parent}/task/{parent}/children").read_text().split()[1])


swift_ft.Session = Session  # type: ignore[misc]
train_swift.main()
