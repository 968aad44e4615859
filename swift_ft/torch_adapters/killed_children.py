"""Recognises errors that only say that a signal ended a process which the script had started.

Private parts used (tested on torch 2.11 to 2.14): the words in which a ``DataLoader`` tells of the end of one
of its processes, and the iterator that it makes, which holds them in ``_workers``.
"""

from __future__ import annotations

import re
import signal
import traceback
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from typing import NamedTuple

from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from swift_ft.host.signal_names import signal_name

_KILLED = re.compile(
    r"DataLoader worker \(pid \d+\) is killed by signal: (?P<signal>[^.]+)\.?(?P<hint>[^\n]*)"
)
_FOUND_DEAD = re.compile(r"DataLoader worker \(pid\(s\) [\d, ]+\) exited unexpectedly")
_ENDS_WITHIN_S = 1.0
"""A process closes its files a little before it has ended."""


class KilledChild(NamedTuple):
    """A process of the script's that was killed.

    Attributes:
        words: what it was, what killed it, and what torch advises.
        signal: the name of the signal; empty where nobody tells.
    """

    words: str
    signal: str = ""


def killed_child(error: BaseException) -> KilledChild | None:
    """The killed process that an error tells of; None if neither it nor its causes tell of one."""
    errors = list(_chain(error))
    for one in errors:  # the first says most, and another may have been raised from it
        if isinstance(one, RuntimeError) and (killed := _KILLED.match(str(one))):
            return _of_loader(_name_of(killed["signal"].strip()), killed["hint"].strip().rstrip("."))
    for one in errors:
        if isinstance(one, BrokenProcessPool):
            return KilledChild("a process of a pool ended abruptly")
        # A batch that it has announced is fetched from it: that fails before the loader finds it dead.
        found_dead = isinstance(one, OSError | EOFError) or _FOUND_DEAD.match(str(one))
        if found_dead and (number := _signal_of_dead(one)):
            return _of_loader(signal_name(number))
    return None


def _of_loader(name: str, hint: str = "") -> KilledChild:
    words = f"a process of a data loader was killed by {name}"
    return KilledChild(f"{words}. {hint}" if hint else words, name)


def _name_of(words: str) -> str:
    """The name of the signal that the C library calls so, such as ``Bus error``; these words if none is."""
    found = (number for number in signal.valid_signals() if signal.strsignal(number) == words)
    return next(map(signal_name, sorted(found)), words)


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)


def _signal_of_dead(error: BaseException) -> int:
    """The signal that has ended a process of the loader that an error comes from. 0 if none has."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        loader = frame.f_locals.get("self")
        if isinstance(loader, _MultiProcessingDataLoaderIter):
            ended = wait([process.sentinel for process in loader._workers], _ENDS_WITHIN_S)
            for process in loader._workers:
                # The sentinel is a file that ends with the others: the exit code comes a moment later.
                if process.sentinel in ended:
                    process.join(_ENDS_WITHIN_S)
            return -min((0, *(process.exitcode or 0 for process in loader._workers)))
    return 0
