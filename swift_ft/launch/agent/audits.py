"""Audits by a spare: it computes again what others have computed, as long as it is not needed."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import selectors
import shutil
import signal
import socket
import tempfile
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

from swift_ft.config.audit import OUTPUT, AuditRequest, AuditResult
from swift_ft.errors import UsageError
from swift_ft.launch.processes.standby import Standby
from swift_ft.launch.rendezvous.journal_rendezvous import JournalRendezvous
from swift_ft.launch.settings import AgentSettings
from swift_ft.recovery import events as ev
from swift_ft.recovery.audit_orders import (
    AuditOrder,
    has_replicas,
    interval_of,
    next_act,
    next_audit,
    open_claims,
    why_nothing_to_audit,
)
from swift_ft.recovery.job_state import Phase, State

_logger = logging.getLogger(__name__)

_PIECE = 1 << 16
_FOLDER = "swift-audit-"
_FEW_MACHINES = 64


def locked_folder() -> tuple[Path, int]:
    """A new temporary folder, and its descriptor. It is locked until that is closed, however this ends."""
    made = Path(tempfile.mkdtemp(prefix=f".{_FOLDER}"))
    lock = os.open(made, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return made.rename(made.with_name(made.name.removeprefix("."))), lock  # only now others look at it


def sweep_left(folder: Path) -> None:
    """Delete what audits have left whose agents were killed: nobody holds the lock of their folders.

    Args:
        folder: that of temporary files.
    """
    for left in folder.glob(f"{_FOLDER}*"):
        with contextlib.suppress(OSError):  # it is another user's, or in use, or was deleted meanwhile
            lock = os.open(left, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(lock)


class AuditProcess:
    """A process that audits (`offline/audit.py`), with a folder for what it rebuilds.

    Args:
        standby: forks it: torch is imported there.
        request: for it.
        order: that it carries out.
        folder: for all that it writes; it is deleted.
        lock: descriptor of the folder, with its lock; closed at the end.
    """

    def __init__(
        self, standby: Standby, request: AuditRequest, order: AuditOrder, folder: Path, lock: int
    ) -> None:
        self.order = order
        self._request = request
        self._folder = folder
        self._said = b""
        self._pid: int | None = None
        self._lock = lock
        self._channel, theirs = socket.socketpair()
        standby.launch_audit(theirs)

    def fileno(self) -> int:
        """For a selector: readable when it says something, or ends."""
        return self._channel.fileno()

    def read(self) -> AuditResult | None:
        """Read what it says next. The result, if that is it."""
        piece = b""
        with contextlib.suppress(ConnectionError):
            piece = self._channel.recv(_PIECE)
        self._said += piece
        if not piece:
            return AuditResult(problem=f"its process ended{self._last_words()}")
        line, end, rest = self._said.partition(b"\n")
        if not end:
            return None
        self._said = rest
        if self._pid is not None:
            return AuditResult.from_json(line.decode())
        # Only now can it be ended with all that it starts, so it begins only now.
        self._pid = int(line)
        with contextlib.suppress(ConnectionError):
            self._channel.sendall(f"{self._request.to_json()}\n".encode())
        return None

    def _last_words(self) -> str:
        with contextlib.suppress(OSError):
            lines = (self._folder / OUTPUT).read_text(errors="replace").splitlines()
            return f": {lines[-1]}" if lines else ""
        return ""

    def end(self) -> None:
        """End it at once, with all that it has started."""
        if self._pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._pid, signal.SIGKILL)
        self._channel.close()
        # A stage may be large, and somebody may wait for this machine.
        threading.Thread(target=self._sweep, name="swift-audit-sweep").start()

    def _sweep(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._lock)  # only now: whoever finds the folder without a lock deletes it


class Auditor:
    """Carries out the audits of this machine, while it is a spare.

    Owner: the agent's main thread.

    Args:
        settings: what the agent runs.
        standby: forks the processes.
        membership: this machine's, with the journal.
        selector: tells the agent that an answer is there.
    """

    def __init__(
        self,
        settings: AgentSettings,
        standby: Standby,
        membership: JournalRendezvous,
        selector: selectors.BaseSelector,
    ) -> None:
        self._settings = settings
        self._standby = standby
        self._membership = membership
        self._selector = selector
        self._on = settings.config.audit and settings.kind != "program"
        self._process: AuditProcess | None = None
        self._refused: set[AuditOrder] = set()
        self._store = ""
        self._said = ""

    def look(self, state: State) -> None:
        """Begin the audit that is due, and end one that is not. Also do what is due after a judgement."""
        state = self._act(state)
        if not self._on:
            return
        self._look_first(state)
        if not self._on:
            return
        self._say_if_useless(state)
        order = next_audit(state, self._membership.machine)
        if self._process is not None:
            if order == self._process.order:
                return
            self.stop()
        if order is None or order in self._refused:
            return
        if open_claims(state).get(order.slot) != self._membership.machine or interval_of(state) is None:
            state = self._claim(order)
            if next_audit(state, self._membership.machine) != order:
                return
            if open_claims(state).get(order.slot) != self._membership.machine:
                self._refused.add(order)
                return
        self._start(state, order)

    def _look_first(self, state: State) -> None:
        """Once there is one: where the session's store is."""
        if self._store or not self._waits(state):
            return
        try:
            self._store = self._membership.store_of_session()
        except UsageError as error:
            self._on = False
            self._warn(str(error))

    def _say_if_useless(self, state: State) -> None:
        """Each reason once."""
        why = why_nothing_to_audit(state) if self._waits(state) else ""
        if why and why != self._said:
            self._said = why
            self._warn(why)

    def _waits(self, state: State) -> bool:
        return state.phase == Phase.LIVE and self._membership.machine in state.membership.spares

    def _warn(self, why: str) -> None:
        _logger.warning(
            "--audit finds nothing to audit: %s. --verify replay finds a machine that computes wrong.",
            why,
            extra={"event": "nothing_to_audit"},
        )

    def _claim(self, order: AuditOrder) -> State:
        interval, slot = order
        machine = self._membership.machine
        begun = ev.AuditBegun(machine=machine, slot=slot, begin=interval.begin, until=interval.until)
        return self._membership.follower.append(begun)

    def _start(self, state: State, order: AuditOrder) -> None:
        settings, (interval, slot) = self._settings, order
        temporary = Path(tempfile.gettempdir())
        threading.Thread(target=sweep_left, args=(temporary,), name="swift-audit-sweep").start()
        try:
            folder, lock = locked_folder()
        except OSError as error:  # the disk is full, say: that is no reason to lose a spare
            self._tell(order, AuditResult(problem=f"the spare cannot make a temporary folder: {error}"))
            return
        request = AuditRequest(
            store=self._store,
            machine=slot,
            begin=interval.begin,
            until=interval.until,
            out=str(folder / "out"),
            kind=settings.kind,
            target=settings.target,
            args=settings.args,
            setup=state.shape.setup,
            log_since=state.checkpoints.log_since,
            moved=state.layouts.since,
            machines=state.shape.machines,
            workers=state.shape.workers_per_machine,
            epoch=interval.epoch,
            limit_s=2 * settings.config.report_timeout_s,
            start_values=self._start_values(state, slot),
            gradients=has_replicas(state),
        )
        self._process = AuditProcess(self._standby, request, order, folder, lock)
        self._selector.register(self._process, selectors.EVENT_READ, data=self._read)

    def _start_values(self, state: State, slot: int) -> dict[str, str]:
        """Of all workers; in a large job of the slot, and of the next one, with which they are compared."""
        machines, workers = state.shape.machines, state.shape.workers_per_machine
        slots = range(machines) if machines <= _FEW_MACHINES else (slot, (slot + 1) % machines)
        ranks = (slot * workers + local_rank for slot in slots for local_rank in range(workers))
        return self._membership.start_values(ranks)

    def _read(self) -> None:
        assert self._process is not None
        if (result := self._process.read()) is None:
            return
        order = self._process.order
        self.stop()
        self._tell(order, result)

    def _tell(self, order: AuditOrder, result: AuditResult) -> None:
        """Note the result in the journal."""
        interval, slot = order
        facts: dict[str, Any] = asdict(result)
        ended = ev.AuditEnded(
            machine=self._membership.machine,
            slot=slot,
            begin=interval.begin,
            until=interval.until,
            on_corruption=self._settings.config.on_corruption,
            **facts,
        )
        self._act(self._membership.follower.append(ended))

    def _act(self, state: State) -> State:
        """Do what is due after a judgement, if it is for this machine to do. Returns the state after it."""
        done: ev.Event | None = None
        while (act := next_act(state, self._membership.machine)) not in (None, done):
            assert act is not None
            state, done = self._membership.follower.append(act), act
        return state

    def stop(self) -> None:
        """End what runs, at once."""
        if self._process is not None:
            self._selector.unregister(self._process)
            self._process.end()
            self._process = None
