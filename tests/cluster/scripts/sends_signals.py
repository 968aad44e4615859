"""An example training in which workers send signals to themselves, or to the agents of their machines.

SIGNALS says as JSON who does so at the beginning of which step, each once: ``[{"rank": 1, "iteration": 5,
"signal": "SIGINT", "to": "worker"}]``.
"""

import json
import os
import signal
from collections.abc import Iterator

import train_swift

import swift_ft
from swift_ft.config.worker_context import WorkerContext

CONTEXT = WorkerContext.from_env()
SIGNALS = json.loads(os.environ["SIGNALS"])


class Session(swift_ft.Session):
    def steps(self, iterations: int) -> Iterator[swift_ft.Step]:
        for step in super().steps(iterations):
            for order in SIGNALS if CONTEXT.started_in == 1 else []:
                if (order["rank"], order["iteration"]) == (CONTEXT.rank, step.index):
                    to = CONTEXT.agent_pid if order["to"] == "agent" else os.getpid()
                    os.kill(to, signal.Signals[order["signal"]])
            yield step


swift_ft.Session = Session  # type: ignore[misc]
train_swift.main()
