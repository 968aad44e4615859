"""Machines as a test's scripts see them: who dies, and how. Each notes its processes in the test's folder."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import NoReturn

from swift_ft.config.worker_context import WorkerContext

STORE = "store"
"""The victim that is the rendezvous store."""


def note_machine() -> None:
    """Note this worker and its agent, so that others can kill them."""
    context = WorkerContext.from_env()
    _file(context.rank).write_text(f"{context.agent_pid} {os.getpid()}")


def is_first_process() -> bool:
    """Whether this worker's process has begun with the job. A variable of a script cannot say so.

    That of a replacement is what it was in the worker whose place it takes, so ask each time.
    """
    return WorkerContext.from_env().started_in == 1


def note_store() -> None:
    """Note the rendezvous store."""
    _file(STORE).write_text(str(store_process()))


def store_process() -> int:
    """The process id of the rendezvous store: the second process that the parent of all agents starts."""
    agent = WorkerContext.from_env().agent_pid
    parent = Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2].split()[1]
    return int(Path(f"/proc/{parent}/task/{parent}/children").read_text().split()[1])


def kill_once(*victims: int | str, by_signal: signal.Signals = signal.SIGKILL) -> None:
    """Kill machines that noted their processes, all of them at the very same time. Later calls do nothing.

    Args:
        victims: the ranks of one worker of each, or :data:`STORE`. The caller's own one comes last.
        by_signal: that kills them.
    """
    files = [_file(victim) for victim in victims]
    if not all(file.exists() for file in files):
        return
    doomed = [int(pid) for file in files for pid in file.read_text().split()]
    for file in files:
        file.unlink()
    for pid in doomed:
        with contextlib.suppress(ProcessLookupError):  # a worker dies with its agent
            os.kill(pid, by_signal)


def die(*_: object, **__: object) -> NoReturn:
    """Kill the whole machine of this worker, at once."""
    os.kill(WorkerContext.from_env().agent_pid, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def _file(victim: int | str) -> Path:
    return Path(os.environ["SWIFT_TEST_FOLDER"]) / f"pids{victim}"
