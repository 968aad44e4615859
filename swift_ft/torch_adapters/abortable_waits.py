"""Waits that an abort ends, even where gloo does not.

gloo loses a send if its peer dies right after it announced that it is ready to receive. A thread that waits
for that send is never woken. The same holds for a thread that waits for a peer to connect. So another thread
waits instead, and the training thread waits for the end of that wait or for an abort.

A collective needs no other thread: a thread of gloo's own carries it out, and completes its future. The
training thread waits for that or for an abort. Messages complete nothing before somebody waits for them.

Private parts used (tested on torch 2.11 to 2.14): ``schedules._wait_batch_p2p``, through which all pipeline
schedules wait, is replaced.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import schedules

from swift_ft.host.alarms import alarms
from swift_ft.host.under_way import UnderWay
from swift_ft.observe.spans import recorder
from swift_ft.torch_adapters.step_failures import step_failures

_GRACE_S = 0.1
"""The longest time that a wait may take to end by itself after an abort, with the transport's own message."""

ABORTED = "the group was aborted, and its operations gave nothing"


class _Ending:
    """The end of something that the training thread waits for, or the decision to wait no longer."""

    def __init__(self) -> None:
        self._ended: SimpleQueue[None] = SimpleQueue()  # a tenth of the price of an Event
        self.over = self.lost = False

    def end(self, _: object = None) -> None:
        """It has ended. May be called from any thread, once."""
        self.over = True
        self._ended.put(None)

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until it is over or lost, once. False if neither is so in time."""
        try:
            self._ended.get(timeout=timeout_s)
        except Empty:
            return False
        return True

    def lose(self) -> None:
        """Stop waiting for it, unless it is over."""
        if not self.over:
            self.over = self.lost = True
            self._ended.put(None)


class _Call(_Ending):
    """One call that the other thread makes."""

    def __init__(self, function: Callable[[], object]) -> None:
        super().__init__()
        self._function: Callable[[], object] | None = function
        self._error: BaseException | None = None

    def run(self) -> bool:
        """Make the call. Returns whether the training thread still waits for it."""
        assert self._function is not None
        try:
            self._function()
        except BaseException as error:  # the waiting thread raises it
            self._error = error
        self.end()
        return not self.lost

    def finish(self) -> None:
        """Raise what the call raised. Forgets the error and the function, which refer to the group."""
        error = self._error
        self._function = self._error = None
        if error is not None:
            raise error


class AbortableWaits:
    """Waits for one training thread, which :meth:`abort` ends.

    :meth:`install` puts it in the place of the function with which torch's schedules wait.

    Args:
        is_cancelled: whether the generation that this worker computes in is over. A schedule asks before it
            computes on, since what it waits for next may be there already.

    Attributes:
        silent: an abort ends operations without an error. What they gave then is undefined.
        limit_s: how long a wait may take whose operation has no deadline of its own; None if all have one.
        unawaited: operations may have begun, or the script may have waited for some on its device, since the
            host last waited for the device.
        before_abort: called in the thread that aborts, before a silent abort. What is there then is right.
        beginnings: calls that give an operation to a backend. They take microseconds, unless a communicator
            forms in them. An abort of NCCL waits for them: a call that is underneath it spins on a
            communicator that is gone, until NCCL's own timeout (seen with torch 2.11).
    """

    def __init__(self, is_cancelled: Callable[[], bool] = lambda: False) -> None:
        self._is_cancelled = is_cancelled
        self._lock = threading.Lock()
        self._current: _Ending | None = None
        self._aborted = self.silent = self.unawaited = self._futures = False
        self.limit_s: float | None = None
        self.before_abort: Callable[[], None] = lambda: None
        self._requests: SimpleQueue[_Call] | None = None
        self.beginnings = UnderWay()

    def install(self) -> None:
        """From now on all schedules of this process wait here."""
        seam: Any = schedules
        seam._wait_batch_p2p = self.wait_or_abort

    @property
    def over(self) -> bool:
        """Whether the connections were aborted, or will be."""
        return self._aborted or self._is_cancelled()

    @property
    def in_doubt(self) -> bool:
        """Whether an abort may have left anything in what this worker reads.

        It is so before the first operation ends without its result, and until a wait for the device has shown
        that all results are there.
        """
        return self.silent and self._aborted and self.unawaited

    def renew(self) -> None:
        """There are other connections, which no abort has ended."""
        with self._lock:
            self._aborted = self.silent = self._futures = False
            self.limit_s = None

    def begun(self) -> None:
        """An operation begins, or the script waits for one on its device."""
        self.unawaited = True

    def given_as_future(self) -> None:
        """The script has the future of an operation on its device. Nobody sees when it waits for that.

        It may be much later, in C++, and by another future that comes of this one. So from now on, all is
        unawaited after each wait, too.
        """
        self.unawaited = self._futures = True

    def awaited(self) -> None:
        """The host has waited for its device."""
        self.unawaited = self._futures

    def raise_if_aborted(self) -> None:
        """After an operation has ended.

        Raises:
            RuntimeError: an abort may have ended it.
        """
        if self.silent and self._aborted:
            raise RuntimeError(ABORTED)

    def wait_or_abort(self, works: Sequence[dist.Work]) -> None:
        """Wait for operations.

        Raises:
            RuntimeError: as they do, or because they were aborted and do not end, or will be.
        """
        if works or self._is_cancelled():
            try:
                with recorder.while_waiting():
                    self.call_or_abort(
                        functools.partial(wait_for_works, works), is_cancelled=self._is_cancelled
                    )
            except RuntimeError as error:
                step_failures.note(error, is_over=self.over)
                raise

    def call_or_abort(
        self,
        function: Callable[[], object],
        timeout_s: float | None = None,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        """Call a function that blocks in torch's communication.

        Args:
            function: called in another thread, which is abandoned if the call does not end.
            timeout_s: how long it may take; None for :attr:`limit_s`.
            is_cancelled: whether the abort that would end this call has already happened.

        Raises:
            RuntimeError: as the function does, or because it was aborted or took too long, and did not end.
        """
        call = _Call(function)
        del function
        with self._lock:
            self._current = call
        if is_cancelled():  # after ``_current`` is set, so that a later abort ends the call
            raise RuntimeError("cancelled before it began")
        with self._lock:
            if self._requests is None:
                self._requests = SimpleQueue()
                threading.Thread(
                    target=_serve, args=(self._requests,), name="swift-gloo-waits", daemon=True
                ).start()
            self._requests.put(call)
            aborted = self._aborted
        if aborted:  # after the operation began, and before its wait
            self._give_up_later(call)
        try:
            self._ended_or_lost(call, self.limit_s if timeout_s is None else timeout_s)
        finally:
            if call.lost:
                with self._lock:
                    self._requests = None  # its thread is lost, together with the group
        call.finish()
        self.raise_if_aborted()

    def completed_or_abort(self, future: torch.futures.Future[Any]) -> None:
        """Wait until an operation has completed its future, well or not, which it does by itself.

        A wait for the operation returns, or raises, at once then.

        Raises:
            RuntimeError: it was aborted or took too long, and did not end.
        """
        ending = _Ending()
        with self._lock:
            self._current = ending
            aborted = self._aborted
        future.add_done_callback(ending.end)
        if aborted:  # after the operation began, and before its wait
            self._give_up_later(ending)
        self._ended_or_lost(ending, self.limit_s)

    def _ended_or_lost(self, ending: _Ending, timeout_s: float | None) -> None:
        """Wait for the current one. `comm_errors` recognizes what it raises by this function's name."""
        in_time = ending.wait(timeout_s)
        with self._lock:
            self._current = None
            ending.lose()
        if ending.lost and in_time:
            raise RuntimeError("a wait did not end when its connections were aborted")
        if ending.lost:
            raise RuntimeError(f"no answer within {timeout_s:g} s")

    def abort(self) -> None:
        """End the current wait, and later ones until :meth:`renew`: the connections were aborted.

        May be called from any thread.
        """
        with self._lock:
            if self.silent and not self._aborted:
                self.before_abort()
            current, self._aborted = self._current, True
        if current is not None:
            self._give_up_later(current)

    def _give_up_later(self, ending: _Ending) -> None:
        alarms.after(_GRACE_S, functools.partial(self._give_up, ending))

    def _give_up(self, ending: _Ending) -> None:
        with self._lock:
            ending.lose()


def wait_for_works(works: Sequence[dist.Work]) -> None:
    """Wait for operations. `comm_errors` recognizes communication by this function's name."""
    for work in works:
        work.wait()


def _serve(requests: SimpleQueue[_Call]) -> None:
    while requests.get().run():
        pass
