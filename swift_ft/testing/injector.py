"""Makes the faults of `testing/faults.py` happen, with real signals."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

from swift_ft.logging import Direction
from swift_ft.testing.faults import Action, Fault, Point, Target

__all__ = ["InjectedError", "Injector"]


class InjectedError(Exception):
    """What a script raises under the fault ``raise``."""


class Injector:
    """Watches one worker's way and strikes when a fault says so.

    Args:
        faults: all faults of the run.
        rank: this worker.
        slot: its machine's slot.
        agent_pid: its agent.
        announce: told just before a fault happens; False if it happened before.
        break_connections: what ``break`` does.
        replaying: whether the worker replays, which passes most points once more.
    """

    def __init__(
        self,
        faults: tuple[Fault, ...],
        *,
        rank: int,
        slot: int,
        agent_pid: int,
        announce: Callable[[str], bool],
        break_connections: Callable[[], None],
        replaying: Callable[[], bool],
    ) -> None:
        self._faults = [f for f in faults if f.index == (rank if f.target == Target.WORKER else slot)]
        self._agent_pid = agent_pid
        self._announce = announce
        self._break_connections = break_connections
        self._replaying = replaying

    def live_at(self, point: Point, iteration: int, part: int | None = None) -> None:
        """As :meth:`at`, outside of replays."""
        if not self._replaying():
            self.at(point, iteration, part)

    def computing(self, iteration: int, microbatch: int, direction: Direction) -> None:
        """Tell that a live stage is about to compute."""
        point = Point.FORWARD if direction == Direction.FORWARD else Point.BACKWARD
        self.live_at(point, iteration, microbatch)

    def at(self, point: Point, iteration: int, part: int | None = None) -> None:
        """Tell that the worker is at a point; ``part`` is the microbatch or the bucket."""
        for fault in list(self._faults):
            if (fault.point, fault.iteration) != (point, iteration):
                continue
            if fault.part is not None and fault.part != part:
                continue
            self._faults.remove(fault)
            if self._announce(str(fault)):
                self._strike(fault)

    def _strike(self, fault: Fault) -> None:
        if fault.action == Action.RAISE:
            raise InjectedError(f"injected: {fault}")
        if fault.action == Action.BREAK:
            self._break_connections()
            return
        number = signal.SIGKILL if fault.action == Action.KILL else signal.SIGSTOP
        if fault.target in (Target.MACHINE, Target.AGENT):
            os.kill(self._agent_pid, number)
        if fault.target in (Target.MACHINE, Target.WORKER):
            os.kill(os.getpid(), number)
        if number == signal.SIGKILL and fault.target == Target.AGENT:
            threading.Event().wait()  # the agent's death ends this process at any moment
