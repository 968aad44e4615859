"""A whole cluster on one host: ``swift-run --standalone --machines N``.

Acts as the scheduler: it starts the rendezvous store and one process group per machine, and replaces machines
that were killed. It stays single-threaded, so that it can fork at any time.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NoReturn

from swift_ft.config.exit_codes import EXIT_FENCED, EXIT_KEPT_OUT, EXIT_RENDEZVOUS_LOST, EXIT_USAGE
from swift_ft.config.store_address import TCP, StoreAddress
from swift_ft.coordination.follower import Follower
from swift_ft.coordination.incarnations import has_begun
from swift_ft.coordination.journal import Journal, open_journal
from swift_ft.coordination.journal_reader import Excerpt
from swift_ft.coordination.runs import find_run
from swift_ft.coordination.store_client import connect
from swift_ft.errors import FencedError, KeptOutError, RendezvousLostError, SwiftError, UsageError
from swift_ft.host.networks import Networks
from swift_ft.launch.detection.abandoned_runs import closer_of_abandoned_runs
from swift_ft.launch.machine import run_machine
from swift_ft.launch.processes.preload import preload
from swift_ft.launch.rendezvous.store_service import StoreService, say_restarted
from swift_ft.launch.schedulers.own_job import end_by_signal
from swift_ft.launch.settings import MachineJob
from swift_ft.launch.signals import (
    FOR_WORKERS,
    SignalException,
    ignore_stop_signals,
    raise_stop_signals,
    stop_signals,
)
from swift_ft.recovery.job_state import State, Verdict

_logger = logging.getLogger(__name__)

_GRACE_S = 5.0
_CONNECT_S = 30.0
_POLL_S = 0.02
_STANDBY_ENDS_S = 2.0
_LATER_S = 1.0
"""Delay of a machine that no slot waits for: its fork takes a core from those that recover (decision 73)."""
_STORE, _PASSED = "store", "passed"
"""The session's store, and points for faults: machines tell them to the supervisor."""
_MOST_REFUSED = 2
"""Reasons in a verdict: each machine has said its own."""
_STOPPED = range(129, 256)
"""Exit codes of a machine that a signal stopped, and that has handed over."""


@dataclass(frozen=True, slots=True)
class ClusterResult:
    """The end of a standalone run.

    Attributes:
        verdict: how it ended.
        excerpt: entries of its journal.
        store: the session's; empty without one.
        struck: injected faults that struck.
        passed: points for faults that workers passed.
    """

    verdict: Verdict
    excerpt: Excerpt
    store: str
    struck: frozenset[str]
    passed: frozenset[str]


