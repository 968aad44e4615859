"""Copies messages from a device to the host while the pipeline waits anyway (§5.1 of the paper).

    keep ──▶ pending ──a bubble begins──▶ copying, on a side stream ──copied──▶ delivered, device released

A kept tensor must not change before it is copied; a change is an error. All methods are for the training
thread. :class:`Device` hides the accelerator, so all of this runs without one.

An abort of NCCL lets the device go on, with anything in the memory that was to be received. So a message of
the running iteration is delivered only if its copy was seen to be over before there was an abort. Once the
iteration is complete, all of its messages are known to be right.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from swift_ft.logging.format.record import MessageKey, RecordKind, changed_in_place_error
from swift_ft.logging.stats import IterationStats, LogStats
from swift_ft.logging.writing.uploader import LogTimeoutError
from swift_ft.observe.waits import waiting
from swift_ft.torch_core.tensors import version_of

_PAUSE_S = 0.0002  # between two polls of a copy: events have no wait with a deadline


class Mark(Protocol):
    """A point in a stream of the device's work."""

    def reached(self) -> bool:
        """Whether all work before it is done."""

    def seconds_since(self, earlier: Mark) -> float:
        """Seconds of device time between two points that were reached; negative if this one came first."""


class Device(Protocol):
    """The operations of an accelerator that the copier needs."""

    def mark(self) -> Mark:
        """The end of all work that the compute stream has received so far."""

    def copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], after: Mark) -> tuple[Mark, Mark]:
        """Copy pairs (device, host) on the side stream after a point; returns begin and end of the copies."""

    def compute_waits_for(self, mark: Mark) -> None:
        """Later work of the compute stream waits for a point of the side stream."""

    def buffer(self, size: int) -> torch.Tensor:
        """Page-locked memory of ``size`` bytes, uint8."""


@dataclass(slots=True)
class _DeviceMessage:
    """A message, and where its bytes are."""

    kind: RecordKind
    key: MessageKey
    tensor: torch.Tensor
    version: int | None  # None: it may change now, since the device copies it first
    on_written: Callable[[], None] | None = None
    host: torch.Tensor | None = None
    dropped: bool = False  # nobody wants it any more
    settled: bool = False  # its iteration is complete, so no abort has changed it

    def check_unchanged(self) -> None:
        if self.version is not None and version_of(self.tensor) != self.version:
            raise changed_in_place_error(self.key)


@dataclass(frozen=True, slots=True)
class _Copies:
    """Messages that are copied together, up to a point of the side stream."""

    messages: list[_DeviceMessage]
    end: Mark


@dataclass(slots=True)
class _Bubble:
    """The time from the end of the computation before a wait to the arrival of the message.

    ``copies``: begin and end of those that were begun in it. It holds no tensors: these are released earlier.
    """

    begin: Mark
    end: Mark | None = None
    copies: list[tuple[Mark, Mark]] = field(default_factory=list)

    def known(self) -> bool:
        return self.end is not None and self.end.reached() and all(end.reached() for _, end in self.copies)

    def stats(self) -> IterationStats:
        assert self.end is not None
        inside = outside = 0.0
        for begin, end in self.copies:
            whole = end.seconds_since(begin)
            within = min(whole, max(0.0, self.end.seconds_since(begin)))
            inside, outside = inside + within, outside + whole - within
        return IterationStats(
            bubble_s=self.end.seconds_since(self.begin),
            copied_in_bubbles_s=inside,
            copied_outside_s=outside,
        )


