"""Residuals: what floating point loses in an inverse, stored so that the undo is bit-exact.

The inverse is off by a few units in the last place. Read as integers, the bits of the value before the step
minus those of the inverted value are a small number, often 0. One byte holds it; where none does, the value
itself goes into a list. So the undo restores every bit, also those of NaN, infinities and -0.0.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from swift_ft.undo.snapshot import size_bytes

NOT_A_BYTE = -128
"""In place of a difference that one byte cannot hold."""

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(slots=True)
class Residual:
    """The residual of one tensor, slice by slice.

    Attributes:
        dense: int8, one difference per element, by the offset of the slice; none where the inverse is exact.
        listed: per slice: its offset, places relative to it, and the bits before the step there. Either where
            a byte cannot hold the difference, or all that differ in a slice that has few.
        spare: memory of the last step's dense slices; allocating fresh memory costs more than writing to it.
    """

    dense: dict[int, Tensor] = field(default_factory=dict)
    listed: list[tuple[int, Tensor, Tensor]] = field(default_factory=list)
    spare: dict[int, Tensor] = field(default_factory=dict)

    def clear(self) -> None:
        """Drops the values and keeps the memory for the next step."""
        self.spare, self.dense = self.dense, {}
        self.listed.clear()

    def store(self, offset: int, before: Tensor, inverted: Tensor, most: float) -> None:
        """Stores the difference between two slices; overwrites ``inverted``.

        Args:
            offset: where the slice begins.
            before: values before the step, flat, contiguous.
            inverted: what the rule computed, same shape and dtype.
            most: the share of nonzero differences up to which they are listed, instead of a byte per element.
        """
        difference = bits(inverted)
        torch.sub(bits(before), difference, out=difference)
        if not difference.numel():
            return
        low, high = difference.aminmax()
        if (low == 0 and high == 0) or (most and self._list(offset, difference, before, most)):
            self.spare.pop(offset, None)
            return
        small = self.room(offset, difference)
        small.copy_(difference)  # wraps around where it does not fit
        self.dense[offset] = small
        if low < -128 or high > 127:
            difference.sub_(small)
            self._list(offset, difference, before, 1.0)

    def keep(self, offset: int, small: Tensor, before: Tensor) -> None:
        """Keeps differences that were computed as bytes.

        Args:
            offset: where the slice begins.
            small: int8, kept as it is: memory from :meth:`room`. ``NOT_A_BYTE`` where the difference is none.
            before: values before the step, flat, contiguous.
        """
        any_, marks = _not_bytes(small)
        if any_:
            self.dense[offset] = small
        if marks is not None:
            self._list(offset, marks, before, 1.0)

    def keep_if_few(self, offset: int, small: Tensor, before: Tensor, most: float) -> bool:
        """Lists all places with a difference, or does nothing if their share is above ``most``.

        Args:
            offset: where the slice begins.
            small: int8: the differences, ``NOT_A_BYTE`` where one is not a byte.
            before: values before the step, flat, contiguous.
            most: the largest share.

        Returns:
            Whether they were listed.
        """
        listed = self._list(offset, small, before, most)
        if listed:
            self.spare.pop(offset, None)
        return listed

    def room(self, offset: int, like: Tensor) -> Tensor:
        """Memory for a slice's bytes: the last step's, if that fits."""
        spare = self.spare.pop(offset, None)
        if spare is None or spare.shape != like.shape or spare.device != like.device:
            spare = torch.empty_like(like, dtype=torch.int8)
        return spare

    def _list(self, offset: int, marks: Tensor, before: Tensor, most: float) -> bool:
        """Lists the values before the step where ``marks`` is not 0, if their share is at most ``most``."""
        at = _nonzero(marks)
        if at.numel() > most * marks.numel():
            return False
        if at.numel():
            self.listed.append((offset, at.to(torch.int32), bits(before)[at]))
        return True

    def apply(self, inverted: Tensor) -> None:
        """Turns what the rule computed into the value before the step, in place.

        Args:
            inverted: flat and contiguous, the whole tensor.
        """
        values = bits(inverted)
        for offset, small in self.dense.items():
            values[offset : offset + small.numel()].add_(small)
        for offset, at, before in self.listed:
            values[offset:].index_copy_(0, at.long(), before)

    @property
    def size_bytes(self) -> int:
        """Bytes held."""
        listed = [tensor for _, at, before in self.listed for tensor in (at, before)]
        return sum(map(size_bytes, [*self.dense.values(), *self.spare.values(), *listed]))


def bits(tensor: Tensor) -> Tensor:
    """The same memory, read as integers."""
    return tensor.view(_INTEGERS[tensor.element_size()])


def _not_bytes(small: Tensor) -> tuple[bool, Tensor | None]:
    """Whether a difference is not 0, and where it is not a byte; None if nowhere.

    On a CPU numpy does this 20 times as fast as torch.
    """
    if small.device.type != "cpu":
        return bool(small.any()), small == NOT_A_BYTE
    values = small.numpy()
    if values.size and values.min() == NOT_A_BYTE:
        return True, torch.from_numpy(values == NOT_A_BYTE)
    return bool(values.any()), None


def _nonzero(values: Tensor) -> Tensor:
    """The places of those that are not 0, int64. On a CPU, numpy finds a few 5 times as fast as torch."""
    if values.device.type == "cpu":
        marks = values.numpy()
        return torch.from_numpy(np.flatnonzero(marks if marks.dtype == bool else marks != 0))
    return values.nonzero().squeeze(1)
