"""The values that nested state consists of, by name, and a digest of each.

An object of a class that the reader does not know (`plain_classes.Unknown`) has the same names and digests as
the object itself: what is in a checkpoint meets what is in a process.
"""

from __future__ import annotations

import io
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import xxhash

from swift_ft.checkpoint.plain_classes import Unknown, attributes, kind_of, members, name_of
from swift_ft.torch_core.tensors import tensor_bytes

_WHOLE = (str, bytes, bytearray, memoryview, range, io.BytesIO)
"""Classes whose objects are one value, though they consist of parts."""


VARIABLES = "plain.bytes.carried"
"""The name of the script's variables in a saved state."""
RANDOM = "plain.bytes.small.random"
"""That of the process's own random state."""
OF_ONE_RUN = (
    "plain.bytes.run",
    "plain.bytes.small.parts.swift_ft.stop.run",
    "plain.bytes.small.parts.swift_ft.epochs.top",  # variables: all that follows from them is compared
)
"""Names of what may be unlike in two runs that are equal. Where a run was to end is not among them."""


def is_in(name: str, parts: Iterable[str]) -> bool:
    """Whether a value is one of some, or within one of them.

    Args:
        name: by :func:`leaves`.
        parts: names that lead to them.
    """
    return any(name == part or name.startswith(f"{part}.") for part in parts)


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The values in nested containers and objects, with the path of keys that leads to each."""
    if isinstance(value, _WHOLE):
        yield name, value
    elif (made_of := _content(value)) is not None:
        kind, content = made_of
        yield f"{name}.class", kind
        yield from leaves(content, name)
    elif isinstance(value, Mapping | Sequence | deque) and not value:  # nothing would tell it from none
        yield name, {} if isinstance(value, Mapping) else ()
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from leaves(inner, f"{name}.{_shown(key)}")
    elif isinstance(value, Sequence | deque):
        for index, inner in enumerate(value):
            yield from leaves(inner, f"{name}.{index}")
    elif isinstance(value, np.ndarray) and value.dtype == object:
        yield f"{name}.shape", value.shape
        for index, inner in enumerate(value.flat):
            yield from leaves(inner, f"{name}.{index}")
    else:
        yield name, value


def digests_of(values: Any, name: str = "") -> dict[str, str]:
    """A digest of each value of nested state, by name."""
    return digests(leaves(values, name))


def digests(named: Iterable[tuple[str, Any]]) -> dict[str, str]:
    """A digest of each value, by name. Values of one name (the keys ``1`` and ``"1"``) are told apart."""
    found: dict[str, str] = {}
    for name, value in named:
        while name in found:
            name += "'"
        found[name] = _digest_of(value)
    return found


def _content(value: Any) -> tuple[str, Any] | None:
    """The class of an object, and what it is made of; None for other values."""
    if isinstance(value, Unknown):
        return value.name, value.content
    kind = type(value)
    match kind_of(kind):
        case "dataclass":
            return name_of(kind), attributes(value)
        case "namedtuple":
            return name_of(kind), list(value)
        case "enum":
            return name_of(kind), members(value)
    # The repr of an object without one of its own is where it is in memory.
    has_no_words = getattr(kind, "__repr__", None) is object.__repr__ and hasattr(value, "__dict__")
    if has_no_words or isinstance(value, types.SimpleNamespace):
        return name_of(kind), vars(value)
    return None


def _shown(key: Any) -> str:
    """A key in a name. That of an unknown class is as one of a known class."""
    made_of = _content(key)
    return str(key if made_of is None else made_of[1])


def _digest_of(value: Any) -> str:
    found = xxhash.xxh3_128()
    for piece in _pieces_of(value):
        found.update(piece)
    return found.hexdigest()


def _pieces_of(value: Any) -> Iterator[Any]:
    """All bytes of a value, after its kind: NaN is as itself, and -0.0 is not as 0.0."""
    if isinstance(value, torch.Tensor):
        yield from _pieces_of_tensor(value.detach())
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        yield f"{value.dtype}{value.shape}".encode()
        yield value.tobytes()
    elif isinstance(value, io.BytesIO):
        yield f"file at {value.tell()}".encode()
        yield value.getvalue()
    elif isinstance(value, set | frozenset):  # it has no order
        yield repr(sorted(sorted(digests_of(one).items()) for one in value)).encode()
    else:
        yield repr(value).encode()


def _pieces_of_tensor(value: torch.Tensor) -> Iterator[Any]:
    kind = f"{value.dtype}{tuple(value.shape)}".encode()
    if value.layout == torch.strided:
        yield kind
        yield tensor_bytes(value)
        return
    yield f"{value.layout}".encode()
    yield kind
    for part in _parts_of_sparse(value):
        yield from _pieces_of_tensor(part)


def _parts_of_sparse(value: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if value.layout == torch.sparse_coo:
        whole = value.coalesce()
        return whole.indices(), whole.values()
    if value.layout in (torch.sparse_csr, torch.sparse_bsr):
        return value.crow_indices(), value.col_indices(), value.values()
    if value.layout in (torch.sparse_csc, torch.sparse_bsc):
        return value.ccol_indices(), value.row_indices(), value.values()
    return (value.to_dense(),)
