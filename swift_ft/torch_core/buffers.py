"""Copies of modules' buffers, and how they are put back.

Version counters cannot tell whether a buffer changed: the kernel of batch normalisation writes running
statistics without counting, and so does DDP's broadcast. So buffers are copied, and only content is compared.

Private parts used (tested on torch 2.11 to 2.14):

- ``Module._buffers``: a module may assign another tensor to a buffer, or register one in its forward pass.
- ``Module._non_persistent_buffers_set``: those that no ``state_dict()`` has.
- ``torch._foreach_copy_``: one kernel for many small tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from swift_ft.torch_core.shards import local
from swift_ft.torch_core.tensors import same_bits, write_back

_LARGE_BYTES = 2**20
"""Larger ones are masks and tables, as a rule: they are compared, and copied only when they have changed."""


class BufferCopies:
    """The buffers of some modules at one moment.

    Args:
        modules: each of them, and none that is only inside of one.
        before: an earlier copy of the same modules; shares the copies of large buffers that are unchanged.
    """

    def __init__(self, modules: Iterable[nn.Module], before: BufferCopies | None = None) -> None:
        self._places: list[tuple[Any, dict[str, torch.Tensor | None]]] = [
            (module, module._buffers.copy()) for module in modules
        ]
        self._copies: dict[torch.Tensor, torch.Tensor] = {}
        small: list[torch.Tensor] = []
        for buffer in self._distinct():
            earlier = before._copies.get(buffer) if before is not None else None
            if buffer.nbytes <= _LARGE_BYTES:
                small.append(buffer)
            elif earlier is not None and same_bits(local(earlier), local(buffer)):
                self._copies[buffer] = earlier
            else:
                self._copies[buffer] = buffer.detach().clone()
        copies = [torch.empty_like(buffer) for buffer in small]
        copy_all(copies, small)
        self._copies.update(zip(small, copies, strict=True))

    def restore(self, within: nn.Module | None = None) -> None:
        """Give every module the buffers that it had, with the values that they had.

        Args:
            within: only this module, and all inside of it.
        """
        for module, buffers in self._places_in(within):
            if {k: id(b) for k, b in module._buffers.items()} != {k: id(b) for k, b in buffers.items()}:
                module._buffers.clear()
                module._buffers.update(buffers)
        for buffer in self._distinct(within):
            here, values = local(buffer), local(self._copies[buffer])
            if here.shape != values.shape:  # a step gave it another size in place, as observers do
                with torch.no_grad():
                    here.resize_(values.shape)
            write_back(here, values)

    def differs_from(self, other: BufferCopies, within: nn.Module | None = None) -> bool:
        """Whether any buffer had other values at the other moment, or is another tensor.

        Args:
            other: of the same modules.
            within: only the buffers of this module.
        """
        ours, theirs = self._distinct(within), other._distinct(within)
        return {*ours} != {*theirs} or not all(
            same_bits(local(self._copies[buffer]), local(other._copies[buffer])) for buffer in ours
        )

    def _places_in(self, within: nn.Module | None) -> list[tuple[Any, dict[str, torch.Tensor | None]]]:
        if within is None:
            return self._places
        inside = {id(module) for module in within.modules()}
        return [place for place in self._places if id(place[0]) in inside]

    def _distinct(self, within: nn.Module | None = None) -> list[torch.Tensor]:
        """Each buffer once, however many modules share it."""
        found = (b for _, buffers in self._places_in(within) for b in buffers.values() if b is not None)
        return list(dict.fromkeys(found))


def with_unsaved(module: nn.Module) -> tuple[dict[str, torch.Tensor | None], frozenset[str]]:
    """The buffers of a module itself, and the names of those that its ``state_dict()`` has."""
    return module._buffers, frozenset({*module._buffers.keys()} - module._non_persistent_buffers_set)


@torch.no_grad()
def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy values from each source to the target at the same place: one kernel per device and dtype."""
    alike: dict[tuple[torch.device, torch.dtype], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        into, of = alike.setdefault((source.device, source.dtype), ([], []))
        # Without asking what a copy means for a DTensor, which a buffer of a split model is.
        into.append(local(target))
        of.append(local(source))
    for into, of in alike.values():
        torch._foreach_copy_(into, of)
