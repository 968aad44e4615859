"""Copies of small parameters and their state, in memory that is kept from step to step.

To invert an update and store what the inverse has lost takes a dozen operations per tensor, however small it
is; a copy is one of many in one call. So an exact step copies what is small: of AdamW 12 bytes per element,
in place of 3.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from swift_ft.torch_core.tensors import PLAIN, parts_of
from swift_ft.undo.snapshot import size_bytes

COPIED_BYTES = 64 * 2**20
"""The most that all optimizers of a process copy together. What is above it is inverted."""

_KIND = attrgetter("__class__", "shape", "dtype", "device", "layout")


class _Batch:
    """Memory for the copies of one call.

    Args:
        parts: plain tensors, such as will be copied.
        kinds: of each part, as ``_KIND`` gives them.
    """

    def __init__(self, parts: Sequence[Tensor], kinds: list[Any]) -> None:
        self.kinds = kinds
        self.copies = [torch.empty_like(part, requires_grad=False) for part in parts]
        self.size_bytes = sum(map(size_bytes, parts))
        places: dict[Any, list[int]] = {}
        for place, part in enumerate(parts):
            places.setdefault((part.dtype, part.device), []).append(place)
        self._places = list(places.values())

    def fill(self, parts: Sequence[Tensor]) -> None:
        """Copy tensors of the same kinds: in one call those of a device and dtype."""
        for places in self._places:
            torch._foreach_copy_([self.copies[at] for at in places], [parts[at] for at in places])


class Copies:
    """The copies of one optimizer's parameters and state before its last step."""

    def __init__(self) -> None:
        self._batches: list[_Batch] = []  # in the order of the calls since the window has opened
        self._taken = 0  # of these; the others are memory of earlier windows
        _ALL.add(self)

    def begin(self) -> None:
        """A window opens: copies of the one before may be overwritten."""
        del self._batches[self._taken :]
        self._taken = 0

    def clear(self) -> None:
        """Release the memory."""
        self._batches.clear()
        self._taken = 0

    def take(self, tensors: Sequence[Tensor]) -> list[Tensor] | None:
        """Copy the parts of some tensors that this worker has, bit for bit.

        Args:
            tensors: one at least.

        Returns:
            The copies, which stay until the next window opens; None if they would be too large in all, or
            some are others than plain dense tensors: then nothing was copied.
        """
        parts = parts_of(tensors)
        kinds = [*map(_KIND, parts)]
        earlier = self._batches[self._taken] if self._taken < len(self._batches) else None
        if earlier is None or earlier.kinds != kinds:
            if any(kind not in PLAIN or layout is not torch.strided for kind, *_, layout in kinds):
                return None
            freed = earlier.size_bytes if earlier is not None else 0
            if sum(map(size_bytes, parts)) > room_bytes() + freed:
                return None
            self._batches[self._taken : self._taken + 1] = [_Batch(parts, kinds)]
        batch = self._batches[self._taken]
        self._taken += 1
        batch.fill(parts)
        return batch.copies

    @property
    def size_bytes(self) -> int:
        """Bytes of memory that is held, by an open window or for the next one."""
        return sum(batch.size_bytes for batch in self._batches)


_ALL: weakref.WeakSet[Copies] = weakref.WeakSet()
"""Those of this process, which share :data:`COPIED_BYTES`."""


def room_bytes(without: Copies | None = None) -> int:
    """Bytes that optimizers of this process may still copy.

    Args:
        without: what this one holds does not count.
    """
    return COPIED_BYTES - sum(copies.size_bytes for copies in _ALL if copies is not without)
