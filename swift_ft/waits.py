"""Waiting so that an abort ends it, even where gloo forgets to, or cannot.

gloo (torch 2.13) loses a send whose peer dies right after it has said that it is ready to receive: whoever
waits for that send waits for ever, and nothing can wake the thread. Nor can anything wake one that waits for
a peer to connect. So another thread waits in the training thread's place, and the training thread waits for
whichever comes first, the end of that or an abort.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import torch.distributed as dist
from torch.distributed.pipelining import schedules

__all__ = ["Waits"]

_GRACE_S = 0.5
"""After an abort, for the wait to end by itself, with the transport's own words: it takes milliseconds."""


class _Call:
    """One call that was handed over."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._function: Callable[[], object] | None = function
        self._error: BaseException | None = None
        self.over = threading.Event()
        self.lost = False

    def run(self) -> bool:
        """Returns whether somebody still waits for it."""
        assert self._function is not None
        try:
            self._function()
        except BaseException as error:  # carried over to who waits, whatever it is
            self._error = error
        self.over.set()
        return not self.lost

    def lose(self) -> None:
        """Wait no longer, unless it is over."""
        if not self.over.is_set():
            self.lost = True
            self.over.set()

    def finish(self) -> None:
        """Raise what it raised. It forgets that, and the function: who holds them holds the group."""
        error = self._error
        self._function = self._error = None
        if error is not None:
            raise error


class Waits:
    """Waits that can be aborted, for one training thread.

    :meth:`install` puts it in the place of the function with which torch's schedules wait.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._current: _Call | None = None
        self._requests: SimpleQueue[_Call] | None = None

    def install(self) -> None:
        """From now on all schedules of this process wait here."""
        seam: Any = schedules
        seam._wait_batch_p2p = self.wait_or_abort

    def wait_or_abort(self, works: Sequence[dist.Work]) -> None:
        """Wait for operations.

        Raises:
            RuntimeError: as they do, or because they were aborted and do not end.
        """
        if works:
            self.call_or_abort(functools.partial(wait_for_works, works))

    def call_or_abort(
        self,
        function: Callable[[], object],
        timeout_s: float | None = None,
        called_off: Callable[[], bool] = lambda: False,
    ) -> None:
        """Call a function that blocks in torch's communication.

        Args:
            function: called in another thread, which is left to itself if it does not end.
            timeout_s: how long it may take, if its own deadlines are no good.
            called_off: whether the abort that would end this has come already.

        Raises:
            RuntimeError: as the function does, or because it was aborted, or took too long, and does not end.
        """
        call = _Call(function)
        del function
        with self._lock:
            self._current = call
        if called_off():  # asked now: from here on an abort ends the call
            raise RuntimeError("it was called off before it began")
        with self._lock:
            if self._requests is None:
                self._requests = SimpleQueue()
                threading.Thread(
                    target=_serve, args=(self._requests,), name="swift_ft waits", daemon=True
                ).start()
            self._requests.put(call)
        in_time = call.over.wait(timeout_s)
        with self._lock:
            self._current = None
            call.lose()
            if call.lost:
                self._requests = None  # its thread is lost, with the group that it waits in
        if call.lost and in_time:
            raise RuntimeError("gloo did not end a wait whose connections were aborted")
        if call.lost:
            raise RuntimeError(f"no answer within {timeout_s:g} s")
        call.finish()

    def abort(self) -> None:
        """The connections were aborted. May be called from any thread."""
        with self._lock:
            call = self._current
        if call is not None:
            timer = threading.Timer(_GRACE_S, self._give_up, (call,))
            timer.daemon = True
            timer.start()

    def _give_up(self, call: _Call) -> None:
        with self._lock:
            call.lose()


def wait_for_works(works: Sequence[dist.Work]) -> None:
    """Wait for operations, under a name by which it is known that this communicates."""
    for work in works:
        work.wait()


def _serve(requests: SimpleQueue[_Call]) -> None:
    while requests.get().run():
        pass
