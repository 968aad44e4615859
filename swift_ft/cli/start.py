"""The command ``swift-run`` from its first moment on: a signal ends it with a line while torch is imported.

Nothing is imported here that takes time.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from typing import NoReturn

from swift_ft.cli.first_help import SWIFT_RUN, answer_at_once

_STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_FOR_WORKERS = (signal.SIGUSR1, signal.SIGUSR2)


def run_and_exit() -> NoReturn:
    """Run the command and end the process with its exit code."""
    end_with_a_line()
    answer_quick_questions()
    importlib.import_module("swift_ft.cli.run").run_and_exit()
    raise AssertionError  # it has ended


def answer_quick_questions() -> None:
    """``--help`` and ``--version`` alone are answered without torch."""
    if (text := answer_at_once(sys.argv[1:], "swift-run", SWIFT_RUN)) is not None:
        sys.stdout.write(text)
        raise SystemExit(0)


def end_with_a_line() -> None:
    """From now on a signal ends this process with a line, unless the user's shell has it ignored."""
    for number in (*_STOP, *_FOR_WORKERS):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _end if number in _STOP else _say_ignored)


def end_as_usual(*, at_once: bool) -> None:
    """Ctrl-C is an exception again: what has begun by now ends in order.

    Args:
        at_once: the other signals end this process even while it waits in C++, without a line.
    """
    for number in _STOP if at_once else (signal.SIGINT,):
        if signal.getsignal(number) is _end:
            usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, usual)


def _end(number: int, _frame: object) -> NoReturn:
    _say(f"stopped by {signal.Signals(number).name}")
    os._exit(128 + number)


def _say_ignored(number: int, _frame: object) -> None:
    _say(f"{signal.Signals(number).name} is ignored: no worker runs here now")


def _say(text: str) -> None:
    os.write(2, f"swift-run: {text}\n".encode())
