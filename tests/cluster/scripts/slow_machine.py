"""Another script (OF), on machines of which one is slow for a while.

Each layer of a LayerStack takes a moment on each machine, and five times that on the slow one (SLOW is its
rank) in the iterations FROM to UNTIL. Without a LayerStack each step does. A machine that takes its place is
not slow.
"""

import importlib
import os
import time
from collections.abc import Callable
from typing import Any

from torch import nn

import swift_ft
from swift_ft.config.worker_context import WorkerContext

SLOW, FROM, UNTIL = (int(os.environ[name]) for name in ("SLOW", "FROM", "UNTIL"))
LAYER_S, STEP_S, TIMES = 0.004, 0.05, 5
context = WorkerContext.from_env()
now = 0


def takes(seconds: float) -> None:
    slow = context.rank == SLOW and context.started_in == 1 and FROM <= now < UNTIL
    time.sleep(seconds * TIMES if slow else seconds)


class LayerStack(swift_ft.LayerStack):
    def __init__(self, build: Callable[[int], nn.Module], count: int, **more: Any) -> None:
        def slowed(number: int) -> nn.Module:
            layer = build(number)
            layer.register_forward_hook(lambda *_: takes(LAYER_S))
            return layer

        super().__init__(slowed, count, **more)


class Session(swift_ft.Session):
    def steps(self, iterations: int) -> Any:
        global now
        for step in super().steps(iterations):
            now = step.index
            yield step


def entered(self: swift_ft.Step) -> swift_ft.Step:
    step = begin(self)
    if os.environ["OF"] != "train_elastic":
        takes(STEP_S)
    return step


begin, swift_ft.Step.__enter__ = swift_ft.Step.__enter__, entered
swift_ft.LayerStack = LayerStack  # type: ignore[assignment, misc]
swift_ft.Session = Session  # type: ignore[misc]
importlib.import_module(os.environ["OF"]).main()
