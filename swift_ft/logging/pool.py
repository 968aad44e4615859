"""Page-locked host memory that is used again and again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

__all__ = ["Buffer", "BufferPool"]


@dataclass(frozen=True, slots=True)
class Buffer:
    """A piece of the pool.

    Attributes:
        memory: uint8, as many as were asked for.
        give_back: to be called once, from any thread, when it is not needed any more.
    """

    memory: torch.Tensor
    give_back: Callable[[], None]


class BufferPool:
    """Buffers of at most ``budget_bytes`` together. Messages have few sizes, so each size has its own shelf.

    ``take`` is for one thread, buffers come back from any.

    Args:
        budget_bytes: a larger buffer is admitted alone.
        make: page-locked memory of so many bytes.
    """

    def __init__(self, budget_bytes: int, make: Callable[[int], torch.Tensor]) -> None:
        self._budget_bytes = budget_bytes
        self._make = make
        self._returned = threading.Condition()
        self._shelves: dict[int, list[torch.Tensor]] = {}
        self._resting_bytes = 0  # on the shelves
        self.used_bytes = 0  # in somebody's hands; used + resting <= budget, but for one that is too large

    def take(self, size: int) -> Buffer | None:
        """A buffer, or None where there is no room for one now."""
        with self._returned:
            if not self._has_room(size):
                return None
            shelf = self._shelves.get(size)
            if shelf:
                memory = shelf.pop()
                self._resting_bytes -= size
            else:
                self._clear_for(size)
                memory = self._make(size)
            self.used_bytes += size
        return Buffer(memory, lambda: self._give_back(memory, size))

    def wait_for_room(self, size: int, timeout_s: float) -> bool:
        """Waits until such a buffer could be taken; False when the deadline passed first."""
        with self._returned:
            return self._returned.wait_for(lambda: self._has_room(size), max(0.0, timeout_s))

    def _has_room(self, size: int) -> bool:
        return not self.used_bytes or self.used_bytes + size <= self._budget_bytes

    def _give_back(self, memory: torch.Tensor, size: int) -> None:
        with self._returned:
            self.used_bytes -= size
            self._shelves.setdefault(size, []).append(memory)
            self._resting_bytes += size
            self._returned.notify_all()

    def _clear_for(self, size: int) -> None:
        """Let go of resting buffers of other sizes where there would be too much otherwise."""
        for shelf in self._shelves.values():
            while shelf and self.used_bytes + self._resting_bytes + size > self._budget_bytes:
                self._resting_bytes -= shelf.pop().nbytes
