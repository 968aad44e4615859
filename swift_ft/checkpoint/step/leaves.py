"""Values of a script that change in place, copied, and how they are put back into what the script holds."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any, Protocol

import numpy as np
import torch
import xxhash
from torch.nn.parameter import is_lazy

from swift_ft.checkpoint.state_digest import tensor_digests
from swift_ft.checkpoint.step.containers import content_in, fill, items_in, plain, put_at, remove_at
from swift_ft.checkpoint.step.kinds import (
    CONTAINERS,
    FIXED_EXACTLY,
    GENERATORS,
    MOST_ELEMENTS,
    OF_BYTES,
    is_understood,
    read_state,
    same_state,
    stays_where_it_is,
    write_state,
)
from swift_ft.torch_core.shards import local, note_changed
from swift_ft.torch_core.tensors import (
    PLAIN,
    bits_of,
    dense_parts,
    parts_bytes,
    same_bits,
    same_parts,
    unexpanded,
    version_of,
    write_back,
)
from swift_ft.undo.snapshot import Snapshot

MOST_BYTES = 2**20
"""Of a tensor, an array or a bytearray that is copied."""
MOST_NOTED = 2**16
"""Elements of a container that is copied as a whole: so many references take 0.1 to 0.2 ms."""
_MOST_IN_ALL = 2**18
"""Elements of all containers with more than :data:`MOST_ELEMENTS`, in each step."""
MOST_BYTES_IN_ALL = 2**24
"""Of tensors and arrays that have never changed in place, in each step."""
FEW_BYTES = 2**12
"""Of one that is copied nevertheless."""


class Leaf(Protocol):
    """A value and what was in it."""

    @property
    def changed(self) -> bool:
        """Whether it is not as it was."""

    def put_back(self) -> None:
        """As it was."""


class Leaves:
    """Copies of values that change in place, each once.

    Args:
        changing: tensors and arrays that are copied however many bytes there are, by ``id()``; None: all.
        any_length: copy containers of any number of elements, too.
        has_copy: tells the values that are put back in other ways.

    Attributes:
        unnoted: containers that are too large to be copied, by ``id()``.
        beyond: tensors and arrays that are none of these, beyond the bytes that are copied in a step.
    """

    def __init__(
        self,
        changing: Container[int] | None = None,
        *,
        any_length: bool = False,
        has_copy: Callable[[Any], bool] = lambda _: False,
    ) -> None:
        self._found: dict[int, Leaf] = {}
        self._room = _MOST_IN_ALL
        self._bytes = MOST_BYTES_IN_ALL
        self._changing = changing
        self._any_length = any_length
        self._has_copy = has_copy
        self.unnoted: set[int] = set()
        self.beyond: list[Uncopied] = []

    def add(self, value: Any, most_bytes: int, *, once_changed: bool = False) -> None:
        """Copy a value now, unless it is of another kind, or too large.

        Args:
            value: see :data:`swift_ft.checkpoint.step.kinds.CONTAINERS` and the like.
            most_bytes: of a tensor or an array.
            once_changed: copy a tensor or an array only if it is one of the changing ones.
        """
        if id(value) in self._found:
            return
        if (leaf := self._leaf_of(value, most_bytes, once_changed=once_changed)) is not None:
            self._found[id(value)] = leaf

    def add_all(self, values: Iterable[Any], most_bytes: int, *, once_changed: bool = False) -> None:
        """As :meth:`add`, of values of which others may have a copy."""
        for value in values:
            if type(value) in FIXED_EXACTLY or (isinstance(value, torch.Tensor) and self._has_copy(value)):
                continue
            self.add(value, most_bytes, once_changed=once_changed)

    def add_large(self, value: Any, changing: Container[int]) -> None:
        """Copy a tensor or an array of any size, if it is one of those; else note what is in it.

        Args:
            value: values of other kinds are left out, and files that are mapped as arrays.
            changing: those that are known to change, by ``id()``.
        """
        if id(value) in self._found or not _changes_in_place(value) or self._has_copy(value):
            return
        if id(value) not in changing:
            self._found[id(value)] = Compared(value)
        elif isinstance(value, torch.Tensor):
            self._found[id(value)] = _copy_of(value) or Compared(value)
        else:
            self._found[id(value)] = _Array(value)

    def __iter__(self) -> Iterator[Leaf]:
        return iter(self._found.values())

    @property
    def by_number(self) -> dict[int, Leaf]:
        """By the ``id()`` of the value."""
        return self._found

    def _leaf_of(self, value: Any, most_bytes: int, *, once_changed: bool) -> Leaf | None:
        if isinstance(value, torch.Tensor):
            may = _changes_in_place(value) and 0 <= _bytes_of(value) <= most_bytes
            return (self._without_copy(value, once_changed) or _copy_of(value)) if may else None
        if isinstance(value, CONTAINERS):
            if not (whole := self._takes(value)):
                self.unnoted.add(id(value))
            return _Container(value, whole)
        if isinstance(value, GENERATORS):
            return _Generator(value)
        if isinstance(value, np.ndarray):
            may = value.nbytes <= most_bytes and value.flags.writeable
            return (self._without_copy(value, once_changed) or _Array(value)) if may else None
        return None

    def _without_copy(self, value: torch.Tensor | np.ndarray, once_changed: bool) -> Uncopied | None:
        if (size := _bytes_of(value)) <= FEW_BYTES:
            return None
        if not once_changed:
            self._bytes -= size
        has_room = self._bytes >= 0 and not once_changed
        if has_room or (self._changing is not None and id(value) in self._changing):
            return None
        self.beyond.append(Uncopied(value))
        return self.beyond[-1] if self._changing is not None else None

    def _takes(self, container: Any) -> bool:
        if self._any_length:
            return True
        if isinstance(container, OF_BYTES):
            return memoryview(container).nbytes <= MOST_BYTES
        length = len(container)
        if length <= MOST_ELEMENTS:
            return True
        fits = length <= min(MOST_NOTED, self._room)
        self._room -= length if fits else 0
        return fits


def _changes_in_place(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.grad_fn is None and not value.is_meta and not is_lazy(value)
    return isinstance(value, np.ndarray) and not isinstance(value, np.memmap) and value.flags.writeable


def _bytes_of(value: torch.Tensor | np.ndarray) -> int:
    """Of all its parts if it is sparse, and of its memory if it is expanded to a large one."""
    if isinstance(value, torch.Tensor) and value.layout != torch.strided:
        return parts_bytes(value)
    if value.nbytes > MOST_BYTES and isinstance(value, torch.Tensor) and type(value) in PLAIN:
        return unexpanded(value).nbytes
    return value.nbytes


def _copy_of(tensor: torch.Tensor) -> Leaf | None:
    """None of a layout that nothing is known of."""
    if tensor.layout == torch.strided:
        return _Tensor(unexpanded(tensor.detach()) if _bytes_of(tensor) < tensor.nbytes else tensor)
    return _Sparse(tensor) if dense_parts(tensor) else None


class OfGraph:
    """A tensor that still has its graph, and what was in it. It is not held: a graph may hold much memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._value = weakref.ref(tensor), tensor.detach().clone()

    def tensor(self) -> torch.Tensor:
        """The tensor, as it was; a copy without a graph if nobody has it any more.

        No step goes back through the graph of an earlier one: an update has changed what it needs.
        """
        if (tensor := self._tensor()) is None:
            return self._value.clone()
        write_back(tensor, self._value)
        return tensor


