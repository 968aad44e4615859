"""Waiting for a pipeline's messages so that an abort ends it, even where gloo forgets to.

gloo (torch 2.13) loses a send whose peer dies right after it has said that it is ready to receive: whoever
waits for that send waits for ever, and nothing can wake the thread. So another thread waits in the training
thread's place, and the training thread waits for whichever comes first, the end of that or an abort.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

import torch.distributed as dist
from torch.distributed.pipelining import schedules

__all__ = ["Waits"]

_GRACE_S = 0.5
"""After an abort, for the wait to end by itself, with the transport's own words: it takes milliseconds."""


class _Wait:
    """One wait that was handed over."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        self.works = works
        self.over = threading.Event()
        self.error: BaseException | None = None

    def wait_for_works(self) -> None:  # a name by which it is known that this communicates
        try:
            for work in self.works:
                work.wait()
        except BaseException as error:  # carried over to who waits, whatever it is
            self.error = error
        self.over.set()


class Waits:
    """Waits that can be aborted, for one training thread.

    :meth:`install` puts it in the place of the function with which torch's schedules wait.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._current: _Wait | None = None
        self._requests: SimpleQueue[_Wait] | None = None

    def install(self) -> None:
        """From now on all schedules of this process wait here."""
        seam: Any = schedules
        seam._wait_batch_p2p = self.wait_or_abort

    def wait_or_abort(self, works: Sequence[dist.Work]) -> None:
        """Wait for operations.

        Raises:
            RuntimeError: as they do, or because they were aborted and do not end.
        """
        if not works:
            return
        wait = _Wait(works)
        with self._lock:
            self._current = wait
            if self._requests is None:
                self._requests = SimpleQueue()
                threading.Thread(
                    target=_serve, args=(self._requests,), name="swift_ft waits", daemon=True
                ).start()
            self._requests.put(wait)
        wait.over.wait()
        with self._lock:
            self._current = None
            error, wait.error, wait.works = wait.error, None, ()  # who holds on to them holds the group
            if error is _FORGOTTEN:
                self._requests = None  # its thread is lost, with the group that it waits in
        if error is _FORGOTTEN:
            raise RuntimeError("gloo did not end a wait whose connections were aborted")
        if error is not None:
            raise error

    def abort(self) -> None:
        """The connections were aborted. May be called from any thread."""
        with self._lock:
            wait = self._current
        if wait is not None:
            timer = threading.Timer(_GRACE_S, _give_up, (wait,))
            timer.daemon = True
            timer.start()


_FORGOTTEN = RuntimeError("forgotten")


def _give_up(wait: _Wait) -> None:
    if not wait.over.is_set():
        wait.error = _FORGOTTEN
        wait.over.set()


def _serve(requests: SimpleQueue[_Wait]) -> None:
    while True:
        requests.get().wait_for_works()