class Copier:
    """Copies messages in bubbles, into a bounded pool of page-locked buffers.

    Args:
        device: where messages are.
        pool_bytes: how much page-locked memory there may be. A larger message is admitted alone.
        deliver: receives a copied message: its kind, key, the host's copy, and a callback for when it is
            written.
        stats: receives the times of copies and bubbles.
        on_full: called before the copier waits for room in the pool, so that delivered messages are written
            now.
        timeout_s: longest wait for a copy, or for room in the pool.
        clock: seconds, monotonic.
        in_doubt: whether an abort may have changed what the running iteration has received.
    """

    def __init__(
        self,
        device: Device,
        pool_bytes: int,
        deliver: Callable[[RecordKind, MessageKey, torch.Tensor, Callable[[], None]], None],
        stats: LogStats,
        *,
        on_full: Callable[[], None] = lambda: None,
        timeout_s: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
        in_doubt: Callable[[], bool] = lambda: False,
    ) -> None:
        self._device = device
        self._pool = BufferPool(pool_bytes, device.buffer)
        self._deliver = deliver
        self._stats = stats
        self._on_full = on_full
        self._timeout_s = timeout_s
        self._clock = clock
        self._in_doubt = in_doubt
        self._pending: deque[_DeviceMessage] = deque()
        self._copying: deque[_Copies] = deque()
        self._bubble: _Bubble | None = None
        self._ended: deque[_Bubble] = deque()  # bubbles whose device times are not known yet

    def keep(self, kind: RecordKind, key: MessageKey, tensor: torch.Tensor) -> None:
        """A message was sent or has arrived; the copier holds a reference until it is copied."""
        tensor = tensor.detach()
        self._pending.append(_DeviceMessage(kind, key, tensor, version_of(tensor)))

    def bubble_begins(self) -> None:
        """The training thread is about to wait for a message: copy what is pending, if there is room."""
        self.collect()
        if self._bubble is None:
            self._bubble = _Bubble(self._device.mark())
        self._start(self._bubble)

    def bubble_ends(self) -> None:
        """The message has arrived, and computation continues."""
        if self._bubble is not None:
            self._bubble.end = self._device.mark()
            self._ended.append(self._bubble)
            self._bubble = None
        self.collect()

    def interrupted(self) -> None:
        """The message never arrived: this was not a bubble. What is in doubt is not delivered."""
        self._bubble = None
        if self._in_doubt():
            self._pending = deque(message for message in self._pending if message.settled)
            for message in self._copied():
                message.dropped = message.dropped or not message.settled

    def before_overwriting(self, tensor: torch.Tensor) -> None:
        """A receive buffer is about to be reused: the device waits for copies of its old content."""
        pointer = tensor.data_ptr()
        if any(message.tensor.data_ptr() == pointer for message in self._pending):
            self._start_all()
        for copies in self._copying:
            overwritten = [message for message in copies.messages if message.tensor.data_ptr() == pointer]
            for message in overwritten:
                message.check_unchanged()
                message.version = None
            if overwritten:
                self._device.compute_waits_for(copies.end)

    def end_iteration(self) -> None:
        """Starts copies of all pending messages, so that none stays longer than an iteration. Waits for room.

        The iteration is complete: its messages are delivered, whatever becomes of the next one.

        Raises:
            LogTimeoutError: there was no room in time.
        """
        for message in (*self._pending, *self._copied()):
            message.settled = True
        self._start_all()

    def _start_all(self) -> None:
        self._start(None)
        if self._pending:
            started = self._clock()
            deadline = started + self._timeout_s
            try:
                while self._pending:
                    self._make_room(deadline)
                    self._start(None)
            finally:
                self._stats.add(IterationStats(held_back_s=self._clock() - started))
        self.collect()

    def drop(self) -> int:
        """Deliver nothing of what was kept so far. Returns the newest iteration of it, or -1."""
        copied = self._copied()
        for message in copied:  # the device still writes into their buffers
            message.dropped = True
        iterations = [message.key.iteration for message in (*self._pending, *copied)]
        self._pending.clear()
        return max(iterations, default=-1)

    def _copied(self) -> list[_DeviceMessage]:
        """Those whose copies have begun."""
        return [message for copies in self._copying for message in copies.messages]

    def drain(self, timeout_s: float) -> None:
        """Waits until all kept messages are copied and delivered.

        Raises:
            LogTimeoutError: that took longer than ``timeout_s``.
        """
        deadline = self._clock() + timeout_s
        while self._pending or self._copying:
            self._start(None)
            if self._copying:
                self._wait_for(self._copying[0].end, deadline)
                self.collect()
            else:
                self._make_room(deadline)

    def collect(self) -> None:
        """Delivers copied messages and releases the device's tensors."""
        while self._copying and self._copying[0].end.reached():
            in_doubt = self._in_doubt()  # not before: what was copied by now was there before a later abort
            for message in self._copying.popleft().messages:
                assert message.host is not None
                assert message.on_written is not None
                if message.dropped or (in_doubt and not message.settled):
                    message.on_written()
                    continue
                message.check_unchanged()
                self._deliver(message.kind, message.key, message.host, message.on_written)
        while self._ended and self._ended[0].known():
            self._stats.add(self._ended.popleft().stats())

    def _start(self, bubble: _Bubble | None) -> None:
        """Begins copies of pending messages, in order, as far as there is room."""
        ready: list[_DeviceMessage] = []
        while self._pending:
            message = self._pending[0]
            message.check_unchanged()
            buffer = self._pool.take(message.tensor.nbytes)
            if buffer is None:
                break
            message.host = buffer.memory.view(message.tensor.dtype).view(message.tensor.shape)
            message.on_written = buffer.release
            ready.append(self._pending.popleft())
        if not ready:
            return
        pairs = [(message.tensor, message.host) for message in ready if message.host is not None]
        begin, end = self._device.copy(pairs, self._device.mark())
        self._copying.append(_Copies(ready, end))
        if bubble is None:  # all of it ran in parallel with computation
            self._ended.append(_Bubble(begin, begin, [(begin, end)]))
        else:
            bubble.copies.append((begin, end))
        self._stats.add(IterationStats(pool_high_water_bytes=self._pool.used_bytes))

    def _make_room(self, deadline: float) -> None:
        """Waits for a free buffer: from a copy that is not delivered yet, or from the writer."""
        if self._copying:
            self._wait_for(self._copying[0].end, deadline)
            self.collect()
            return
        self._on_full()
        with waiting("page-locked memory, which the log's writer returns", self._timeout_s):
            has_room = self._pool.wait_for_room(self._pending[0].tensor.nbytes, deadline - self._clock())
        if not has_room:
            raise LogTimeoutError(
                f"{self._pool.used_bytes} bytes of page-locked memory wait to be written, and none was "
                f"written in {self._timeout_s:g} s: the store is slower than the training, or hangs",
                path=None,
            )

    def _wait_for(self, mark: Mark, deadline: float) -> None:
        pause = threading.Event()
        with waiting("a copy from the device to the host", self._timeout_s):
            while not mark.reached():
                if self._clock() > deadline:
                    raise LogTimeoutError("a copy from the device to the host did not end in time", path=None)
                pause.wait(_PAUSE_S)


