"""What floating point loses in an inverse, stored so that the undo is bit-exact.

The inverse is off by a few units in the last place. Read as integers, the bits of the value before the step
minus those of the inverted value are a small number: one byte holds it, and the few that one byte cannot hold
stand in a list. Adding integers brings every bit back, those of NaN, infinities and -0.0 too.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["Residual"]

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(slots=True)
class Residual:
    """The residual of one tensor.

    Attributes:
        small: int8, one entry per element.
        pieces: per piece of the tensor, its offset, the places that one byte cannot hold, relative to the
            offset, and what is missing there.
    """

    small: Tensor
    pieces: list[tuple[int, Tensor, Tensor]] = field(default_factory=list)

    @classmethod
    def like(cls, tensor: Tensor) -> Residual:
        """An empty one for a tensor of any shape; the bytes are not initialized."""
        return cls(torch.empty(tensor.numel(), dtype=torch.int8, device=tensor.device))

    def clear(self) -> None:
        """Forgets the values and keeps the memory for the next step."""
        self.pieces.clear()

    def store(self, offset: int, before: Tensor, inverted: Tensor) -> None:
        """Stores what turns one piece into another; ``inverted`` is used up.

        Args:
            offset: where the piece begins.
            before: values before the step, flat, contiguous.
            inverted: what the rule computed, same shape and dtype.
        """
        difference = bits(inverted)
        torch.sub(bits(before), difference, out=difference)
        small = self.small[offset : offset + difference.numel()]
        small.copy_(difference)  # wraps around where it does not fit
        if not difference.numel():
            return
        low, high = difference.aminmax()
        if low < -128 or high > 127:
            difference.sub_(small)
            at = difference.nonzero().squeeze(1)
            self.pieces.append((offset, at.to(torch.int32), difference[at]))

    def apply(self, inverted: Tensor) -> None:
        """Turns what the rule computed into the value before the step, in place.

        Args:
            inverted: flat and contiguous, the whole tensor.
        """
        values = bits(inverted)
        values.add_(self.small)
        for offset, at, missing in self.pieces:
            values[offset:].index_add_(0, at.long(), missing)

    @property
    def size_bytes(self) -> int:
        """Bytes held."""
        listed = sum(
            at.numel() * at.element_size() + m.numel() * m.element_size() for _, at, m in self.pieces
        )
        return self.small.numel() + listed


def bits(tensor: Tensor) -> Tensor:
    """The same memory, read as integers."""
    return tensor.view(_INTEGERS[tensor.element_size()])
