"""Messages on their way from a device to the host, while the pipeline waits anyway (§5.1 of the paper).

    keep ──▶ pending ──a bubble begins──▶ copying, on a side stream ──copied──▶ handed on, device released

A tensor that was kept must not change before it is copied; one that does is an error. All methods are for
the training thread. What an accelerator can do is behind :class:`Device`, so that all of this runs without
one.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from swift_ft.logging.ledger import Account, Ledger
from swift_ft.logging.pool import BufferPool
from swift_ft.logging.record import Kind, MessageKey, changed_in_place, version_of
from swift_ft.logging.shipping import LogTimeoutError

__all__ = ["Copier", "Device", "Mark"]

_PAUSE_S = 0.0002  # between two looks at a copy that is waited for: events have no wait with a deadline


class Mark(Protocol):
    """A point in a stream of the device's work."""

    def reached(self) -> bool:
        """Whether all work before it is done."""

    def seconds_since(self, earlier: Mark) -> float:
        """Of the device's time, between two points that were reached; negative if this one came first."""


class Device(Protocol):
    """What an accelerator does for the copier."""

    def mark(self) -> Mark:
        """The end of what was given to the compute stream so far."""

    def copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], after: Mark) -> tuple[Mark, Mark]:
        """Copy (from the device, to the host) on the side stream after a point: its begin and its end."""

    def hold(self, mark: Mark) -> None:
        """What is given to the compute stream from now on waits for a point of the side stream."""

    def buffer(self, size: int) -> torch.Tensor:
        """Page-locked memory of ``size`` bytes, uint8."""


@dataclass(slots=True)
class _Kept:
    """A message, and where its bytes are."""

    kind: Kind
    key: MessageKey
    tensor: torch.Tensor
    version: int | None  # None: it may change now, since the device copies it first
    on_written: Callable[[], None] | None = None
    host: torch.Tensor | None = None

    def check_unchanged(self) -> None:
        if self.version is not None and version_of(self.tensor) != self.version:
            raise changed_in_place(self.key)


@dataclass(frozen=True, slots=True)
class _Copies:
    """What is copied in one go, up to a point of the side stream."""

    kept: list[_Kept]
    end: Mark


@dataclass(slots=True)
class _Bubble:
    """From the end of the computation before a wait to the arrival of what was waited for.

    ``copies``: begin and end of those that were begun in it. No tensor: these are released earlier.
    """

    begin: Mark
    end: Mark | None = None
    copies: list[tuple[Mark, Mark]] = field(default_factory=list)

    def known(self) -> bool:
        return self.end is not None and self.end.reached() and all(end.reached() for _, end in self.copies)

    def account(self) -> Account:
        assert self.end is not None
        inside = outside = 0.0
        for begin, end in self.copies:
            whole = end.seconds_since(begin)
            within = min(whole, max(0.0, self.end.seconds_since(begin)))
            inside, outside = inside + within, outside + whole - within
        return Account(
            bubble_s=self.end.seconds_since(self.begin),
            copied_in_bubbles_s=inside,
            copied_outside_s=outside,
        )


