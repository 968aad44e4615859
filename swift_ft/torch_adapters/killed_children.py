"""Which errors say that a signal has ended a process that a script had started: no error of the script.

Private parts used (tested on torch 2.13): the words in which a ``DataLoader`` tells of the end of one of its
processes, and the name ``failed_workers`` under which it holds those that it finds dead.
"""

from __future__ import annotations

import re
import signal
import traceback
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool

__all__ = ["killed_child"]

_KILLED = re.compile(r"DataLoader worker \(pid \d+\) is killed by signal: (?P<signal>[^.]+)")
_FOUND_DEAD = re.compile(r"DataLoader worker \(pid\(s\) [\d, ]+\) exited unexpectedly")


def killed_child(error: BaseException) -> str:
    """Which process was killed, in words. Empty if an error, and what has caused it, says nothing of one."""
    for one in _chain(error):
        if isinstance(one, BrokenProcessPool):
            return "a process of a pool ended abruptly"
        if isinstance(one, RuntimeError) and (killed := _KILLED.match(str(one))):
            return f"a process of a data loader was killed by a signal ({killed['signal'].strip()})"
        if isinstance(one, RuntimeError) and _FOUND_DEAD.match(str(one)) and (number := _signal_of_dead(one)):
            return f"a process of a data loader was killed by {signal.Signals(number).name}"
    return ""


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)


def _signal_of_dead(error: RuntimeError) -> int:
    """The signal that has ended one of a loader's processes. 0 if all have ended by themselves."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        for process in frame.f_locals.get("failed_workers", ()):
            if (process.exitcode or 0) < 0:
                return -int(process.exitcode)
    return 0