@dataclass(frozen=True, slots=True)
class Buffer:
    """A piece of the pool.

    Attributes:
        memory: uint8, of the requested size.
        release: returns the memory to the pool. Call it once, from any thread.
    """

    memory: torch.Tensor
    release: Callable[[], None]


class BufferPool:
    """Buffers of at most ``budget_bytes`` together, of sizes that are powers of two.

    torch rounds page-locked memory up in the same way. ``take`` is for one thread; any thread may release.

    Args:
        budget_bytes: a larger buffer is admitted alone.
        make: allocates page-locked memory, given its size in bytes.
    """

    def __init__(self, budget_bytes: int, make: Callable[[int], torch.Tensor]) -> None:
        self._budget_bytes = budget_bytes
        self._make = make
        self._returned = threading.Condition()
        self._free: dict[int, list[torch.Tensor]] = {}
        self._free_bytes = 0  # of _free
        self.used_bytes = 0  # taken; used + free <= budget, except for one buffer that is too large

    def take(self, size: int) -> Buffer | None:
        """A buffer, or None if there is no room for it now."""
        block = _rounded(size)
        with self._returned:
            if not self._has_room(block):
                return None
            shelf = self._free.get(block)
            if shelf:
                memory = shelf.pop()
                self._free_bytes -= block
            else:
                self._clear_for(block)
                memory = self._make(block)
            self.used_bytes += block
        return Buffer(memory[:size], lambda: self._release(memory))

    def wait_for_room(self, size: int, timeout_s: float) -> bool:
        """Waits until such a buffer could be taken; False when the deadline passed first."""
        with self._returned:
            return self._returned.wait_for(lambda: self._has_room(_rounded(size)), max(0.0, timeout_s))

    def _has_room(self, block: int) -> bool:
        return not self.used_bytes or self.used_bytes + block <= self._budget_bytes

    def _release(self, memory: torch.Tensor) -> None:
        block = memory.nbytes
        with self._returned:
            self.used_bytes -= block
            self._free.setdefault(block, []).append(memory)
            self._free_bytes += block
            self._returned.notify_all()

    def _clear_for(self, block: int) -> None:
        """Frees unused buffers of other sizes where the budget would be exceeded otherwise."""
        for shelf in self._free.values():
            while shelf and self.used_bytes + self._free_bytes + block > self._budget_bytes:
                self._free_bytes -= shelf.pop().nbytes


def _rounded(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()
