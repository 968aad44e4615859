"""Makes the faults of `faults/fault.py` happen in this worker, with real signals."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from swift_ft.config.worker_context import WorkerContext
from swift_ft.coordination.agent_channel import tell_agent
from swift_ft.coordination.participant import Participant
from swift_ft.errors import SwiftError, UsageError
from swift_ft.faults import Action, Fault, Target, parse_faults, strikes
from swift_ft.faults.failpoints import Point, hit, listen
from swift_ft.faults.fault import ALL, DEFAULT_FACTOR, DEFAULT_MBIT, OF_CHANGES, OF_NETWORKS, OF_STORES
from swift_ft.host.networks import Networks
from swift_ft.observe.waits import waiting
from swift_ft.recovery import events as ev
from swift_ft.recovery.handlers.worlds import all_prepared
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.next_world import check_changeable, moved_somewhere, same_machines
from swift_ft.runtime.worker.status import WorkerStatus
from swift_ft.storage.own_files import is_finished
from swift_ft.storage.store import Store
from swift_ft.storage.troubles import Troubles

_LIVE_ONLY = {
    Point.FORWARD,
    Point.BACKWARD,
    Point.REDUCE,
    Point.REDUCING,
    Point.REDUCED,
    Point.UPDATE,
    Point.OPTIMIZER,
    Point.TRANSFER,
}
"""Points that a replay passes once more: a fault there is meant for the original."""


_COMMIT_S = 20.0
_PREPARED_S = 60.0
logger = logging.getLogger(__name__)


class InjectedError(Exception):
    """The error that a script raises under the fault ``raise``."""


class FaultInjector:
    """Listens to one worker's failpoints and strikes where a fault says so.

    Args:
        faults: of this worker and its machine.
        agent_pid: the process of its agent.
        participant: records a fault in the journal just before it happens.
        break_connections: what ``break`` does.
        replaying: whether the worker replays.
        store: the session's store, where it is a folder of this host.
        troubles: of the store; None if no fault strikes its calls.
        on_point: called with each point when the worker comes to it for the first time.
    """

    def __init__(
        self,
        faults: Iterable[Fault],
        *,
        agent_pid: int,
        participant: Participant,
        break_connections: Callable[[], None],
        replaying: Callable[[], bool],
        store: Path | None = None,
        troubles: Troubles | None = None,
        on_point: Callable[[Point], None] = lambda _: None,
    ) -> None:
        self._faults = list(faults)
        self._agent_pid = agent_pid
        self._participant = participant
        self._break_connections = break_connections
        self._replaying = replaying
        self._store = store
        self._troubles = troubles
        self._on_point = on_point
        # A store that failed before this process began has failed without it.
        self._shared = [
            fault
            for fault in self._faults
            if fault.action in OF_STORES and str(fault) not in participant.state.injected
        ]
        self._slowness: strikes.Slowness | None = None
        self._passed: set[Point] = set()  # several threads may add one, and then it is told twice

    def __call__(self, point: Point, iteration: int, part: int | None) -> None:
        """The worker is at a point; ``part`` is the microbatch or the bucket."""
        if self._slowness is not None:
            self._slowness()
        if self._shared:
            self._share_troubles()
        if point in _LIVE_ONLY and self._replaying():
            return
        if point not in self._passed:
            self._passed.add(point)
            self._on_point(point)
        for fault in list(self._faults):
            if fault.point != point or fault.iteration not in (None, iteration):
                continue
            if fault.part is not None and fault.part != part:
                continue
            self._faults.remove(fault)
            if fault.committed is not None:
                self._wait_for_commit(fault.committed)
            if self._can_strike(fault) and self._announce(str(fault)):
                self._strike(fault)

    def _share_troubles(self) -> None:
        """Have the troubles that another worker has begun for all of a machine, or for all machines.

        They begin here: this worker may have passed no point since, and clocks of machines differ.
        """
        for fault in [one for one in self._shared if str(one) in self._participant.state.injected]:
            self._begin_trouble(fault)

    def _begin_trouble(self, fault: Fault) -> None:
        assert self._troubles is not None, fault
        if fault in self._shared:  # another thread may have begun it
            self._shared.remove(fault)
            self._troubles.begin(fault)

    def _wait_for_commit(self, iteration: int) -> None:
        """The fault strikes all the same if there is none in time: the store may be lost on purpose, too."""

        def over(state: State) -> bool:
            newest = state.checkpoints.committed
            return (newest is not None and newest >= iteration) or state.phase != Phase.LIVE

        with waiting(f"the checkpoint of iteration {iteration}, after which it fails", _COMMIT_S):
            found = self._participant.wait_for(over, _COMMIT_S)
        if found is None:
            logger.warning("no checkpoint of iteration %d is committed: the fault strikes now", iteration)

    def _can_strike(self, fault: Fault) -> bool:
        """Whether there is what it would strike: else it counts as one that never struck."""
        match fault.action:
            case Action.FLIP | Action.TRUNCATE | Action.VANISH:
                return bool(self._in_store(fault))
            case Action.BREAK:  # as a worker starts, and in a part of each recovery, it has no group
                return self._participant.active.number is not None
        if fault.action in OF_CHANGES:
            return bool(_machines_after(self._participant.state, fault))
        if fault.action in OF_NETWORKS:
            there = fault.peer is None or bool(self._address_of(fault.peer))
            return there and Networks.of_this_process() is not None
        return fault.action not in OF_STORES or self._troubles is not None

    def _announce(self, fault: str) -> bool:
        """Record the fault in the journal; False if it happened before, or cannot be recorded."""
        try:
            if fault in self._participant.state.injected:
                return False
            # Before it strikes: the replacement comes to the same point, and must not be hit as well.
            self._participant.append(ev.FaultInjected(fault=fault))
        # Unrecorded, it would strike the replacement as well: rather not at all.
        except SwiftError:
            return False
        return True

    def _strike(self, fault: Fault) -> None:
        if fault.action == Action.RAISE:
            raise InjectedError(f"injected: {fault}")
        if fault.action == Action.BREAK:
            self._break_connections()
            return
        if fault.action not in (Action.KILL, Action.STOP):
            logger.warning("an injected fault strikes: %s", fault)
            self._harm(fault)
            return
        number = signal.SIGKILL if fault.action == Action.KILL else signal.SIGSTOP
        # The journal has an earlier moment: this worker waited until its entry was there.
        logger.warning("an injected fault strikes at Unix time %.6f: %s", time.time(), fault)
        # The agent first: afterwards this process could signal nobody.
        if fault.target in (Target.MACHINE, Target.AGENT):
            os.kill(self._agent_pid, number)
        if fault.target == Target.MACHINE and number == signal.SIGSTOP:  # an agent's death ends them, too
            self._stop_the_others()
        if fault.target in (Target.MACHINE, Target.WORKER):
            os.kill(os.getpid(), number)
        if number == signal.SIGKILL and fault.target == Target.AGENT:
            threading.Event().wait()  # the agent's death ends this process at any moment

    def _stop_the_others(self) -> None:
        """All processes of this machine but the agent and this one."""
        for pid in strikes.below(self._agent_pid):
            if pid != os.getpid():
                with contextlib.suppress(ProcessLookupError):  # it has ended since
                    os.kill(pid, signal.SIGSTOP)

    def _harm(self, fault: Fault) -> None:
        """Do what kills nobody."""
        if fault.action in OF_STORES:
            self._begin_trouble(fault)
            return
        if fault.action in OF_NETWORKS:
            self._harm_network(fault)
            return
        if fault.action in OF_CHANGES:
            self._change(fault)
            return
        match fault.action:
            case Action.FREEZE:
                strikes.freeze(fault.lasts_s)
            case Action.SUSPEND:
                strikes.suspend(self._agent_pid, fault.lasts_s)
            case Action.SLOW:
                self._slowness = strikes.Slowness(fault.factor or DEFAULT_FACTOR)
            case Action.CLOCK:
                strikes.jump(fault.lasts_s)
            case _:
                self._harm_store(fault)

    def _change(self, fault: Fault) -> None:
        """Ask for another world, and hold this one up until it is prepared: a short run would be over."""
        state = self._participant.state
        change = ev.ChangePlanned(
            world=state.worlds.planned + 1,
            machines=_machines_after(state, fault),
            reload=fault.action == Action.RELOAD,
            reason=f"injected: {fault}",
            asked_by="--inject",
        )
        self._participant.append(change)

        def decided(now: State) -> bool:
            under_way = now.worlds.change
            return now.phase != Phase.LIVE or under_way is None or all_prepared(now, under_way)

        with waiting("the next world, which an injected change has asked for", _PREPARED_S):
            if self._participant.wait_for(decided, _PREPARED_S) is None:
                logger.warning("the next world is not prepared within %g s: the job goes on", _PREPARED_S)

    def _harm_network(self, fault: Fault) -> None:
        found = Networks.of_this_process()
        assert found is not None, fault
        networks, own = found
        match fault.action:
            case Action.THROTTLE:
                networks.throttle(own, fault.lasts_s, fault.mbit or DEFAULT_MBIT)
            case Action.FLAP:
                networks.flap(own, fault.lasts_s)
            case _:
                networks.cut(
                    own,
                    fault.lasts_s,
                    sends=fault.action != Action.DEAF,
                    hears=fault.action != Action.MUTE,
                    peer=None if fault.peer is None else networks.index_of(self._address_of(fault.peer)),
                )

    def _address_of(self, slot: int) -> str:
        """The address of the machine in a slot; empty if nobody is there now."""
        membership = self._participant.state.membership
        return membership.addresses.get(membership.members.get(slot, ""), "").rpartition(":")[0]

    def _in_store(self, fault: Fault) -> list[Path]:
        """The folder or the files of the store that a fault would strike, the best one first."""
        if self._store is None:
            return []
        if fault.action == Action.VANISH:
            return [self._store] if self._store.exists() else []
        return strikes.newest_files(self._store, is_finished)

    def _harm_store(self, fault: Fault) -> None:
        """Another worker may delete or rename meanwhile what was there: then the next one is struck."""
        harms: dict[Action, Callable[[Path], None]] = {
            Action.FLIP: strikes.flip,
            Action.TRUNCATE: strikes.truncate,
            Action.VANISH: lambda store: strikes.vanish(store, fault.lasts_s),
        }
        for path in self._in_store(fault):
            with contextlib.suppress(OSError):
                harms[fault.action](path)
                # The words by which `testing/chaos/struck.py` knows it, also below.
                logger.warning("'%s' has struck %s", fault, path.relative_to(self._store or path))
                return
        logger.warning("'%s' found nothing to strike", fault)


def _machines_after(state: State, fault: Fault) -> tuple[str, ...]:
    """The machines of the world that a fault asks for, by slot; empty if the job cannot change now."""
    try:
        check_changeable(state)
        return same_machines(state) if fault.action == Action.RELOAD else moved_somewhere(state, fault.index)
    except UsageError:
        return ()


def inject_faults(
    context: WorkerContext,
    status: WorkerStatus,
    optimizers: Iterable[torch.optim.Optimizer],
    *,
    participant: Participant,
    break_connections: Callable[[], None],
    replaying: Callable[[], bool],
    store: Store | None = None,
) -> None:
    """Install an injector for the faults that ``swift-run --inject`` was given.

    Args:
        context: the worker's place.
        status: knows which iteration the state is at.
        optimizers: the end of each of their steps is a failpoint.
        participant: see :class:`FaultInjector`, as for the others.
        store: the session's.
    """
    faults = [
        fault
        for fault in parse_faults(context.config.inject)
        if fault.index in (ALL, context.rank if fault.target == Target.WORKER else context.slot)
    ]
    of_stores = store is not None and any(fault.action in OF_STORES for fault in faults)
    listen(
        FaultInjector(
            faults,
            agent_pid=context.agent_pid,
            participant=participant,
            break_connections=break_connections,
            replaying=replaying,
            store=None if store is None else store.local_path(""),
            troubles=Troubles(store) if store is not None and of_stores else None,
            # The launcher names the points that were passed where a fault never struck.
            on_point=lambda point: tell_agent(passed=point),
        )
    )
    for optimizer in optimizers:
        optimizer.register_step_post_hook(lambda *_: hit(Point.OPTIMIZER, status.iteration))
