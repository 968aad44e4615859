"""A cheap fingerprint of tensors: where they are, how often they were written to, and a sample of elements.

``tensor.data = other`` and a write through ``tensor.data`` move no version counter. The first one moves the
address, and the second one moves elements.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from swift_ft.torch_core.shards import local
from swift_ft.torch_core.tensors import PLAIN, all_versions_of

_ELEMENTS = 16
"""Of each tensor, evenly spread. Each is a cache line to read."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Some tensors at one moment.

    Attributes:
        tensors: which ones.
        places: the address of each.
        versions: torch's count of changes in place of each.
        samples: for each kind of tensors (device and dtype), their elements in one tensor of shape
            (tensors of this kind, elements), and which tensors these are.
    """

    tensors: Sequence[torch.Tensor]
    places: Sequence[int]
    versions: Sequence[int]
    samples: Sequence[tuple[Sequence[int], torch.Tensor]]

    def moved(self, among: Sequence[int] | None = None) -> list[int]:
        """Positions of the tensors that are elsewhere now, or whose count of changes is another one.

        It reads no element, so it waits for no device.

        Args:
            among: positions of those to look at; all of them if None.
        """
        among = range(len(self.tensors)) if among is None else among
        tensors = [self.tensors[index] for index in among]
        now = zip(among, _places(tensors), all_versions_of(tensors), strict=True)
        return [
            index
            for index, place, version in now
            if place != self.places[index] or version != self.versions[index]
        ]

    def differing(self, other: Fingerprint) -> list[int]:
        """Positions of the tensors that were written to, or are elsewhere, at the other moment."""
        found = {
            index
            for index, tensor in enumerate(self.tensors)
            if other.tensors[index] is not tensor
            or other.places[index] != self.places[index]
            or other.versions[index] != self.versions[index]
        }
        return sorted(found | self.rewritten(other))

    def unlike(self, other: Fingerprint) -> set[torch.Tensor]:
        """As :meth:`differing`, of a moment at which other tensors were noted: those of both, in any order.

        A tensor that was not noted there differs. This is too slow for each step.
        """
        there = {id(tensor): index for index, tensor in enumerate(other.tensors)}
        ours, theirs = self._elements(), other._elements()
        found = set()
        for index, tensor in enumerate(self.tensors):
            at = there.get(id(tensor))
            if (
                at is None
                or (self.places[index], self.versions[index]) != (other.places[at], other.versions[at])
                or ours.get(index) != theirs.get(at)
            ):
                found.add(tensor)
        return found

    def _elements(self) -> Mapping[int, list[int]]:
        """By position, the bytes of a tensor's sample."""
        return {
            index: row
            for which, sample in self.samples
            for index, row in zip(which, _bits(sample).tolist(), strict=True)
        }

    def rewritten(self, other: Fingerprint) -> set[int]:
        """Positions of the tensors whose elements were others at the other moment, wherever they were."""
        found: set[int] = set()
        theirs = {tuple(which): sample for which, sample in other.samples}
        for which, sample in self.samples:
            known = theirs.get(tuple(which))
            if known is None or known.shape != sample.shape:
                found.update(which)
            elif bool((unlike := _bits(sample) != _bits(known)).any()):
                found.update(which[row] for row in unlike.any(dim=1).nonzero().flatten().tolist())
        return found


class Sampler:
    """Takes fingerprints of the same tensors again and again: it remembers where to look."""

    def __init__(self) -> None:
        self._places: list[int] = []
        self._kinds: list[tuple[tuple[int, ...], list[torch.Tensor]]] = []

    @torch.no_grad()
    def take(self, tensors: Sequence[torch.Tensor]) -> Fingerprint:
        """The fingerprint of some tensors now. Waits for no device."""
        places = _places(tensors)
        if places != self._places:
            self._look_at([local(tensor) for tensor in tensors])
            self._places = places
        samples = []
        for which, views in self._kinds:
            samples.append((which, torch.cat(views).view(len(which), -1)))
        return Fingerprint(tensors, places, all_versions_of(tensors), samples)

    def _look_at(self, tensors: Sequence[torch.Tensor]) -> None:
        kinds: dict[tuple[torch.device, torch.dtype, int], list[int]] = {}
        for index, tensor in enumerate(tensors):
            if tensor.layout == torch.strided and tensor.numel():
                elements = min(_ELEMENTS, tensor.numel(), _span_of(tensor))  # few places if it is expanded
                kinds.setdefault((tensor.device, tensor.dtype, elements), []).append(index)
        self._kinds = [
            (tuple(which), [_sampled(tensors[index], elements) for index in which])
            for (*_, elements), which in kinds.items()
        ]


def _places(tensors: Sequence[torch.Tensor]) -> list[int]:
    if PLAIN.issuperset(map(type, tensors)):
        with contextlib.suppress(RuntimeError):  # one is sparse, and has no address
            return [*map(torch.Tensor.data_ptr, tensors)]
    here = (local(tensor) for tensor in tensors)
    return [tensor.data_ptr() if tensor.layout == torch.strided else 0 for tensor in here]


def _span_of(tensor: torch.Tensor) -> int:
    """From a dense tensor's first place in the memory to its last: one of an expanded tensor has few."""
    if tensor.is_contiguous():
        return tensor.numel()
    return 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def _sampled(tensor: torch.Tensor, elements: int) -> torch.Tensor:
    """A view of evenly spread elements, as they lie in memory."""
    flat = tensor.detach()
    stride = max(1, (flat.numel() - 1) // max(1, elements - 1))
    if flat.is_contiguous():
        return flat.view(-1)[: (elements - 1) * stride + 1 : stride]
    span = _span_of(flat)
    stride = max(1, (span - 1) // max(1, elements - 1))
    return flat.as_strided((elements,), (stride if span > 1 else 0,))


def _bits(sample: torch.Tensor) -> torch.Tensor:
    return sample.contiguous().view(torch.uint8)
