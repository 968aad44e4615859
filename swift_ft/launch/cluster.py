"""A whole cluster on one host: ``swift-run --standalone --machines N``.

Plays the part of the scheduler: one process group per machine, the rendezvous store beside them, and a fresh
machine for each one that was killed. It stays single-threaded, so that it can fork at any time.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from dataclasses import dataclass, replace
from typing import NoReturn

from swift_ft.config import EXIT_USAGE
from swift_ft.errors import RendezvousLostError, SwiftError, UsageError
from swift_ft.launch.machine import MachineJob, run_machine
from swift_ft.launch.standby import preload
from swift_ft.launch.store_service import StoreService, connect
from swift_ft.recovery import events as ev
from swift_ft.recovery.events import Entry
from swift_ft.recovery.job_state import Verdict
from swift_ft.recovery.journal import Follower, Journal

__all__ = ["Cluster", "ClusterResult"]

_GRACE_S = 5.0
_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class ClusterResult:
    """How a standalone run ended, and all that happened."""

    verdict: Verdict
    entries: tuple[Entry, ...]


class _Signalled(Exception):
    def __init__(self, number: int) -> None:
        self.number = number


class Cluster:
    """Machines on this host, each with an agent of its own in a process group of its own.

    Args:
        job: what each machine runs; the store's address in it is filled in here.
        spares: machines that wait beside the job.
    """

    def __init__(self, job: MachineJob, *, spares: int) -> None:
        preload()  # once for all machines, which are forked from here
        self._lifeline_r, self._lifeline_w = os.pipe()
        self._store = StoreService("127.0.0.1", 0)
        settings = replace(job.settings, host="127.0.0.1", port=self._store.port)
        self._job = replace(job, settings=settings, lifeline=self._lifeline_r)
        self._spares = spares
        self._agents: dict[int, int | None] = {}

    @property
    def endpoint(self) -> str:
        """Where the rendezvous store listens."""
        return f"127.0.0.1:{self._store.port}"

    def run(self) -> ClusterResult:
        """Run to the end. Leaves no process behind, whatever happens.

        Raises:
            RendezvousLostError: if the rendezvous store died.
        """
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _raise_signalled)
        try:
            self._run_machines()
            return self._result()
        finally:
            self._kill_agents()
            self._store.close()
            os.close(self._lifeline_w)

    def _run_machines(self) -> None:
        try:
            for slot in range(self._job.opened.machines):
                self._start_machine(slot)
            for _ in range(self._spares):
                self._start_machine(None)
            self._wait_for_agents()
        except _Signalled as signalled:
            self._close(signalled.number)

    def _start_machine(self, slot: int | None) -> None:
        pid = os.fork()
        if pid == 0:
            self._become_machine(slot)
        self._agents[pid] = slot

    def _become_machine(self, slot: int | None) -> NoReturn:
        os.close(self._lifeline_w)
        os.setsid()  # a group of its own: a terminal's Ctrl-C reaches the supervisor alone
        code = 1
        try:
            job = replace(
                self._job,
                preferred_slot=slot,
                settings=replace(self._job.settings, spare=slot is None),
            )
            verdict = run_machine(job)
            code = 0 if verdict.ok else verdict.exit_code
        except UsageError as error:
            print(f"swift-run: {error}", file=sys.stderr)
            code = EXIT_USAGE
        except (SwiftError, Exception) as error:
            print(f"swift-run: machine {slot}: {type(error).__name__}: {error}", file=sys.stderr)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _wait_for_agents(self) -> None:
        while self._agents:
            pid, status = os.waitpid(-1, 0)
            if pid == self._store.pid or self._store.ended():  # agents may have noticed first
                raise RendezvousLostError(
                    "The rendezvous store died, and what the machines knew of each other with it: "
                    "start the run again with --resume."
                )
            if pid not in self._agents:
                continue
            del self._agents[pid]
            if os.WIFSIGNALED(status):
                _kill_group(pid)  # what a dead machine leaves running is no part of the job any more
                self._start_machine(None)
            elif self._verdict() is not None:
                self._wait_for_the_rest()

    def _wait_for_the_rest(self) -> None:
        """The job has ended: give the other agents time to see it. A stopped one never will."""
        deadline = time.monotonic() + self._job.settings.shutdown_s + _GRACE_S
        while self._agents and time.monotonic() < deadline:
            pid, _ = os.waitpid(-1, os.WNOHANG)
            self._agents.pop(pid, None)
            time.sleep(0.0 if pid else _POLL_S)
        self._kill_agents()

    def _close(self, number: int) -> None:
        name = signal.Signals(number).name
        with contextlib.suppress(SwiftError):
            self._journal().append(ev.Closed(f"stopped by {name}", 128 + number))
        with contextlib.suppress(_Signalled):  # a second signal: at once
            self._wait_for_the_rest()

    def _kill_agents(self) -> None:
        for pid in self._agents:
            _kill_group(pid)
        for pid in self._agents:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        self._agents.clear()

    def _journal(self) -> Journal:
        settings = self._job.settings
        return Journal(lambda: connect(settings.host, settings.port, self._job.run_id), by="supervisor")

    def _verdict(self) -> Verdict | None:
        return Follower(self._journal()).state.verdict

    def _result(self) -> ClusterResult:
        entries: list[Entry] = []
        follower = Follower(self._journal(), on_entry=entries.append)
        verdict = follower.state.verdict or Verdict(False, "all machines ended before the job did", 1)
        return ClusterResult(verdict, tuple(entries))


def _raise_signalled(number: int, frame: object) -> NoReturn:
    raise _Signalled(number)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
