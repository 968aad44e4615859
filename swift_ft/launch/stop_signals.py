"""The signals that ask a launcher to stop, as an exception in its main thread.

torchelastic handles them the same way, but only from the first start of workers on.
"""

from __future__ import annotations

import os
import signal
from typing import NoReturn

from torch.distributed.elastic.multiprocessing.api import SignalException

__all__ = [
    "SignalException",
    "default_stop_signals",
    "ignore_stop_signals",
    "raise_stop_signals",
    "stopped_by",
]

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def raise_stop_signals() -> None:
    """From now on each of the signals raises a :class:`SignalException` in the main thread."""
    for number in _SIGNALS:
        signal.signal(number, _raise)


def ignore_stop_signals() -> None:
    """From now on the launcher cleans up undisturbed. Only another Ctrl-C ends it, at once."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGINT, lambda number, _: os._exit(128 + number))


def default_stop_signals() -> None:
    """From now on the signals end this process at once, even while it waits in C++."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def stopped_by(number: int) -> str:
    """What is said of such an end."""
    return f"stopped by {signal.Signals(number).name}"


def _raise(number: int, _frame: object) -> NoReturn:
    name = signal.Signals(number)
    raise SignalException(f"stopped by {name.name}", sigval=name)
