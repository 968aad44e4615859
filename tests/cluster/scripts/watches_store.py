"""A training that notes what its training thread asks of the rendezvous store, which may be frozen meanwhile.

WATCH says as JSON: ``{"script": path, "since": n, "freeze": [m, k]}``. Calls count in live steps from
iteration ``since`` on, and between them. Worker 0 stops the store's process when it begins iteration m, and
lets it go on when it begins iteration k, or after a minute. ``store<rank>.json`` says what each worker saw,
and how often each of its recoveries asked: the first one is the start.
"""

import functools
import json
import os
import runpy
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import swift_ft
from swift_ft.config.worker_context import WorkerContext
from swift_ft.coordination import store_client
from swift_ft.runtime.iterations import Iterations
from swift_ft.runtime.worker.core import WorkerCore
from swift_ft.runtime.worker.flow import Flow
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore
from tests.support.machines import store_process

WATCH = json.loads(os.environ["WATCH"])
FOLDER = Path(os.environ["SWIFT_TEST_FOLDER"])
CONTEXT = WorkerContext.from_env()
SEEN: dict[str, Any] = {
    "steps": 0,
    "elsewhere": 0,
    "calls": [],
    "thawed_in": None,
    "late": False,
    "recoveries": [],
}
METHODS = ("set", "get", "multi_get", "add", "check", "wait", "compare_set", "delete_key", "connection")
PATIENCE_S = 60.0

recovering = False
training = False
"""The training thread is in a live step, or between two."""


def counted(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **options: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            if training:
                SEEN["calls"].append(traceback.format_stack(limit=8)[:-1])
            else:
                SEEN["elsewhere"] += 1
        if recovering:
            SEEN["recoveries"][-1] += 1
        return method(*args, **options)

    return call


def outside(method: Callable[..., Any]) -> Callable[..., Any]:
    """Waiting for others at the end, and recovering, is no training."""

    @functools.wraps(method)
    def call(*args: Any, **options: Any) -> Any:
        global training
        before, training = training, False
        try:
            return method(*args, **options)
        finally:
            training = before

    return call


def recovery(flow: Callable[[WorkerCore], Flow[None]]) -> Callable[[WorkerCore], Flow[None]]:
    """Whose calls are counted apart."""

    @functools.wraps(flow)
    def recover(core: WorkerCore) -> Flow[None]:
        global recovering, training
        SEEN["recoveries"].append(0)
        before, training, recovering = training, False, True
        try:
            yield from flow(core)
        finally:
            training, recovering = before, False

    return recover


class Session(swift_ft.Session):
    def steps(self, iterations: int) -> Iterator[swift_ft.Step]:
        global training
        try:
            for step in super().steps(iterations):
                training = step.index >= WATCH["since"] and not step.replayed
                SEEN["steps"] += training
                freeze(step.index)
                yield step
        finally:
            training = False


def freeze(iteration: int) -> None:
    """Worker 0 stops the store, or lets it go on."""
    if CONTEXT.rank or not WATCH.get("freeze"):
        return
    first, last = WATCH["freeze"]
    if iteration == first and SEEN["thawed_in"] is None:
        os.kill(store_process(), signal.SIGSTOP)
        SEEN["timer"] = threading.Timer(PATIENCE_S, thaw, (None,))
        SEEN["timer"].start()
    elif iteration == last and "timer" in SEEN:
        thaw(iteration)


def thaw(iteration: int | None) -> None:
    timer = SEEN.pop("timer", None)
    if timer is not None:
        timer.cancel()
        os.kill(store_process(), signal.SIGCONT)
        SEEN["thawed_in"], SEEN["late"] = iteration, iteration is None


for name in METHODS:
    setattr(RendezvousStore, name, counted(getattr(RendezvousStore, name)))
Iterations.finish = outside(Iterations.finish)
WorkerCore.recover = recovery(WorkerCore.recover)  # type: ignore[assignment]
assert store_client  # its clients are counted, too
swift_ft.Session = Session  # type: ignore[misc]  # for the script that runs now
sys.argv[0] = WATCH["script"]
try:
    runpy.run_path(WATCH["script"], run_name="__main__")
finally:
    SEEN.pop("timer", None)
    (FOLDER / f"store{CONTEXT.rank}.json").write_text(json.dumps(SEEN))
