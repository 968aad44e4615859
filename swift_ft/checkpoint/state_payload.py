"""State as named tensors and a few plain bytes: the one form in which it is stored, sent and received.

    header (JSON: path, dtype and shape of each tensor; length of the plain bytes) | plain bytes | tensors

Plain values travel as bytes of ``torch.save``, and are read with ``weights_only=True``: nothing that arrives
is executed. What torch would not read so is written in another form (`plain_values.py`).
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from swift_ft.checkpoint.plain_classes import NOTHING_KNOWN, KnownClasses, NotPlainError
from swift_ft.checkpoint.plain_values import Encoder
from swift_ft.checkpoint.restored_values import restored
from swift_ft.errors import TopologyMismatchError, UnsupportedError
from swift_ft.recovery.layout.tensors import Ranges

_read_before: set[type] = set()
"""Types of which this process has read back what it wrote."""

StatePath = tuple[str, ...]
"""The place of a tensor in a state: the keys that lead to it."""


@dataclass(frozen=True, slots=True)
class TensorKind:
    """The dtype and shape of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorKind:
        """The kind of a tensor."""
        return cls(tensor.dtype, tuple(tensor.shape))

    @property
    def nbytes(self) -> int:
        """The size of its values."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


Allocate = Callable[[dict[StatePath, TensorKind]], Mapping[StatePath, torch.Tensor]]
"""Called with the kinds of the tensors that arrive; returns the tensors to be filled."""


@dataclass(frozen=True)
class StatePayload:
    """A state, or a part of one.

    Attributes:
        tensors: by path.
        plain: everything else, as :func:`pack` made it.
    """

    tensors: Mapping[StatePath, torch.Tensor]
    plain: bytes = b""

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> StatePayload:
        """A whole state, as `TrainingState.to_save` gives it."""
        return cls(dict(tensors_in(saved)), saved["plain"]["bytes"].getvalue())

    @property
    def kinds(self) -> dict[StatePath, TensorKind]:
        """The shape and dtype of each tensor, in the order of the tensors."""
        return {path: TensorKind.of(tensor) for path, tensor in self.tensors.items()}

    @cached_property
    def header(self) -> bytes:
        """Describes the tensors to the receiver, which reads it with :func:`kinds_in`."""
        tensors = [
            [list(path), str(kind.dtype).removeprefix("torch."), list(kind.shape)]
            for path, kind in self.kinds.items()
        ]
        return json.dumps({"tensors": tensors, "plain": len(self.plain)}).encode()


def interned(path: Iterable[str]) -> StatePath:
    """A path that was read, of the objects that an optimizer's own keys are: see `restored_values.py`.

    An optimizer's keys may be numbers, which stay as they are.
    """
    return tuple(sys.intern(key) if type(key) is str else key for key in path)


def kinds_in(header: bytes) -> dict[StatePath, TensorKind]:
    """A header's description of the tensors that follow it."""
    return {
        interned(path): TensorKind(getattr(torch, dtype), tuple(shape))
        for path, dtype, shape in json.loads(header)["tensors"]
    }


def _shown(path: Sequence[Any]) -> str:
    return "The value at " + ("".join(f"[{key!r}]" for key in path) or "its top")


def fresh(kinds: dict[StatePath, TensorKind]) -> dict[StatePath, torch.Tensor]:
    """New tensors on the host: see :data:`Allocate`."""
    return {path: torch.empty(kind.shape, dtype=kind.dtype) for path, kind in kinds.items()}


def pack(
    value: Any, known: KnownClasses = NOTHING_KNOWN, shown: Callable[[Sequence[Any]], str] = _shown
) -> bytes:
    """Plain values as bytes: numbers, text, containers, small tensors and more (`plain_values.py`).

    Types that were never packed before are read back at once.

    Args:
        value: the values.
        known: classes of the reader.
        shown: what an error calls the value to which some keys lead.

    Raises:
        UnsupportedError: one of them could not be read back. Names it.
    """
    encoder = Encoder(known)
    try:
        data = _written(encoder, value)
    except NotPlainError as error:
        raise UnsupportedError(
            f"{shown(error.path)} is a {error.kind} {error.why}: {error.remedy}."
        ) from error
    return data


def _written(encoder: Encoder, value: Any) -> bytes:
    form, buffer = encoder.encode(value), io.BytesIO()
    try:
        torch.save(form, buffer)
        if encoder.foreign or not encoder.kinds <= _read_before:
            _read(buffer.getvalue())
            _read_before.update(encoder.kinds)
    except Exception:
        encoder.strict().encode(value)  # says which value it is
        raise
    return buffer.getvalue()


def _read(data: bytes, device: torch.device | None = None) -> Any:
    return torch.load(io.BytesIO(data), map_location=device, weights_only=True)


def unpack(data: bytes, device: torch.device | None = None, known: KnownClasses = NOTHING_KNOWN) -> Any:
    """The values that :func:`pack` was given.

    Args:
        data: what it returned.
        device: of their tensors; by default where they were.
        known: classes of which objects are made; objects of others come as ``Unknown``, and can be packed.

    Raises:
        pickle.UnpicklingError: the bytes name something else than plain values.
    """
    return restored(_read(data, device), known)


def tensors_in(nested: Mapping[str, Any], at: StatePath = ()) -> Iterator[tuple[StatePath, torch.Tensor]]:
    """All tensors of a nested state with their paths, in its order."""
    for key, value in nested.items():
        if isinstance(value, Mapping):
            yield from tensors_in(value, (*at, key))
        elif isinstance(value, torch.Tensor):
            yield (*at, key), value


FetchRanges = Callable[[Sequence[tuple[StatePath, TensorKind, Ranges]]], Sequence[torch.Tensor]]
"""Fetches ranges of tensors from whoever has them: of each its path, what it is there, the ranges in it."""


def tensor_at(nested: Mapping[str, Any], path: StatePath) -> torch.Tensor:
    """The tensor at a path of a nested state.

    Raises:
        TopologyMismatchError: there is none.
    """
    value: Any = nested
    for key in path:
        if key not in value:
            raise TopologyMismatchError(
                f"The state that arrives has {'.'.join(map(str, path))}, and this process has nothing of "
                "that name. A script that prunes, adds or renames parameters as it trains has to do so "
                "before its first step, so that a replacement has them too; a buffer that forward() makes is "
                "registered before that, as None.",
                key=str(path[-1]),
            )
        value = value[key]
    assert isinstance(value, torch.Tensor)
    return value
