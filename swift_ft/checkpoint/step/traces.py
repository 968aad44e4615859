"""Traces of values that cannot be copied: by these one sees that a value has changed."""

from __future__ import annotations

import marshal
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import xxhash
from torch import nn
from torch.optim import Optimizer

from swift_ft.checkpoint.plain_classes import attributes
from swift_ft.checkpoint.step.containers import content_in
from swift_ft.checkpoint.step.frozen import is_plain
from swift_ft.checkpoint.step.kinds import (
    CONTAINERS,
    GENERATORS,
    MOST_ELEMENTS,
    OF_BYTES,
    is_fixed,
    is_object,
    read_state,
)
from swift_ft.checkpoint.step.namespaces import is_mixed
from swift_ft.torch_core.fingerprints import Sampler
from swift_ft.torch_core.shards import local
from swift_ft.torch_core.tensors import bits_of, version_of
from swift_ft.units import format_bytes

_MOST_READ = 2**16
"""Plain elements of a container that are all read; of a longer one, a sample."""
_SAMPLE = 2**12
"""Elements of an array or of a long container of plain values, evenly spread."""
_FEW = 2**10
"""Elements of a container of anything else."""
_SMALL_BYTES = 2**16
"""Of a tensor in the host's memory that is read as a whole."""
_DEEPEST = 3
"""Containers in containers."""


@dataclass(frozen=True)
class Trace:
    """A value at one moment. Equal traces of this process mean that nothing has changed, as far as one sees.

    Attributes:
        digest: of its length and a sample. Of an object of a library, only its type.
        words: as a user would call it; empty where it is of no kind that would travel if it were smaller.
    """

    digest: int
    words: str = field(compare=False)


def trace_of(value: Any, is_protected: Callable[[Any], bool]) -> Trace:
    """The trace of a value now.

    Args:
        value: a large one, or one that holds something that cannot be copied.
        is_protected: tells tensors and containers whose content travels in another way.
    """
    tracer = _Tracer(is_protected)
    digest = tracer.digest(value)
    return Trace(digest, "" if tracer.is_seen_elsewhere() else _in_words(value))


def is_looked_into(container: Any) -> bool:
    """Whether changes of a container's elements are seen in themselves, or cannot be."""
    if len(container) <= MOST_ELEMENTS or isinstance(container, OF_BYTES):
        return True
    parts = (container, content_in(container)) if isinstance(container, dict) else (content_in(container),)
    return all(map(is_plain, parts))


def _in_words(value: Any) -> str:
    if isinstance(value, torch.Tensor) and value.layout != torch.strided:
        return "a sparse tensor"
    if isinstance(value, torch.Tensor | np.ndarray):
        kind = "a tensor" if isinstance(value, torch.Tensor) else "an array"
        return f"{kind} of {format_bytes(value.nbytes)}"
    if isinstance(value, (tuple, *CONTAINERS)):
        return f"a {type(value).__name__} of {len(value):,} elements"
    if isinstance(value, weakref.ref):
        return "a weak reference"
    # One that never changes in itself, of a class whose objects are not read back.
    return f"of {type(value).__module__}.{type(value).__qualname__}" if is_fixed(value) else ""


