"""Standby: a process that has torch imported and forks workers on request, in tens of milliseconds.

It is forked from the agent while that still has a single thread, imports what a worker needs, and stays
single-threaded itself, so that forking from it is safe. It never touches an accelerator. It is the parent of
its workers: it reaps them and reports to the agent how they ended. When the agent dies, for whatever reason,
the standby's socket closes and the standby kills the workers: a machine fails as a whole. What a dead worker
has started ends with it (`strays.py`), before the agent hears of its end: its ports are free when a
replacement begins. It forks guests, too (`launch/agent/guests.py`): these are agents of their own.

A spare machine's workers are forked ahead, make ready (`rehearsal.py`), and wait for what they are to run.
Such a large process takes 20 ms to fork, and in a recovery all others would wait for it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import itertools
import json
import os
import select
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, NoReturn

from swift_ft.config.exit_codes import EXIT_USAGE
from swift_ft.errors import UsageError
from swift_ft.launch.processes.forked import ending_here
from swift_ft.launch.processes.preload import preload
from swift_ft.launch.processes.strays import adopt_orphans, kill_strays
from swift_ft.launch.processes.worker import WorkerJob, run_worker
from swift_ft.launch.signals import leave_to_the_launcher, undo_ignoring
from swift_ft.observe.spans import recorder
from swift_ft.observe.waits import waiting
from swift_ft.plain import from_plain

_MAX_PACKET = 1 << 20
_AUDIT = "swift_ft.offline.audit"
_NO_WORKER = "a worker cannot be started"
_ANSWER_S = 120.0
"""Longer than any import of torch."""
_ENDS_S = 30.0
_LOOK_S = 0.005


class Standby:
    """The agent's handle on its standby process. Create it while the agent has a single thread.

    Args:
        modules: what it imports besides what each worker needs (:func:`preload`).
        close_in_child: called in the standby, at first.
        become_guest: called in a guest's process, with its slot, its host, and its number there.

    Attributes:
        guests: the process of each guest that has not ended, by slot; 0 until the standby has said it.
        unforked: why the last guest of a slot could not be forked.
    """

    def __init__(
        self,
        modules: Sequence[str] = (),
        *,
        close_in_child: Callable[[], None] | None = None,
        become_guest: Callable[[int, str, int], NoReturn] | None = None,
    ) -> None:
        self.guests: dict[int, int] = {}
        self.unforked: dict[int, str] = {}
        self._numbers: dict[int, int] = {}  # of guests, by slot
        self._channel, child = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # The child collects garbage, too. What waits for threads as it is freed, as a group of torch's does,
        # has to end here: the child has none of these threads, and would wait for ever.
        gc.collect()
        self.pid = os.fork()
        if self.pid == 0:
            self._channel.close()
            if close_in_child is not None:
                close_in_child()
            _serve(child, modules, become_guest)
        child.close()
        self._channel.settimeout(_ANSWER_S)

    def fileno(self) -> int:
        """For a selector: readable when a worker ended."""
        return self._channel.fileno()

    def launch(
        self,
        job: WorkerJob,
        *,
        local_rank: int,
        stdout: str,
        stderr: str,
        channel: socket.socket,
        line: socket.socket | None = None,
    ) -> None:
        """Fork a worker. Its pid comes back through :meth:`receive`.

        Args:
            job: what it runs.
            local_rank: the number that the news of its start carries.
            stdout: file to append its output to; empty for the agent's own.
            stderr: the same for errors.
            channel: the worker's end of its channel to the agent; closed here.
            line: the worker's end of its line to the agent's relay; closed here. None where there is none.
        """
        request = {"job": asdict(job), "local_rank": local_rank, "stdout": stdout, "stderr": stderr}
        ends = [channel] if line is None else [channel, line]
        socket.send_fds(self._channel, [json.dumps(request).encode()], [end.fileno() for end in ends])
        for end in ends:
            end.close()

    def launch_audit(self, channel: socket.socket) -> None:
        """Fork a process that audits (`launch/agent/audits.py`).

        Args:
            channel: its end of the channel to the agent; closed here.
        """
        socket.send_fds(self._channel, [json.dumps({"audit": True}).encode()], [channel.fileno()])
        channel.close()

    def prepare(self, workers: int) -> None:
        """Fork workers that wait for their jobs: the next launches need no fork."""
        self._channel.send(json.dumps({"prepare": workers}).encode())

    def launch_guest(self, slot: int, host: str) -> None:
        """Fork a guest for a slot, on the machine ``host``."""
        taken = {self._numbers[other] for other in self.guests}
        number = self._numbers[slot] = next(number for number in itertools.count(1) if number not in taken)
        self.guests[slot] = 0
        self._channel.send(json.dumps({"guest": slot, "host": host, "number": number}).encode())

    def receive(self) -> dict[str, int] | None:
        """The next report: ``{"started": pid, "local_rank": n}`` or ``{"ended": pid, "status": n}``.

        ``{"stopped": pid}`` says that a signal has stopped one. The start of a guest has its slot, as
        ``guest``, instead of a local rank.

        ``status`` is negative for a signal. None when the standby itself is gone.

        Raises:
            TimeoutError: if it does not answer.
            ChildProcessError: if it could not fork a worker.
            UsageError: if it has refused to begin.
        """
        with contextlib.suppress(ConnectionError):
            packet = self._channel.recv(_MAX_PACKET)
            if packet:
                report: dict[str, Any] = json.loads(packet)
                if "refused" in report:
                    raise UsageError(report["refused"])
                if "unforked" in report and "guest" not in report:
                    raise ChildProcessError(f"a worker cannot be forked: {report['unforked']}")
                self._note_guest(report)
                return report
        return None

    def _note_guest(self, report: dict[str, Any]) -> None:
        if "unforked" in report:
            self.unforked[report["guest"]] = report["unforked"]
            del self.guests[report["guest"]]
        elif "guest" in report:
            self.guests[report["guest"]] = report["started"]
        else:
            self.guests = {slot: pid for slot, pid in self.guests.items() if pid != report.get("ended")}

    def kill_strays(self) -> None:
        """End what the workers have started that were just stopped. The next launch comes after it."""
        with contextlib.suppress(OSError):  # the standby is gone, as the next one who needs it learns
            self._channel.send(json.dumps({"kill": "strays"}).encode())

    def close(self) -> None:
        """End the standby and with it all its workers. What a script has left behind on purpose goes on."""
        with contextlib.suppress(OSError):
            self._channel.send(json.dumps({"kill": "workers"}).encode())
        self._channel.close()
        with contextlib.suppress(ChildProcessError):
            if not self._ends_within(_ENDS_S):  # its workers end with it: their channels to the agent close
                os.kill(self.pid, signal.SIGKILL)
                self._ends_within(_ENDS_S)

    def _ends_within(self, limit_s: float) -> bool:
        deadline = time.monotonic() + limit_s
        with waiting("the end of the standby process", limit_s):
            while os.waitpid(self.pid, os.WNOHANG)[0] == 0:
                if time.monotonic() > deadline:
                    return False
                time.sleep(_LOOK_S)
        return True


def _serve(
    agent: socket.socket, modules: Sequence[str], become_guest: Callable[[int, str, int], NoReturn] | None
) -> NoReturn:
    """The standby's own loop: fork on request, reap, report."""
    ignored = leave_to_the_launcher()  # the agent decides when workers end
    wake_r, wake_w = os.pipe()
    os.set_blocking(wake_w, False)
    signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    try:
        preload(modules)
    except UsageError as error:
        agent.send(json.dumps({"refused": str(error)}).encode())
        os._exit(EXIT_USAGE)
    adopt_orphans()
    children: set[int] = set()
    forks = _Forks(agent, (wake_r, wake_w), become_guest, partial(_default_signals, ignored))
    selector = selectors.DefaultSelector()
    selector.register(agent, selectors.EVENT_READ)
    selector.register(wake_r, selectors.EVENT_READ)
    try:
        while True:
            for key, _ in selector.select():
                if key.fileobj is agent:
                    forks.serve(children)
                else:
                    os.read(wake_r, 4096)
            _reap(agent, children)
    except OSError:  # the agent is gone
        kill_strays(())
        os._exit(0)


