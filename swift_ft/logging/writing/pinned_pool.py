"""A pool of page-locked host memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch


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
