"""Tells what a session protects from all else that a script holds.

Parameters, their gradients and what optimizers keep are put back and travel in other ways than the script's
variables do. A tensor belongs to them if it is in the memory of one of them, whoever holds it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.torch_core.shards import local
from swift_ft.torch_core.tensors import memory_of, storage_id, storage_names, tensors_in


class ProtectedValues:
    """The values of a session's state, as of the last look.

    Args:
        state: what the session protects.

    Attributes:
        in_no_module: parameters that optimizers have and modules have not, as of the last look.
    """

    def __init__(self, state: TrainingState) -> None:
        self._state = state
        self.in_no_module: list[torch.Tensor] = []
        # Storages of large state, which is put back in other ways, as of the last look: without gradients.
        self._storages: dict[int, object] = {}
        self._partly: set[int] = set()  # those of them that small parts save a part of alone
        # Addresses, as of the first need since the last look or note.
        self._gradients: list[int] | None = None
        self._of_optimizers: set[int] = set()  # containers, by id(), as of the last look
        self._parameters: set[int] = set()  # those of the state, by id(), as of the last look or note

    def look(self, unsaved: Iterable[Any]) -> None:
        """See what there is now.

        Args:
            unsaved: buffers of modules that no ``state_dict()`` has: they are put back as variables are.
        """
        in_modules = {*map(id, self._state.named_parameters().values())}
        self.in_no_module = [one for _, one in self._state.parameters if id(one) not in in_modules]
        self._parameters = {*in_modules, *map(id, self.in_no_module)}
        self._gradients = None
        large, small = [*map(local, self._large())], [*map(local, self._of_parts())]
        self._storages = storage_names([*large, *small])
        self._partly = _covered_in_part(small) - {*map(storage_id, large)}
        for one in unsaved:
            if isinstance(one, torch.Tensor):
                self._storages.pop(storage_id(local(one)), None)
        self._of_optimizers = {*map(id, self._containers_of_optimizers())}

    def note(self, parameters: Collection[nn.Parameter]) -> None:
        """A note begins: others may be gradients now, and parameters too, unless none are given."""
        if parameters:
            self._parameters = {*map(id, parameters), *map(id, self.in_no_module)}
        self._gradients = None

    def has(self, value: Any) -> bool:
        """Whether a value belongs to the large state, which is put back and travels in other ways.

        Tensors do, and what optimizers keep their groups and their state in.
        """
        if not isinstance(value, torch.Tensor):
            return id(value) in self._of_optimizers
        # A parameter's memory may be another one since the last look.
        return id(value) in self._parameters or value.is_meta or is_lazy(value) or self.has_memory_of(value)

    def has_memory_of(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is in the memory of one of the state, or of a gradient."""
        here = local(tensor)
        return storage_id(here) in self._storages or self._has_gradient(*memory_of(here))

    def has_copy_of(self, value: Any) -> bool:
        """Whether a value is protected, and no more is in its memory than the state saves."""
        if not self.has(value):
            return False
        if not self._partly or not isinstance(value, torch.Tensor) or is_lazy(value):
            return True
        return storage_id(local(value)) not in self._partly

    def _has_gradient(self, address: int, count: int) -> bool:
        """Whether a parameter has one in these bytes now: what a script keeps may be one no more."""
        if self._gradients is None:
            found = map(local, self._gradients_now())
            self._gradients = sorted(one.data_ptr() for one in found if one.layout == torch.strided)
        place = bisect_left(self._gradients, address)
        return place < len(self._gradients) and self._gradients[place] < address + count

    def _gradients_now(self) -> Iterator[torch.Tensor]:
        for parameter in (*self._state.named_parameters().values(), *self.in_no_module):
            if parameter.grad is not None:
                yield parameter.grad

    def _containers_of_optimizers(self) -> Iterator[Any]:
        for optimizer in self._state.optimizers.values():
            yield from (optimizer.param_groups, *optimizer.param_groups, optimizer.state)
            yield from (group["params"] for group in optimizer.param_groups)
            yield from optimizer.state.values()

    def _large(self) -> Iterator[torch.Tensor]:
        gradients = {*map(id, self._gradients_now())}
        yield from (tensor for tensor in self._state.tensors() if id(tensor) not in gradients)
        yield from (*self._state.named_parameters().values(), *self.in_no_module)

    def _of_parts(self) -> Iterator[torch.Tensor]:
        for part in self._state.small.values():
            yield from tensors_in(part.state_dict())


def _covered_in_part(tensors: Iterable[torch.Tensor]) -> set[int]:
    """The storages in which there is more than these dense tensors view, by :func:`storage_id`."""
    views: dict[int, set[tuple[int, int]]] = {}
    bytes_of: dict[int, int] = {}
    for tensor in tensors:
        if tensor.layout == torch.strided and not tensor.is_meta and not is_lazy(tensor):
            number = storage_id(tensor)
            views.setdefault(number, set()).add((tensor.data_ptr(), tensor.nbytes))
            bytes_of[number] = memory_of(tensor)[1]
    return {number for number, held in views.items() if sum(size for _, size in held) < bytes_of[number]}