class Copier:
    """Copies messages in bubbles, into a bounded pool of page-locked buffers.

    Args:
        device: where messages are.
        pool_bytes: how much page-locked memory there may be. A larger message is admitted alone.
        hand_on: takes a copied message: its kind, key, the host's copy, and what to call when it is written.
        ledger: where copies and bubbles are accounted for.
        on_full: called before room in the pool is waited for: what was handed on must be written now.
        timeout_s: how long a copy, or room in the pool, is waited for.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        device: Device,
        pool_bytes: int,
        hand_on: Callable[[Kind, MessageKey, torch.Tensor, Callable[[], None]], None],
        ledger: Ledger,
        *,
        on_full: Callable[[], None] = lambda: None,
        timeout_s: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._device = device
        self._pool = BufferPool(pool_bytes, device.buffer)
        self._hand_on = hand_on
        self._ledger = ledger
        self._on_full = on_full
        self._timeout_s = timeout_s
        self._clock = clock
        self._pending: deque[_Kept] = deque()
        self._copying: deque[_Copies] = deque()
        self._bubble: _Bubble | None = None
        self._ended: deque[_Bubble] = deque()  # of which the device's times are not known yet

    def keep(self, kind: Kind, key: MessageKey, tensor: torch.Tensor) -> None:
        """A message was sent or has arrived; a reference is held until it is copied."""
        tensor = tensor.detach()
        self._pending.append(_Kept(kind, key, tensor, version_of(tensor)))

    def bubble_begins(self) -> None:
        """The training thread is about to wait for a message: copy what is pending, if there is room."""
        self.collect()
        if self._bubble is None:
            self._bubble = _Bubble(self._device.mark())
        self._start(self._bubble)

    def bubble_ends(self) -> None:
        """What was waited for is there, and computation goes on."""
        if self._bubble is not None:
            self._bubble.end = self._device.mark()
            self._ended.append(self._bubble)
            self._bubble = None
        self.collect()

    def interrupted(self) -> None:
        """What was waited for never came: that was no bubble."""
        self._bubble = None

    def before_overwriting(self, tensor: torch.Tensor) -> None:
        """A buffer is about to be received into again: the device waits for copies of what was in it."""
        pointer = tensor.data_ptr()
        if any(kept.tensor.data_ptr() == pointer for kept in self._pending):
            self.end_iteration()
        for copies in self._copying:
            overwritten = [kept for kept in copies.kept if kept.tensor.data_ptr() == pointer]
            for kept in overwritten:
                kept.check_unchanged()
                kept.version = None
            if overwritten:
                self._device.hold(copies.end)

    def end_iteration(self) -> None:
        """Nothing stays pending for longer than an iteration: wait for room if there is none.

        Raises:
            LogTimeoutError: there was no room in time.
        """
        self._start(None)
        if self._pending:
            started = self._clock()
            deadline = started + self._timeout_s
            while self._pending:
                self._make_room(deadline)
                self._start(None)
            self._ledger.add(Account(held_back_s=self._clock() - started))
        self.collect()

    def drain(self, timeout_s: float) -> None:
        """Wait until everything that was kept is copied and handed on.

        Raises:
            LogTimeoutError: it was not in time.
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
        """Hand on what has been copied, and release the device's tensors."""
        while self._copying and self._copying[0].end.reached():
            for kept in self._copying.popleft().kept:
                kept.check_unchanged()
                assert kept.host is not None
                assert kept.on_written is not None
                self._hand_on(kept.kind, kept.key, kept.host, kept.on_written)
        while self._ended and self._ended[0].known():
            self._ledger.add(self._ended.popleft().account())

    def _start(self, bubble: _Bubble | None) -> None:
        """Begin copies of what is pending, in order, as far as there is room."""
        ready: list[_Kept] = []
        while self._pending:
            kept = self._pending[0]
            kept.check_unchanged()
            buffer = self._pool.take(kept.tensor.nbytes)
            if buffer is None:
                break
            kept.host = buffer.memory.view(kept.tensor.dtype).view(kept.tensor.shape)
            kept.on_written = buffer.give_back
            ready.append(self._pending.popleft())
        if not ready:
            return
        pairs = [(kept.tensor, kept.host) for kept in ready if kept.host is not None]
        begin, end = self._device.copy(pairs, self._device.mark())
        self._copying.append(_Copies(ready, end))
        if bubble is None:  # copied beside computation, all of it
            self._ended.append(_Bubble(begin, begin, [(begin, end)]))
        else:
            bubble.copies.append((begin, end))
        self._ledger.add(Account(pool_high_water_bytes=self._pool.used_bytes))

    def _make_room(self, deadline: float) -> None:
        """Wait for a buffer to come back: from a copy that is still to be handed on, or from the writer."""
        if self._copying:
            self._wait_for(self._copying[0].end, deadline)
            self.collect()
            return
        self._on_full()
        if not self._pool.wait_for_room(self._pending[0].tensor.nbytes, deadline - self._clock()):
            raise LogTimeoutError(
                f"{self._pool.used_bytes} bytes of page-locked memory wait to be written, and none was in "
                f"{self._timeout_s:g} s: the store is slower than the training, or hangs",
                path=None,
            )

    def _wait_for(self, mark: Mark, deadline: float) -> None:
        pause = threading.Event()
        while not mark.reached():
            if self._clock() > deadline:
                raise LogTimeoutError("a copy from the device to the host did not end in time", path=None)
            pause.wait(_PAUSE_S)
