"""Parameters cut into pieces that fit a cache, and gathered to lists that are worth a kernel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Parts", "Piece", "gathered", "local"]

CPU_ELEMENTS = 2**18
"""Elements of all parameters in one list on a CPU: with state and temporaries about the size of its cache."""

DEVICE_ELEMENTS = 2**22
"""The same on accelerators, where launching kernels is what costs; a temporary stays below 25 MB."""


@dataclass(slots=True)
class Parts:
    """One parameter with its gradient and the tensors of its state that a rule works on.

    Attributes:
        index: place in the list of all parameters.
        param: the parameter's values.
        grad: the gradient's values.
        state: the state's, by key.
    """

    index: int
    param: Tensor
    grad: Tensor
    state: dict[str, Tensor]


@dataclass(slots=True)
class Piece(Parts):
    """Flat views of a range of one parameter, or all of it.

    Attributes:
        offset: where the range begins.
    """

    offset: int = 0


def local(tensor: Tensor) -> Tensor:
    """The plain real tensor behind a parameter: this worker's shard, complex numbers as pairs."""
    tensor = getattr(tensor, "_local_tensor", tensor).detach()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def gathered(parts: Sequence[Parts], elementwise: bool) -> Iterator[list[Piece]]:
    """Cuts and gathers.

    The cuts depend on the parameter alone, so that an inverse computed when the step is done and one
    computed at the undo take the same way through the kernels.

    Args:
        parts: parameters of one device and dtype.
        elementwise: whether they may be cut.
    """
    gathering: list[Piece] = []
    total = 0
    for part in parts:
        limit = CPU_ELEMENTS if part.param.device.type == "cpu" else DEVICE_ELEMENTS
        for piece in _cut(part, limit) if elementwise else [_whole(part)]:
            if gathering and total + piece.param.numel() > limit:
                yield gathering
                gathering, total = [], 0
            gathering.append(piece)
            total += piece.param.numel()
    if gathering:
        yield gathering


def _whole(part: Parts) -> Piece:
    return Piece(part.index, part.param, part.grad, part.state)


def _cut(part: Parts, limit: int) -> list[Piece]:
    tensors = [part.param, part.grad, *part.state.values()]
    size = part.param.numel()
    if size <= limit or not all(t.is_contiguous() and t.numel() == size for t in tensors):
        return [_whole(part)]
    param, grad = part.param.view(-1), part.grad.view(-1)
    state = {key: value.view(-1) for key, value in part.state.items()}
    return [
        Piece(
            part.index,
            param[at : at + limit],
            grad[at : at + limit],
            {key: value[at : at + limit] for key, value in state.items()},
            at,
        )
        for at in range(0, size, limit)
    ]