class Cluster:
    """Machines on this host, each with its own agent in its own process group.

    Args:
        job: what each machine runs; the run's number is filled in here, and the store's address unless it is
            that of etcd.
    """

    def __init__(self, job: MachineJob) -> None:
        preload(job.settings.config.preloaded)  # once for all machines, which are forked from here
        self._lifeline_r, self._lifeline_w = os.pipe()
        self._told_r, told_w = os.pipe()  # the machines say which store the session has, and more
        os.set_blocking(self._told_r, False)
        os.set_blocking(told_w, False)
        self._networks = _networks(job)
        embedded = job.settings.store.backend == TCP
        host = "127.0.0.1" if self._networks is None else self._networks.address()
        # Whoever else has a lifeline open keeps its readers alive when this process is killed.
        close_lifeline = partial(os.close, self._lifeline_w)
        self._service = StoreService(host, 0, close_in_child=close_lifeline) if embedded else None
        store = job.settings.store if self._service is None else self._service.address
        settings = replace(job.settings, store=store)
        client = partial(connect, store)
        close_abandoned = closer_of_abandoned_runs(client, settings.config, settings.secret)
        run_id = find_run(client, job.run_id, close_abandoned)
        self._job = replace(
            job,
            settings=settings,
            run_id=run_id,
            lifeline=self._lifeline_r,
            keeps_journal=bool(settings.config.events_out),
            on_store=partial(_tell, told_w, _STORE),
            on_passed=partial(_tell, told_w, _PASSED),
        )
        self._agents: dict[int, int] = {}  # number of the machine on this host, by process
        self._later: list[tuple[float, int]] = []  # when a machine is to start, and its number

    @property
    def run_id(self) -> str:
        """The run, with its number."""
        return self._job.run_id

    @property
    def store(self) -> StoreAddress:
        """The address of the rendezvous store."""
        return self._job.settings.store

    def run(self) -> ClusterResult:
        """Runs the job to its end. Leaves no process of a machine behind, even after an error.

        Raises:
            RendezvousLostError: if the rendezvous store died.
        """
        raise_stop_signals()
        for number in {*FOR_WORKERS}.difference(stop_signals()):
            signal.signal(number, self._pass_on)
        try:
            self._run_machines()
            ignore_stop_signals()
            return self._result()
        finally:
            ignore_stop_signals()
            self._kill_agents()

    def close(self) -> None:
        """End the rendezvous store, if it is this run's own."""
        try:
            if self._service is not None:
                self._service.close()
        finally:
            os.close(self._lifeline_w)
            if self._networks is not None:
                self._networks.remove()

    def _run_machines(self) -> None:
        try:
            machines = self._job.opened.machines
            for slot in range(machines):
                self._start_machine(slot, slot)
            for index in range(self._job.settings.config.spares):
                self._start_machine(None, machines + index)
            self._wait_for_agents()
        except SignalException as error:
            self._close(error.sigval)

    def _pass_on(self, number: int, _frame: object) -> None:
        """Each machine passes the signal on to its workers."""
        for pid in list(self._agents):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _start_machine(self, slot: int | None, index: int) -> None:
        pid = os.fork()
        if pid == 0:
            self._become_machine(slot, index)
        self._agents[pid] = index

    def _become_machine(self, slot: int | None, index: int) -> NoReturn:
        os.close(self._lifeline_w)
        if self._service is not None:
            self._service.let_go()
        os.setsid()  # its own process group: Ctrl-C in a terminal reaches only the supervisor
        code = 1
        try:
            settings = replace(self._job.settings, spare=slot is None)
            if self._networks is not None:
                self._networks.enter(index)
                settings = replace(settings, address=self._networks.address(index))
            job = replace(self._job, preferred_slot=slot, index=index, settings=settings)
            verdict = run_machine(job)
            code = 0 if verdict.ok else verdict.exit_code
        except (KeptOutError, UsageError) as error:
            _logger.error("%s", error, extra={"event": "machine_refused"})  # noqa: TRY400  (the line is enough)
            code = EXIT_KEPT_OUT if isinstance(error, KeptOutError) else EXIT_USAGE
        except FencedError as error:
            _logger.error("%s", error, extra={"event": "machine_fenced"})  # noqa: TRY400  (the line is enough)
            code = EXIT_FENCED
        except RendezvousLostError:
            code = EXIT_RENDEZVOUS_LOST  # all machines lose it: the supervisor says so once
        except Exception as error:
            name = "a spare machine" if slot is None else f"machine {slot}"
            text = f"{name}: {type(error).__name__}: {error}"
            _logger.error("%s", text, extra={"event": "machine_failed"})  # noqa: TRY400  (the line is enough)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _wait_for_agents(self) -> None:
        while self._agents:
            pid, status = self._next_end()
            if self._service is not None and not self._service.pid:
                say_restarted(self._service.address)
                self._service = self._service.again()
            if pid not in self._agents:
                continue
            index = self._agents.pop(pid)  # who replaces it gets its port
            lost_store = os.WIFEXITED(status) and os.WEXITSTATUS(status) == EXIT_RENDEZVOUS_LOST
            if lost_store and self._networks is not None:  # it may have been cut off, and the others not
                if self._verdict() is None:
                    self._replace(index)
                continue
            if lost_store:
                raise RendezvousLostError(
                    f"The rendezvous store at {self.store} did not answer a machine that needed it, and with "
                    "it the journal of the run is out of reach: start the run again with --resume."
                )
            if os.WIFSIGNALED(status):
                _end_group(pid)
                self._replace(index)
            elif self._verdict() is not None:
                self._wait_for_the_rest()
            elif os.waitstatus_to_exitcode(status) in (EXIT_FENCED, *_STOPPED):
                self._replace(index)

    def _next_end(self) -> tuple[int, int]:
        """Wait for the end of a process, and start machines meanwhile that are due."""
        while self._later:
            pid, status = self._wait_for_any(os.WNOHANG)
            if pid:
                return pid, status
            if self._later[0][0] <= time.monotonic():
                self._start_machine(None, self._later.pop(0)[1])
            time.sleep(_POLL_S)
        return self._wait_for_any()

    def _wait_for_any(self, options: int = 0) -> tuple[int, int]:
        """As :func:`os.waitpid` for any child; the store may be it."""
        pid, status = os.waitpid(-1, options)
        if self._service is not None:
            self._service.note_end(pid)
        return pid, status

    def _replace(self, index: int) -> None:
        """Start a machine: at once if a slot waits for it, else once the others have recovered, as a rule.

        They share this host's processors, and to start a machine takes some of the same time.
        """
        if self._job.settings.config.no_replacement:
            return
        if len(self._agents) < self._job.opened.machines:
            self._start_machine(None, index)
        else:
            self._later.append((time.monotonic() + _LATER_S, index))

    def _wait_for_the_rest(self) -> None:
        """Waits until the other agents see that the job has ended. Kills those that do not (stopped ones)."""
        deadline = time.monotonic() + self._job.settings.shutdown_s + _GRACE_S
        while self._agents and time.monotonic() < deadline:
            pid, _ = self._wait_for_any(os.WNOHANG)
            self._agents.pop(pid, None)
            time.sleep(0.0 if pid else _POLL_S)
        self._kill_agents()

    def _close(self, number: int) -> None:
        with contextlib.suppress(SwiftError, SignalException):  # a second signal: at once
            self._journal().append(end_by_signal(number))
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
        client = partial(
            connect,
            settings.store,
            self._job.run_id,
            timeout_s=min(_CONNECT_S, settings.config.rendezvous_timeout_s),
            admit=has_begun,
        )
        return open_journal(client, by="supervisor")

    def _verdict(self) -> Verdict | None:
        return Follower(self._journal()).state.verdict

    def _result(self) -> ClusterResult:
        excerpt = Excerpt()
        follower = Follower(self._journal(), on_entries=excerpt.on_entries, on_snapshot=excerpt.on_snapshot)
        verdict = follower.state.verdict or Verdict(False, _why_none_is_left(follower.state), 1)
        told: dict[str, list[str]] = {_STORE: [], _PASSED: []}
        for line in self._told():
            what, _, value = line.partition(" ")
            told[what].append(value)
        store = next(iter(told[_STORE]), "")  # none if no script has made a session
        return ClusterResult(verdict, excerpt, store, follower.state.injected, frozenset(told[_PASSED]))

    def _told(self) -> list[str]:
        """Whole lines: each was written at once."""
        text = b""
        with contextlib.suppress(BlockingIOError):
            while part := os.read(self._told_r, select.PIPE_BUF):
                text += part
        return text.decode().splitlines()