class _Tracer:
    """Reads one value."""

    def __init__(self, is_protected: Callable[[Any], bool]) -> None:
        self._is_protected = is_protected
        self._tensors: list[torch.Tensor] = []
        self._of_a_graph = self._of_the_state = self._mixed = False

    def is_seen_elsewhere(self) -> bool:
        """Whether it has entries of its own, a graph's tensors, or only such as the state has: gradients."""
        return self._mixed or self._of_a_graph or (self._of_the_state and not self._tensors)

    def digest(self, value: Any) -> int:
        """Of what is in it."""
        found = xxhash.xxh3_64()
        for part in self._parts(value, 0):
            found.update(part)
            found.update(b"\n")
        for sample in samples_of_tensors(self._tensors):
            found.update(sample)
        return found.intdigest()

    def _parts(self, value: Any, depth: int) -> Iterator[bytes]:
        yield type(value).__name__.encode()
        if is_mixed(value):
            self._mixed |= depth == 0
            return  # each of its entries is a variable
        if self._is_protected(value):
            self._of_the_state = True
        elif isinstance(value, torch.Tensor):
            yield self._of_tensor(value)
        elif isinstance(value, np.ndarray):
            yield f"{value.shape} {value.dtype}".encode()
            if not isinstance(value, np.memmap):
                yield sample_of_array(value, _SAMPLE)
        elif isinstance(value, (tuple, *CONTAINERS)):
            yield str(len(value)).encode()
            if depth < _DEEPEST:
                yield from self._of_container(value, depth)
        elif isinstance(value, GENERATORS):
            yield from self._parts(read_state(value), depth)
        elif isinstance(value, weakref.ref):
            yield str(id(value())).encode()
        elif is_fixed(value):
            yield repr(value).encode(errors="replace")

    def _of_tensor(self, tensor: torch.Tensor) -> bytes:
        if tensor.grad_fn is not None:
            self._of_a_graph = True
            return b""
        kind = f"{tuple(tensor.shape)} {tensor.dtype} ".encode()
        if can_be_sampled(tensor):
            self._tensors.append(tensor)
            if tensor.device.type == "cpu" and tensor.nbytes <= _SMALL_BYTES:
                return kind + bits_of(local(tensor)).numpy().tobytes()
        return kind + str(version_of(tensor)).encode()

    def _of_container(self, value: Any, depth: int) -> Iterator[bytes]:
        if isinstance(value, OF_BYTES):
            yield bytes(value)
        elif isinstance(value, set):
            if len(value) <= _MOST_READ:
                yield str(hash(frozenset(value))).encode()
        elif isinstance(value, dict):
            yield from self._of_elements(value, depth)
            yield from self._of_elements(content_in(value), depth)
        else:
            yield from self._of_elements(value if isinstance(value, tuple) else content_in(value), depth)

    def _of_elements(self, value: Iterable[Any], depth: int) -> Iterator[bytes]:
        elements: Sequence[Any] = value if isinstance(value, list | tuple) else [*value]
        into_objects = len(elements) > MOST_ELEMENTS  # of smaller containers, they are found by themselves
        if len(elements) > _MOST_READ:
            elements = _spread(elements, _SAMPLE)
        if is_plain(elements):
            yield marshal.dumps([*elements], 2)
            return
        for element in _spread(elements, _FEW):
            yield from self._parts(element, depth + 1)
            if into_objects and is_object(element) and not isinstance(element, nn.Module | Optimizer):
                yield from self._of_elements(attributes(element).values(), depth + 1)


def _spread(elements: Sequence[Any], count: int) -> Sequence[Any]:
    """Some of them, evenly spread, the last one among them."""
    step = -(-len(elements) // count) or 1
    return elements[::-step]


def can_be_sampled(tensor: torch.Tensor) -> bool:
    """Whether a tensor has elements in a memory that can be read."""
    return tensor.layout == torch.strided and not tensor.is_meta and bool(local(tensor).numel())


def samples_of_tensors(tensors: Sequence[torch.Tensor]) -> list[bytes]:
    """The bytes of some elements of each."""
    found = [b""] * len(tensors)
    for which, sample in Sampler().take(tensors).samples:
        rows = sample.contiguous().view(torch.uint8).cpu().numpy()
        for index, row in zip(which, rows, strict=True):
            found[index] = row.tobytes()
    return found


def sample_of_array(array: np.ndarray[Any, Any], count: int = 16) -> bytes:
    """The bytes of at least so many elements, evenly spread; nothing of an array of objects."""
    return b"" if array.dtype.hasobject else array.flat[:: max(1, array.size // count)].tobytes()
