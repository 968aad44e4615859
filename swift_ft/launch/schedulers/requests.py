"""Asks the scheduler for machines in place of lost ones, and gives this one back when it has left."""

from __future__ import annotations

import logging
import threading
import time
from functools import partial
from operator import is_not
from typing import Protocol

from swift_ft.coordination.follower import Follower
from swift_ft.errors import FencedError, RendezvousLostError, SchedulerError
from swift_ft.launch.schedulers.scheduler import Scheduler
from swift_ft.recovery import events as ev
from swift_ft.recovery.exclusion import nodes_left_out
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.requests import to_request
from swift_ft.units import counted, named

_logger = logging.getLogger(__name__)

_LOOKS_S = 1.0
_WAITS_AT_MOST_S = 10.0
"""A launcher that starts again joins within this time as a rule."""
_ASKS_AGAIN_S = 10.0
"""Twice this after a machine that was asked for was refused, and twice as long after each further one."""
_ENDS_S = 5.0


class Membership(Protocol):
    """The membership of this machine in the run."""

    @property
    def machine(self) -> str:
        """Its name: another one each time that it joins."""

    @property
    def follower(self) -> Follower:
        """Of the run's journal."""


class MachineRequests:
    """Follows the journal in a thread of its own, so that a slow scheduler holds nothing up.

    The journal says first that the scheduler is asked. So nobody asks twice for one loss, and if this machine
    is lost in between, nobody asks for it at all.

    Args:
        scheduler: is asked.
        membership: this machine's.
        wait_s: how long a slot stays empty before a machine is asked for, 10 at most.
    """

    def __init__(self, scheduler: Scheduler, membership: Membership, wait_s: float) -> None:
        self._scheduler = scheduler
        self._membership = membership
        self._wait_s = min(wait_s, _WAITS_AT_MOST_S)
        self._since: dict[int, float] = {}  # by slot; owner: the thread
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="swift-scheduler", daemon=True)
        self._thread.start()

    def close(self, *, gives_back: bool) -> None:
        """End the thread, and give this machine back if it has left the run on request."""
        self._closed.set()
        self._thread.join(_ENDS_S)
        if gives_back:
            machine = self._membership.machine
            try:
                self._scheduler.give_back([machine])
            except SchedulerError as error:
                _failed(f"cannot give {machine} back: {error}")

    def _run(self) -> None:
        follower = self._membership.follower
        try:
            while not self._closed.is_set():
                state = follower.state
                if state.phase == Phase.ENDED:
                    return
                self._look(state, time.monotonic())
                follower.wait_for(partial(is_not, state), _LOOKS_S)
        except (RendezvousLostError, FencedError):  # the agent says so
            return

    def _look(self, state: State, now: float) -> None:
        slots = to_request(state, self._membership.machine)
        self._since = {slot: self._since.get(slot, now) for slot in slots}
        again = state.membership.asked_again
        wait_s = _ASKS_AGAIN_S * 2**again if again else self._wait_s
        due = tuple(slot for slot, since in self._since.items() if now - since >= wait_s)
        if due:
            self._ask(due)

    def _ask(self, slots: tuple[int, ...]) -> None:
        machine = self._membership.machine
        before = self._membership.follower.state.membership.requested
        state = self._membership.follower.append(ev.MachinesRequested(machine=machine, slots=slots))
        requested = state.membership.requested
        ours = [slot for slot in slots if slot not in before and requested.get(slot) == machine]
        if not ours:
            return
        try:
            self._scheduler.ask(len(ours), f"no machine fills {named('slot', ours)}", nodes_left_out(state))
        except SchedulerError as error:
            _failed(f"cannot give {counted(len(ours), 'machine')}: {error}")


def _failed(why: str) -> None:
    """Say it in one line. The run waits for a machine as it would without a scheduler."""
    _logger.warning("The scheduler %s. The run goes on.", why, extra={"event": "scheduler_failed"})
