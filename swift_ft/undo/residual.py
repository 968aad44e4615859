"""What floating point loses in an inverse, stored so that the undo is bit-exact.

The inverse is off by a few units in the last place. Read as integers, the bits of the value before the step
minus those of the inverted value are a small number, often 0. One byte holds it; the few that do not fit go
into a list. Adding the integers restores every bit, also those of NaN, infinities and -0.0.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from swift_ft.undo.snapshot import size_bytes

__all__ = ["Residual"]

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(slots=True)
class Residual:
    """The residual of one tensor, slice by slice.

    Attributes:
        dense: int8, one entry per element, by the offset of the slice; none where the inverse is exact.
        listed: per slice: its offset, places relative to it, and the differences there. Either what one
            byte cannot hold, or all differences of a slice that has few.
        spare: memory of the last step's dense slices; allocating fresh memory costs more than writing to it.
    """

    dense: dict[int, Tensor] = field(default_factory=dict)
    listed: list[tuple[int, Tensor, Tensor]] = field(default_factory=list)
    spare: dict[int, Tensor] = field(default_factory=dict)

    def clear(self) -> None:
        """Drops the values and keeps the memory for the next step."""
        self.spare, self.dense = self.dense, {}
        self.listed.clear()

    def store(self, offset: int, before: Tensor, inverted: Tensor, mostly_zero: bool) -> None:
        """Stores the difference between two slices; overwrites ``inverted``.

        Args:
            offset: where the slice begins.
            before: values before the step, flat, contiguous.
            inverted: what the rule computed, same shape and dtype.
            mostly_zero: try whether a list is shorter than a byte per element.
        """
        difference = bits(inverted)
        torch.sub(bits(before), difference, out=difference)
        spare = self.spare.pop(offset, None)
        if not difference.numel():
            return
        low, high = difference.aminmax()
        if low == 0 and high == 0:
            return
        if mostly_zero and self._list(offset, difference, 1 / 16):
            return
        fits = spare is not None and spare.shape == difference.shape and spare.device == difference.device
        small = spare if spare is not None and fits else torch.empty_like(difference, dtype=torch.int8)
        small.copy_(difference)  # wraps around where it does not fit
        self.dense[offset] = small
        if low < -128 or high > 127:
            difference.sub_(small)
            self._list(offset, difference, 1.0)

    def _list(self, offset: int, difference: Tensor, most: float) -> bool:
        """Lists the nonzero differences, if their share is at most ``most``."""
        at = difference.nonzero().squeeze(1)
        if at.numel() > most * difference.numel():
            return False
        self.listed.append((offset, at.to(torch.int32), difference[at]))
        return True

    def apply(self, inverted: Tensor) -> None:
        """Turns what the rule computed into the value before the step, in place.

        Args:
            inverted: flat and contiguous, the whole tensor.
        """
        values = bits(inverted)
        for offset, small in self.dense.items():
            values[offset : offset + small.numel()].add_(small)
        for offset, at, missing in self.listed:
            values[offset:].index_add_(0, at.long(), missing)

    @property
    def size_bytes(self) -> int:
        """Bytes held."""
        listed = [tensor for _, at, missing in self.listed for tensor in (at, missing)]
        return sum(map(size_bytes, [*self.dense.values(), *self.spare.values(), *listed]))


def bits(tensor: Tensor) -> Tensor:
    """The same memory, read as integers."""
    return tensor.view(_INTEGERS[tensor.element_size()])
