"""An operation of the script that is under way on one of its groups: a wait for it ends when a peer is lost.

Private parts used (tested on torch 2.11 to 2.14): the methods of ``Work`` that have an underscore.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from swift_ft.observe.spans import recorder
from swift_ft.torch_adapters.abortable_waits import AbortableWaits
from swift_ft.torch_adapters.script_operations import Operation
from swift_ft.torch_adapters.step_failures import step_failures
from swift_ft.torch_adapters.versions.group_methods import those_of

OF_WORK = (
    *("exception", "result", "source_rank", "_source_rank", "get_future_result", "_get_duration"),
    *("_get_op_type", "_get_sequence_number"),
)
"""Methods of an operation under way, apart from those below. Not every torch has all of them."""

STREAM_WAITS = ("synchronize", "block_current_stream")
"""Waits on the device, beside :meth:`LastingWork.wait`, which is one there. On the host they do nothing."""

ASKED = ("is_completed", "is_success")
"""Answers after which a script may use a result without a wait."""

End = tuple[Callable[[], None], Operation | None]
"""A function for the script's thread to call once an operation is over; and that operation, if anybody looks
at its tensors."""


class EndedOperations:
    """Operations of a step for which the script waits by futures: a thread of torch's sees their end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards what follows
        self._number = 0
        self._ended: list[End] = []

    def begin(self) -> None:
        """A step begins. Those of earlier ones count no more."""
        with self._lock:
            self._number += 1
            self._ended.clear()

    def watch(self, future: torch.futures.Future[Any], ends: Sequence[End]) -> torch.futures.Future[Any]:
        """A future that is complete once what has arrived is kept: before the script can change it."""
        number = self._number

        def keep(ended: torch.futures.Future[Any]) -> Any:
            value = ended.value()  # raises what has failed
            for _, operation in ends:
                if operation is not None:
                    operation.keep()
            with self._lock:
                if number == self._number:
                    self._ended += ends
            return value

        return future.then(keep)

    def settle(self) -> None:
        """The step is complete: in the script's thread, call for those that are over."""
        with self._lock:
            ended, self._ended = self._ended, []
        call_all(ended)


class LastingWork(dist.Work):
    """An operation under way. A failed wait has this file in its traceback: it is one of communication.

    Args:
        native: torch's.
        ends: called once, when a wait for it is over.
        on_host: a wait for it holds the thread, and gloo may not end it. Elsewhere it returns at once, and
            what an abort has ended later is found when the host waits for the device.
        by_itself: it completes its future, if it has one, also if nobody waits for it.

    Attributes:
        waits: where the training thread waits for operations on the host, so that an abort ends the wait.
            None until a session is made.
        by_future: operations for which the script waits by futures.
    """

    waits: ClassVar[AbortableWaits | None] = None
    by_future: ClassVar[EndedOperations] = EndedOperations()

    def __init__(
        self,
        native: dist.Work,
        ends: Sequence[End] = (),
        *,
        on_host: bool = False,
        by_itself: bool = False,
    ) -> None:
        super().__init__()
        self._native = native
        self._ends = ends
        self._kept: torch.futures.Future[Any] | None = None  # once its ends are for a future
        self._on_host = on_host
        self._by_itself = by_itself

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for its end."""
        try:
            self._go_on()
            ended = self._waited(timeout)
            if (waits := LastingWork.waits) is not None and self._on_host:
                waits.raise_if_aborted()
            if self._kept is not None:
                _wait(self._kept, timedelta(0))
            self._end()
        except Exception as error:
            note_failure(error)
            raise
        return ended

    def _go_on(self) -> None:
        """The script goes on as if this were over. On a device, the host has not waited for it then.

        Raises:
            RuntimeError: an abort may have ended it.
        """
        waits = LastingWork.waits
        if waits is not None and not self._on_host:
            waits.begun()  # the operation itself may have begun long before
            waits.raise_if_aborted()

    def _end(self) -> None:
        """It is over, for all that the script does from now on: on the host, or behind it on the device."""
        ends, self._ends = self._ends, ()
        call_all(ends)

    def _waited(self, timeout: timedelta) -> bool:
        waits = LastingWork.waits
        in_training = threading.current_thread() is threading.main_thread()
        if waits is None or not (self._on_host and in_training) or self._native.is_completed():
            return _wait(self._native, timeout)
        future = _future_of(self._native) if self._by_itself and not timeout else None
        with recorder.while_waiting():
            if future is None:
                waits.call_or_abort(partial(_wait, self._native, timeout))
                return True
            waits.completed_or_abort(future)
        return _wait(self._native, timeout)

    @property
    def timeout(self) -> timedelta:
        """The longest time that the operation may take."""
        native: Any = self._native
        return native.timeout  # type: ignore[no-any-return]  # since torch 2.14

    def get_future(self) -> torch.futures.Future[Any]:
        """Completed at its end. On a device, when it is enqueued."""
        if (waits := LastingWork.waits) is not None and not self._on_host:
            waits.given_as_future()
        if self._ends:
            ends, self._ends = self._ends, ()
            self._kept = LastingWork.by_future.watch(self._future(), ends)
        return self._kept if self._kept is not None else self._future()

    def _future(self) -> torch.futures.Future[Any]:
        return step_failures.watch(self._native.get_future())


def _future_of(native: dist.Work) -> torch.futures.Future[Any] | None:
    """Of an operation; None if it has none."""
    try:
        return native.get_future()
    except RuntimeError:
        return None


def unlogged_future(work: dist.Work) -> torch.futures.Future[Any]:
    """Completed at an operation's end. It is not the script's: no log is to have its results."""
    return work._future() if isinstance(work, LastingWork) else work.get_future()


def is_over() -> bool:
    """Whether no operation of the script can succeed: its groups were aborted, or will be."""
    waits = LastingWork.waits
    return waits is not None and waits.over


def note_failure(error: Exception) -> None:
    """It is a failure of the step, also if the script catches it."""
    step_failures.note(error, is_over=is_over())


def call_all(ends: Sequence[End]) -> None:
    """Operations are over, and the script goes on."""
    for on_end, _ in ends:
        on_end()


def _wait(native: Any, timeout: timedelta) -> bool:
    """Raises in this file, by which `comm_errors` recognizes communication."""
    return bool(native.wait(timeout) if timeout else native.wait())


def forwarded(name: str, to: str) -> Any:
    """A method that calls that of torch's object: in this file, by which `comm_errors` knows its errors."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(getattr(self, to), name)(*args, **kwargs)

    forward.__name__ = name
    return forward


def _stream_wait(name: str) -> Any:
    def wait(self: LastingWork, *args: Any, **kwargs: Any) -> None:
        try:
            self._go_on()
            getattr(self._native, name)(*args, **kwargs)
            if not self._on_host:
                self._end()
        except Exception as error:
            note_failure(error)
            raise

    wait.__name__ = name
    return wait


def _asked(name: str) -> Any:
    def ask(self: LastingWork) -> bool:
        found = bool(getattr(self._native, name)())
        if found and (waits := LastingWork.waits) is not None and not self._on_host:
            waits.begun()
        return found

    ask.__name__ = name
    return ask


for _name in those_of(dist.Work, OF_WORK):
    setattr(LastingWork, _name, forwarded(_name, "_native"))
for _name in those_of(dist.Work, STREAM_WAITS):
    setattr(LastingWork, _name, _stream_wait(_name))
for _name in those_of(dist.Work, ASKED):
    setattr(LastingWork, _name, _asked(_name))
