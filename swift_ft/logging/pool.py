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
    """Buffers of at most ``budget_bytes`` together, of sizes that are powers of two.

    That is what torch makes of page-locked memory anyway, and what is counted here. ``take`` is for one
    thread, buffers come back from any.

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
        block = _rounded(size)
        with self._returned:
            if not self._has_room(block):
                return None
            shelf = self._shelves.get(block)
            if shelf:
                memory = shelf.pop()
                self._resting_bytes -= block
            else:
                self._clear_for(block)
                memory = self._make(block)
            self.used_bytes += block
        return Buffer(memory[:size], lambda: self._give_back(memory))

    def wait_for_room(self, size: int, timeout_s: float) -> bool:
        """Waits until such a buffer could be taken; False when the deadline passed first."""
        with self._returned:
            return self._returned.wait_for(lambda: self._has_room(_rounded(size)), max(0.0, timeout_s))

    def _has_room(self, block: int) -> bool:
        return not self.used_bytes or self.used_bytes + block <= self._budget_bytes

    def _give_back(self, memory: torch.Tensor) -> None:
        block = memory.nbytes
        with self._returned:
            self.used_bytes -= block
            self._shelves.setdefault(block, []).append(memory)
            self._resting_bytes += block
            self._returned.notify_all()

    def _clear_for(self, block: int) -> None:
        """Let go of resting buffers of other sizes where there would be too much otherwise."""
        for shelf in self._shelves.values():
            while shelf and self.used_bytes + self._resting_bytes + block > self._budget_bytes:
                self._resting_bytes -= shelf.pop().nbytes


def _rounded(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()
