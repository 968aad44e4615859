"""State as named tensors, and slices of them as ranges per dimension (Tenplex §4.1). Pure.

Names are paths with dots, so that all tensors form a tree: ``layers.3.mlp.weight``. What an optimizer keeps
for a parameter stands below it: ``layers.3.mlp.weight:exp_avg``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from swift_ft.errors import UsageError

Ranges = tuple[tuple[int, int], ...]
"""One half-open range per dimension. A scalar has none."""

AXES = ("dp", "ep", "sp", "tp")
"""Axes of a layout that can split a tensor. Pipelines split the list of layers instead."""


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor of a model's state, and how a layout divides it.

    Attributes:
        name: of the tensor; unique.
        shape: of the whole tensor, in elements. A padded vocabulary is counted without its padding.
        itemsize: bytes per element.
        layers: the layers that use it. A stage with one of them holds it. A tied tensor has several.
        split: pairs of an axis and the dimension that it cuts. Where two axes cut one dimension, the first
            one cuts the whole, the next one the slice. Workers along all other axes hold replicas.
        expert: the number of its expert, and how many there are. Each group of an expert-parallel layout
            holds some of them. None for a tensor of no expert, or of all of them stacked (split it by "ep").
        pad_to: pads every slice to the same length, a multiple of this. 0 pads nothing.
    """

    name: str
    shape: tuple[int, ...]
    itemsize: int
    layers: tuple[int, ...]
    split: tuple[tuple[str, int], ...] = ()
    expert: tuple[int, int] | None = None
    pad_to: int = 0

    def __post_init__(self) -> None:
        if min((self.itemsize, *self.shape, 1)) < 1:
            raise UsageError(
                f"{self.name}: the shape {self.shape} and {self.itemsize} bytes must be positive"
            )
        if not self.layers:
            raise UsageError(f"{self.name}: no layer uses it: name at least one")
        for axis, dimension in self.split:
            if axis not in AXES:
                raise UsageError(f"{self.name}: no axis {axis!r} can split it: use one of {', '.join(AXES)}")
            if not 0 <= dimension < len(self.shape):
                raise UsageError(f"{self.name}: has no dimension {dimension}, its shape is {self.shape}")
        if self.expert is not None and "ep" in dict(self.split):
            raise UsageError(
                f"{self.name}: is of one expert, and split by 'ep' as one of all experts: choose one"
            )
        if self.expert is not None and not 0 <= self.expert[0] < self.expert[1]:
            raise UsageError(f"{self.name}: expert {self.expert[0]} of {self.expert[1]}: count from 0")

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.itemsize


def kept_for(parameter: StateTensor, key: str, shape: Sequence[int], itemsize: int) -> StateTensor:
    """The tensor that an optimizer keeps for a parameter, divided like the parameter itself.

    The shape says how: a dimension as long as the parameter's is cut with it (``exp_avg``); one of length 1
    is whole (Adafactor's ``row_var`` and ``col_var``); a single number is a replica everywhere (``step``).
    This covers every optimizer of torch but LBFGS.

    Args:
        parameter: the parameter.
        key: the optimizer's name for the state.
        shape: of the state, for the whole parameter.
        itemsize: bytes per element.

    Raises:
        UsageError: if the state has another shape, as LBFGS's vectors over all parameters.
    """
    same_rank = len(shape) == len(parameter.shape)
    fits = same_rank and all(n in (1, whole) for n, whole in zip(shape, parameter.shape, strict=True))
    if not fits and math.prod(shape) != 1:
        raise UsageError(
            f"{parameter.name}: {key!r} of shape {tuple(shape)} cannot be divided with a parameter of shape "
            f"{parameter.shape}: use an optimizer that keeps its state per parameter, or keep the layout"
        )
    split = tuple((a, d) for a, d in parameter.split if fits and shape[d] == parameter.shape[d])
    return StateTensor(
        name=f"{parameter.name}:{key}",
        shape=tuple(shape),
        itemsize=itemsize,
        layers=parameter.layers,
        split=split,
        expert=parameter.expert,
        pad_to=parameter.pad_to,
    )


def count(ranges: Ranges) -> int:
    """Elements in a slice; 0 if one of its ranges is empty."""
    return math.prod(max(0, end - start) for start, end in ranges)


def overlap(one: Ranges, other: Ranges) -> Ranges:
    """The slice that two slices share; empty ranges where they share none."""
    return tuple((max(a, c), max(a, c, min(b, d))) for (a, b), (c, d) in zip(one, other, strict=True))


def clipped(ranges: Ranges, shape: Sequence[int]) -> Ranges:
    """A slice without the padding beyond the end of its tensor."""
    return tuple((min(start, size), min(end, size)) for (start, end), size in zip(ranges, shape, strict=True))


def relative(ranges: Ranges, base: Ranges) -> tuple[slice, ...]:
    """The index of a slice within an array that holds ``base``."""
    return tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(ranges, base, strict=True))