def _why_none_is_left(state: State) -> str:
    """Why all machines ended before the job did, as far as the journal knows."""
    refused = sorted(state.membership.refused.items())
    why = "; ".join(reason for _, reason in refused[:_MOST_REFUSED])
    more = f"; and {len(refused) - _MOST_REFUSED} more" if len(refused) > _MOST_REFUSED else ""
    return "all machines ended before the job did" + (f": {why}{more}" if why else "")


def _networks(job: MachineJob) -> Networks | None:
    """One for each machine, if they are to have their own."""
    config = job.settings.config
    if not config.networks:
        return None
    try:
        return Networks.made(job.opened.machines + config.spares)
    except OSError as error:
        raise UsageError(f"--networks: this host does not allow networks of machines: {error}") from error


def _tell(pipe: int, what: str, value: str) -> None:
    """Called in machines. One of them is enough, so a full pipe says it already."""
    with contextlib.suppress(BlockingIOError):
        os.write(pipe, f"{what} {value}\n".encode())


def _end_group(pid: int) -> None:
    """A machine fails as a whole. Its standby ends what it leaves behind, also outside of its group."""
    deadline = time.monotonic() + _STANDBY_ENDS_S
    while _has_group(pid) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    _kill_group(pid)


def _has_group(group: int) -> bool:
    """Whether a process of a group lives. One that has ended may stay in it, until it is waited for."""
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, of = entry.read_text().rpartition(")")[2].split()[:3]
            if int(of) == group and state not in "ZX":
                return True
    return False


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
