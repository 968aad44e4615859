"""Parameters cut into slices that fit a cache, in lists that are worth a kernel launch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

CPU_ELEMENTS = 2**18
"""Elements of all parameters in one list on a CPU: with state and temporaries about the size of its cache."""

DEVICE_ELEMENTS = 2**22
"""The same on accelerators, where launching kernels is what costs; a temporary stays below 25 MB."""


@dataclass(slots=True)
class ParamTensors:
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

    def whole(self) -> ParamSlice:
        """All of it as one slice."""
        return ParamSlice(self.index, self.param, self.grad, self.state)

    def within(self, range_: slice) -> ParamSlice:
        """Flat views of a range; all tensors are contiguous."""
        state = {key: value.view(-1)[range_] for key, value in self.state.items()}
        param, grad = self.param.view(-1)[range_], self.grad.view(-1)[range_]
        return ParamSlice(self.index, param, grad, state, range_.start)


@dataclass(slots=True)
class ParamSlice(ParamTensors):
    """Flat views of a range of one parameter, or all of it.

    Attributes:
        offset: where the range begins.
    """

    offset: int = 0


def local(tensor: Tensor) -> Tensor:
    """The plain real tensor behind a parameter: this worker's shard, complex numbers as pairs."""
    tensor = getattr(tensor, "_local_tensor", tensor).detach()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def sliced(parts: Sequence[ParamTensors], elementwise: bool) -> Iterator[list[ParamSlice]]:
    """Cuts parameters into slices, and yields lists of slices of about one cache's size.

    The cuts depend on the parameter alone. So an inverse computed right after the step and one computed at
    the undo run the same kernels on the same slices.

    Args:
        parts: parameters of one device and dtype.
        elementwise: whether they may be cut.
    """
    batch: list[ParamSlice] = []
    total = 0
    for part in parts:
        limit = slice_elements(part.param.device)
        for slice_ in _cut(part, limit) if elementwise else [part.whole()]:
            if batch and total + slice_.param.numel() > limit:
                yield batch
                batch, total = [], 0
            batch.append(slice_)
            total += slice_.param.numel()
    if batch:
        yield batch


def packed(parts: Sequence[ParamTensors]) -> Iterator[list[ParamSlice]]:
    """Cuts parameters into flat slices, and yields each full one alone and shorter ones together.

    Args:
        parts: contiguous parameters of one device.
    """
    batch: list[ParamSlice] = []
    total = 0
    for part in parts:
        limit = slice_elements(part.param.device)
        for slice_ in _ranges(part, limit):
            size = slice_.param.numel()
            if size == limit:
                yield [slice_]
                continue
            if total + size > limit:
                yield batch
                batch, total = [], 0
            batch.append(slice_)
            total += size
    if batch:
        yield batch


def slice_elements(device: torch.device) -> int:
    """The most elements of a slice on a device."""
    return CPU_ELEMENTS if device.type == "cpu" else DEVICE_ELEMENTS


def _cut(part: ParamTensors, limit: int) -> list[ParamSlice]:
    tensors = [part.param, part.grad, *part.state.values()]
    size = part.param.numel()
    if size <= limit or not all(t.is_contiguous() and t.numel() == size for t in tensors):
        return [part.whole()]
    return _ranges(part, limit)


def _ranges(part: ParamTensors, limit: int) -> list[ParamSlice]:
    return [part.within(slice(at, at + limit)) for at in range(0, part.param.numel(), limit)]