def _reap(agent: socket.socket, children: set[int]) -> None:
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
        if pid == 0:
            return
        if pid not in children:  # what a script has left behind
            continue
        if os.WIFSTOPPED(status):
            agent.send(json.dumps({"stopped": pid}).encode())
            continue
        children.discard(pid)
        if status:
            kill_strays(children)
        agent.send(json.dumps({"ended": pid, "status": os.waitstatus_to_exitcode(status)}).encode())


class _NoForkError(Exception):
    """The kernel has no process for a child: a limit is reached. The agent is there, and is told."""


def _fork() -> int:
    try:
        return os.fork()
    except OSError as error:
        raise _NoForkError(str(error)) from error


class _Forks:
    """Forks what the agent asks for.

    Args:
        agent: the socket to it.
        wake: the pipe that the end of a child writes to.
        become_guest: see :class:`Standby`.
        default_signals: called in a child, when signals are its own affair.
    """

    def __init__(
        self,
        agent: socket.socket,
        wake: tuple[int, int],
        become_guest: Callable[[int, str, int], NoReturn] | None,
        default_signals: Callable[[], None],
    ) -> None:
        self._agent = agent
        self._wake = wake
        self._become_guest = become_guest
        self._default_signals = default_signals
        self._prepared: list[tuple[int, socket.socket]] = []  # and where each waits for its job

    def serve(self, children: set[int]) -> None:
        """Do what the agent asks for next.

        Args:
            children: the processes that were forked. Gets the new ones.

        Raises:
            OSError: the agent is gone.
        """
        packet, fds, _, _ = socket.recv_fds(self._agent, _MAX_PACKET, 2)
        if not packet:
            raise ConnectionError
        request = json.loads(packet)
        if "kill" in request:
            _kill(request["kill"], children)
            return
        if "audit" in request:
            with contextlib.suppress(_NoForkError):  # the agent sees that nobody answers
                self._audit(fds[0])
            os.close(fds[0])
            return
        if "prepare" in request:
            with contextlib.suppress(_NoForkError):  # they are forked when they are needed
                children.update([self._prepare() for _ in range(request["prepare"])])
            return
        name = "guest" if "guest" in request else "local_rank"
        pid = 0 if name == "guest" else self._hand_over(packet, fds)
        report: dict[str, Any] = {name: request[name]}
        try:
            pid = pid or self._fork(request, fds)
            children.add(pid)
            report["started"] = pid
        except _NoForkError as error:
            report["unforked"] = str(error)
        for fd in fds:
            os.close(fd)
        self._agent.send(json.dumps(report).encode())

    def _audit(self, fd: int) -> None:
        if _fork() == 0:
            with ending_here("an audit cannot be started"):
                self._leave()
                self._default_signals()
                os.setsid()  # so that it ends with all that it has started
                importlib.import_module(_AUDIT).serve_agent(socket.socket(fileno=fd))

    def _prepare(self) -> int:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = _fork()
        if pid == 0:
            with ending_here(_NO_WORKER):
                self._leave()
                ours.close()
                rehearsal = importlib.import_module("swift_ft.launch.processes.rehearsal")
                rehearsal.rehearse(lambda: _has_packet(theirs))
                packet, fds, _, _ = socket.recv_fds(theirs, _MAX_PACKET, 2)
                started = recorder.now()
                theirs.close()
                if not packet:  # the standby is gone
                    os._exit(0)
                self._default_signals()
                _become_worker(json.loads(packet), fds, started)
        theirs.close()
        self._prepared.append((pid, ours))
        return pid

    def _hand_over(self, packet: bytes, fds: list[int]) -> int:
        """Give a job to a process that waits for one. 0 if none does."""
        while self._prepared:
            pid, end = self._prepared.pop()
            with end, contextlib.suppress(OSError):  # it has ended
                socket.send_fds(end, [packet], fds)
                return pid
        return 0

    def _fork(self, request: dict[str, Any], fds: list[int]) -> int:
        pid = _fork()
        if pid == 0:
            forked = recorder.now()
            with ending_here("a guest cannot be started" if "guest" in request else _NO_WORKER):
                self._leave()
                self._default_signals()
                if "guest" in request:
                    assert self._become_guest is not None
                    self._become_guest(request["guest"], request["host"], request["number"])
                _become_worker(request, fds, forked)
        return pid

    def _leave(self) -> None:
        """In a child: close what is the standby's own."""
        self._agent.close()
        signal.set_wakeup_fd(-1)
        for fd in self._wake:
            os.close(fd)
        for _, end in self._prepared:
            end.close()


def _kill(whom: str, children: set[int]) -> None:
    """Kill ``strays`` of workers that the agent has stopped, or all ``workers`` as it leaves."""
    if whom == "strays":
        kill_strays(children)
        return
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    os._exit(0)


def _has_packet(end: socket.socket) -> bool:
    """Whether a packet, or the end, can be read at once."""
    return bool(select.select([end], [], [], 0)[0])


def _default_signals(ignored: Mapping[signal.Signals, object]) -> None:
    undo_ignoring(ignored)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _become_worker(request: dict[str, object], fds: list[int], forked: int) -> NoReturn:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for stream, fd in (("stdout", 1), ("stderr", 2)):
        if path := str(request[stream]):
            target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(target, fd)
            os.close(target)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    job = request["job"]
    assert isinstance(job, dict)
    channel, *line = (socket.socket(fileno=fd) for fd in fds)
    run_worker(from_plain(WorkerJob, job), channel, line[0] if line else None, forked)
