"""One communicator: its operations run one after the other, in a thread of their own, until an abort."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from swift_ft.host.under_way import UnderWay
from swift_ft.testing.nccl_like.collectives import fill_with_garbage
from swift_ft.testing.nccl_like.mesh import Aborted, Interrupt, Mesh

StreamOperation = Callable[[Mesh], None]
"""An operation that a communicator runs once those enqueued before it are done."""


class NcclLikeWork(dist.Work):
    """An operation that is enqueued.

    A wait is what a synchronisation with the device is for NCCL: an abort ends it *without an error*, and
    what is in the tensors then is undefined.

    Args:
        tensors: its result.
        filled: those that it writes into.
        rank: this member.

    Attributes:
        leaves_garbage: an abort fills them, with something else on each member.
    """

    leaves_garbage: ClassVar[bool] = False

    def __init__(self, tensors: Sequence[torch.Tensor], filled: Sequence[torch.Tensor], rank: int) -> None:
        super().__init__()
        self._tensors = list(tensors)
        self.filled = list(filled)
        self._rank = rank
        self._ended = threading.Event()
        self._future: torch.futures.Future[Any] = torch.futures.Future()
        self._error: Exception | None = None
        self.begun_at: float | None = None

    def begin(self) -> None:
        """Its turn has come."""
        self.begun_at = time.monotonic()

    def abort(self) -> None:
        """It ends, and nothing says that it was not done."""
        if NcclLikeWork.leaves_garbage:
            for tensor in self.filled:
                fill_with_garbage(tensor, self._rank)
        self.end()

    def end(self, error: Exception | None = None) -> None:
        """It is done; with an error if its arguments were wrong."""
        self.filled.clear()
        self._error = error
        self._ended.set()
        if error is None:
            self._future.set_result(self._tensors)
        else:
            self._future.set_exception(error)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until it is done or aborted.

        Raises:
            DistBackendError: not within a timeout, or its arguments were wrong.
        """
        if not self._ended.wait(timeout.total_seconds() or None):
            raise dist.DistBackendError("NCCL-like operation: no end in the time that the wait allows")
        if self._error is not None:
            raise dist.DistBackendError(f"NCCL-like operation: {self._error}") from self._error
        return True

    def synchronize(self) -> None:
        """As :meth:`wait`."""
        self.wait()

    def block_current_stream(self) -> None:
        """As :meth:`wait`: the host is the only stream."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it is done, or aborted."""
        return self._ended.is_set()

    def is_success(self) -> bool:
        """As :meth:`is_completed`, without an error."""
        return self._ended.is_set() and self._error is None

    def exception(self) -> Exception | None:
        """The error in the operation's arguments; None if there is none."""
        return self._error

    def result(self) -> list[torch.Tensor]:
        """The tensors."""
        return self._tensors

    def get_future(self) -> torch.futures.Future[Any]:
        """Completed at its end."""
        return self._future


device = UnderWay()
"""The one device of this process, on which the operations of all communicators run."""


class Communicator:
    """Formed by all of its members together.

    Args:
        store: where they find each other; nothing else is in it.
        rank: this member's.
        size: number of members.
        name: for the thread.
        interrupt: ends everything after the forming.
        patience_s: the longest time that the forming may take.

    Raises:
        TimeoutError: a member did not come in time.
    """

    def __init__(
        self, store: dist.Store, rank: int, size: int, name: str, interrupt: Interrupt, patience_s: float
    ) -> None:
        self._mesh = Mesh(store, rank, size, interrupt, patience_s)
        self._lock = threading.Lock()
        self._ended = False
        self.running: NcclLikeWork | None = None
        self._stream: SimpleQueue[tuple[StreamOperation, NcclLikeWork] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=f"nccl-like {name}", daemon=True)
        self._thread.start()

    def enqueue(self, operation: StreamOperation, work: NcclLikeWork) -> None:
        """Run an operation when all before it are done."""
        with self._lock:
            if not self._ended:
                self._stream.put((operation, work))
                return
        work.abort()

    def join(self) -> None:
        """After an abort: wait until its thread and its connections are gone."""
        self._stream.put(None)
        if threading.current_thread() is not self._thread:  # a callback of an operation may abort
            self._thread.join()

    def _serve(self) -> None:
        aborted = False
        while (request := self._stream.get()) is not None:
            operation, work = request
            work.begin()
            self.running = work
            error: Exception | None = None
            try:
                if not aborted:
                    with device:
                        operation(self._mesh)
            except Aborted:
                aborted = True
            except Exception as wrong:  # its arguments: whoever waits raises it
                error = wrong
            self.running = None
            if aborted:
                work.abort()
            else:
                work.end(error)
            del operation, work, request
        self._end()

    def _end(self) -> None:
        with self._lock:
            self._ended = True
        while not self._stream.empty():
            if (left := self._stream.get()) is not None:
                left[1].abort()
        self._mesh.close()
