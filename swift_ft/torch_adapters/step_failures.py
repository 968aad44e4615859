"""Failed operations of the current step, noted whatever the script makes of the exception.

A script may catch an error of broken communication and go on, or raise another one in its place. The step was
interrupted all the same: what it went on with is not what an undisturbed step has. So each failure is noted
where an operation fails. An abort alone is none: a step whose communication was done by then is complete.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from swift_ft.errors import SwiftError, first_line

TRANSPORTS = ("gloo/transport/", "NCCL")
"""In the text of an error, they say that a connection broke, and that no argument is wrong."""

_ARGUMENTS = ("ncclInvalidUsage", "ncclInvalidArgument")
"""NCCL's words for a call that is wrong, such as two workers on one device."""


class StepFailures:
    """The first failure of each kind since the step began.

    Attributes:
        cause: the first line of the error of the broken communication; None if there was none.
        error: of swift_ft itself, such as one that ends a replay; None if there was none.
        tell: called with the cause at once, in whatever thread: the script's next line may end the process.
    """

    def __init__(self) -> None:
        self.cause: str | None = None
        self.error: SwiftError | None = None
        self.tell: Callable[[str], object] = lambda _: None
        self._number = 0

    def begin(self) -> None:
        """A step begins."""
        self.cause = self.error = None
        self._number += 1

    def note(self, error: BaseException, *, is_over: bool = False) -> None:
        """An operation failed, in the thread that trains or in one of torch's.

        An argument that torch does not take is not a broken communication: a script may try another one.

        Args:
            error: what it raised.
            is_over: the group was aborted, or its generation is over, so it could not succeed.
        """
        if _is_background():
            return
        if isinstance(error, SwiftError):
            self.error = self.error or error
        elif is_over or is_of_transport(error):
            self.broken(first_line(error))

    def broken(self, cause: str) -> None:
        """Communication of the step failed."""
        if self.cause is None:
            self.cause = cause
            self.tell(cause)

    def watch(self, future: torch.futures.Future[Any]) -> torch.futures.Future[Any]:
        """Note the failure of an operation of this step for which the script waits by a future."""
        number = self._number

        def done(ended: torch.futures.Future[Any]) -> None:
            try:
                ended.value()
            except Exception as error:  # the script gets it, too
                if number == self._number and is_of_transport(error):
                    self.broken(first_line(error))

        future.add_done_callback(done)
        return future


def is_of_transport(error: BaseException) -> bool:
    """Whether an error of an operation says that its connections broke."""
    if any(name in str(error) for name in _ARGUMENTS):
        return False
    if isinstance(error, dist.DistBackendError | dist.DistNetworkError):
        return True
    return isinstance(error, RuntimeError) and any(name in str(error) for name in TRANSPORTS)


def _is_background() -> bool:
    """Whether this is a thread that Python code has started: what it communicates is of no step.

    Python knows the threads of torch's engines as dummies.
    """
    thread = threading.current_thread()
    return thread is not threading.main_thread() and not isinstance(thread, threading._DummyThread)


step_failures = StepFailures()
"""Those of this process's script."""
