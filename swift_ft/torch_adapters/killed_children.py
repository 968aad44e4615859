"""Recognises errors that only say that a signal ended a process which the script had started.

Private parts used (tested on torch 2.11 to 2.14): the words in which a ``DataLoader`` tells of the end of one
of its processes, and the iterator that it makes, which holds them in ``_workers``. Of Python, 3.11 to 3.14:
the thread of a pool of processes, which ends the others, and forgets all, when one has ended.
"""

from __future__ import annotations

import functools
import re
import signal
import traceback
from collections.abc import Collection, Iterator
from concurrent.futures import process as pools
from multiprocessing.connection import wait
from typing import Any, NamedTuple

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
        signal: the name of the signal.
    """

    words: str
    signal: str


class _Pools:
    """Those of this process. Owner: their threads, of which one notes before the script gets the error.

    Attributes:
        signal: that has ended a process of the pool that broke last; 0 if it ended otherwise.
    """

    signal = 0


@functools.cache
def watch_pools() -> None:
    """From now on, look how the processes of this process's pools end: their errors do not say it."""
    manager: Any = getattr(pools, "_ExecutorManagerThread", None)
    original = getattr(manager, "terminate_broken", None)
    if original is None:  # a Python that calls it otherwise: no broken pool is taken for a killed child
        return

    @functools.wraps(original)
    def terminate_broken(self: Any, *cause: Any) -> None:
        _Pools.signal = _signal_of([*self.processes.values()])
        original(self, *cause)

    manager.terminate_broken = terminate_broken


def killed_child(error: BaseException) -> KilledChild | None:
    """The killed process that an error tells of; None if neither it nor its causes tell of one."""
    errors = list(_chain(error))
    for one in errors:  # the first says most, and another may have been raised from it
        if isinstance(one, RuntimeError) and (killed := _KILLED.match(str(one))):
            return _of_loader(_name_of(killed["signal"].strip()), killed["hint"].strip().rstrip("."))
    for one in errors:
        if isinstance(one, pools.BrokenProcessPool) and _Pools.signal:
            name = signal_name(_Pools.signal)
            return KilledChild(f"a process of a pool was killed by {name}", name)
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
            return _signal_of(loader._workers)
    return 0


def _signal_of(processes: Collection[Any]) -> int:
    """The signal that has ended one of some processes. 0 if none has."""
    ended = wait([process.sentinel for process in processes], _ENDS_WITHIN_S)
    for process in processes:
        # The sentinel is a file that ends with the others: the exit code comes a moment later.
        if process.sentinel in ended:
            process.join(_ENDS_WITHIN_S)
    return -min((0, *(process.exitcode or 0 for process in processes)))