def fingerprint_of(value: torch.Tensor | np.ndarray) -> int:
    """Another number once a tensor or an array has changed in place."""
    if isinstance(value, torch.Tensor):
        return version_of(value)
    flat = np.ascontiguousarray(value).reshape(-1)
    as_bytes = flat.nbytes and not value.dtype.hasobject
    return xxhash.xxh3_64_intdigest(flat.view(np.uint8).data if as_bytes else flat.tobytes())


class Uncopied:
    """A tensor or an array of which only a change in place can be seen. It is not held."""

    def __init__(self, value: torch.Tensor | np.ndarray) -> None:
        self.value: weakref.ref[Any] = weakref.ref(value)
        self._fingerprint = self._fingerprint_of(value)

    @property
    def changed(self) -> bool:
        """Whether it has changed in place, and is still there."""
        value = self.value()
        return value is not None and self._fingerprint_of(value) != self._fingerprint

    def put_back(self) -> None:
        """It stays as it is."""

    def _fingerprint_of(self, value: Any) -> Any:
        return fingerprint_of(value)


class Compared(Uncopied):
    """A tensor or an array of which all is read: a write through ``.data`` moves no count."""

    def _fingerprint_of(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and (parts := dense_parts(local(value))):
            named = {str(number): bits_of(unexpanded(part)) for number, part in enumerate(parts)}
            return local(value).shape, tensor_digests(named)
        return fingerprint_of(value)


class _Tensor:
    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._value = tensor, local(tensor).detach().clone()  # to compare shards communicates

    @property
    def changed(self) -> bool:
        return not same_bits(local(self._tensor), self._value)

    @torch.no_grad()
    def put_back(self) -> None:
        here = local(self._tensor)
        if here.shape != self._value.shape and not here.requires_grad:
            here.resize_(self._value.shape)
        elif here.shape != self._value.shape:
            here.data = torch.empty_like(self._value)
        write_back(here, self._value)
        note_changed(self._tensor)


class _Sparse:
    def __init__(self, tensor: torch.Tensor) -> None:
        self._copy = Snapshot.of(tensor)

    @property
    def changed(self) -> bool:
        return not same_parts(self._copy.tensor, self._copy.value)

    def put_back(self) -> None:
        if not self.changed:
            return
        tensor, value = self._copy.tensor, self._copy.value
        with torch.inference_mode() if tensor.is_inference() else torch.no_grad():
            if tensor.is_sparse and tensor.shape != value.shape:
                tensor.sparse_resize_and_clear_(value.shape, value.sparse_dim(), value.dense_dim())
            self._copy.restore()


class _Array:
    def __init__(self, array: np.ndarray) -> None:
        self._array, self._value = array, array.copy()

    @property
    def changed(self) -> bool:
        return self._array.shape != self._value.shape or self._array.tobytes() != self._value.tobytes()

    def put_back(self) -> None:
        if self.changed and self._array.shape == self._value.shape:
            self._array[...] = self._value


class _Generator:
    def __init__(self, generator: Any) -> None:
        self._generator, self._state = generator, read_state(generator)

    @property
    def changed(self) -> bool:
        return not same_state(read_state(self._generator), self._state)

    def put_back(self) -> None:
        write_state(self._generator, self._state)


class _Container:
    """A list, dictionary, set or deque, or one of bytes."""

    def __init__(self, container: Any, whole: bool) -> None:
        self._container, self._length = container, len(container)
        self._value = plain(container) if whole else None

    @property
    def changed(self) -> bool:
        if self._value is None:
            return len(self._container) != self._length
        return not _same(self._container, self._value)

    def put_back(self) -> None:
        if self._value is None:
            if isinstance(self._container, list) and len(self._container) > self._length:
                list.__delitem__(self._container, slice(self._length, None))
            return
        if _same(self._container, self._value):
            return
        if all(map(_goes_back, content_in(self._container))):
            fill(self._container, self._value)
        else:
            self._put_back_in_part(self._value)

    def _put_back_in_part(self, value: Any) -> None:
        """Only entries that go back, now and before: a dictionary's, or those of a list as long."""
        there = dict(items_in(self._container))
        if isinstance(self._container, dict):
            for key, now in there.items():
                if key not in value and _goes_back(now):
                    remove_at(self._container, key)
        elif not isinstance(self._container, list | deque) or len(there) != len(value):
            return
        for key, before in items_in(value):
            if _goes_back(before) and (key not in there or _goes_back(there[key])):
                put_at(self._container, key, before)


def _goes_back(element: Any) -> bool:
    """Whether a container may hold it again, or not any more, whatever is in it."""
    return is_understood(element) or not stays_where_it_is(element)


def _same(one: Any, other: Any) -> bool:
    """Whether two containers of a kind hold the very same things in the same order."""
    if len(one) != len(other):
        return False
    if isinstance(one, dict):
        pairs = zip(items_in(one), items_in(other), strict=True)
        return all(a is b and x is y for (a, x), (b, y) in pairs)
    if isinstance(one, OF_BYTES):
        return bytes(one) == bytes(other)
    if isinstance(one, set):
        return bool(one == other)
    return all(a is b for a, b in zip(content_in(one), other, strict=True))
