"""The text of everything that the journal has led to: a newcomer reads it instead of the history. Pure.

How a value is written follows from the type hints of its class, so a new field needs no code here. What is a
frozen dataclass, a named or plain tuple, an enum, a persistent map, a frozen set, a number or a string has a
text. Values of one map that are dataclasses are written by field, and what is equal in all of them once. All
participants write the same text for the same state.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import itertools
import json
import types
import typing
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

from immutables import Map

from swift_ft.errors import SwiftError
from swift_ft.recovery.blocks import Sequencer
from swift_ft.recovery.job_state import State
from swift_ft.recovery.values import made

_FORMAT = 1


class JournalSnapshot(NamedTuple):
    """The state of the journal after a block.

    Attributes:
        sequencer: has seen the events so far.
        number: the block that follows.
    """

    state: State
    sequencer: Sequencer
    number: int


def snapshot_to_text(snapshot: JournalSnapshot) -> str:
    """A snapshot as text: packed, since stores take no value of any size."""
    plain = json.dumps(
        {"format": _FORMAT, "snapshot": encoded(JournalSnapshot, snapshot)}, separators=(",", ":")
    )
    return base64.b64encode(zlib.compress(plain.encode())).decode()


def snapshot_from_text(text: str | bytes) -> JournalSnapshot:
    """The inverse of :func:`snapshot_to_text`.

    Raises:
        SwiftError: if another version wrote it.
    """
    data = json.loads(zlib.decompress(base64.b64decode(text)))
    if data["format"] != _FORMAT:
        raise SwiftError(
            f"The snapshot of the journal has format {data['format']} and not {_FORMAT}: "
            "all machines of a job must run the same version of swift_ft."
        )
    snapshot: JournalSnapshot = decoded(JournalSnapshot, data["snapshot"])
    return snapshot


def encoded(hint: Any, value: Any) -> Any:
    """A value of a type as JSON's values."""
    return _codec(hint).encode(value)


def decoded(hint: Any, data: Any) -> Any:
    """The inverse of :func:`encoded`."""
    return _codec(hint).decode(data)


# -------------------------------------------------------------------------------------------- how by the type


class _Codec(NamedTuple):
    """A conversion of one type's values to JSON's values, and back. ``plain``: they are such values."""

    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]
    plain: bool = False


_PLAIN = _Codec(lambda value: value, lambda data: data, plain=True)


@functools.cache
def _codec(hint: Any) -> _Codec:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint in (int, str, bool, float, None, type(None)):
        return _PLAIN
    if origin in (types.UnionType, typing.Union):
        return _optional(arguments)
    if origin is tuple:
        return _tuple(arguments)
    if origin is frozenset:
        return _frozenset(_codec(arguments[0]))
    if origin in (Map, Mapping, dict):
        return _map(arguments[0], arguments[1], Map if origin is Map else dict)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _Codec(lambda value: value.value, hint)
    if dataclasses.is_dataclass(hint) or _is_named_tuple(hint):
        return _one_of(_table(hint))
    raise TypeError(f"a snapshot cannot hold {hint!r}")


def _is_named_tuple(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, tuple) and hasattr(hint, "_fields")


def _optional(arguments: Sequence[Any]) -> _Codec:
    inner = [_codec(argument) for argument in arguments if argument is not type(None)]
    if all(codec.plain for codec in inner):
        return _PLAIN
    (codec,) = inner
    return _Codec(
        lambda value: None if value is None else codec.encode(value),
        lambda data: None if data is None else codec.decode(data),
    )


def _tuple(arguments: Sequence[Any]) -> _Codec:
    if arguments[-1] is Ellipsis:
        items = _codec(arguments[0])
        if items.plain:
            return _Codec(list, tuple)
        return _Codec(
            lambda value: [items.encode(item) for item in value],
            lambda data: tuple(items.decode(item) for item in data),
        )
    codecs = [_codec(argument) for argument in arguments]
    return _Codec(
        lambda value: [codec.encode(item) for codec, item in zip(codecs, value, strict=True)],
        lambda data: tuple(codec.decode(item) for codec, item in zip(codecs, data, strict=True)),
    )


def _frozenset(items: _Codec) -> _Codec:
    return _Codec(
        lambda value: sorted(items.encode(item) for item in value),
        lambda data: frozenset(items.decode(item) for item in data),
    )


def _map(key_hint: Any, value_hint: Any, make: Callable[[Iterable[tuple[Any, Any]]], Any]) -> _Codec:
    keys = _codec(key_hint)
    values = _column_of(value_hint)

    def encode(value: Mapping[Any, Any]) -> Any:
        rows = sorted(((keys.encode(key), item) for key, item in value.items()), key=lambda row: row[0])
        return [[key for key, _ in rows], values.encode([item for _, item in rows])] if rows else []

    def decode(data: Any) -> Any:
        return make(zip(map(keys.decode, data[0]), values.decode(data[1]), strict=True)) if data else make(())

    return _Codec(encode, decode)


# -------------------------------------------------------------------------------------- many values of a type

_Table = _Codec
"""Of a list of values."""


def _column_of(hint: Any) -> _Table:
    if dataclasses.is_dataclass(hint) or _is_named_tuple(hint):
        return _table(hint)
    codec = _codec(hint)
    if hint in (None, type(None)):
        return _Codec(len, lambda count: [None] * count)
    if codec.plain:
        return _PLAIN
    return _Codec(
        lambda values: [codec.encode(value) for value in values],
        lambda data: [codec.decode(item) for item in data],
    )


def _table(kind: Any) -> _Table:
    """Of dataclasses, or named tuples: by field, once for all that have the same in it."""
    hints = get_type_hints(kind)
    names = kind._fields if _is_named_tuple(kind) else [f.name for f in dataclasses.fields(kind)]
    codecs: dict[str, _Codec] = {}  # made when needed: a class may hold itself

    def codec_of(name: str) -> _Codec:
        if name not in codecs:
            codecs[name] = _codec(hints[name])
        return codecs[name]

    def encode(values: Sequence[Any]) -> Any:
        same, each = {}, {}
        for name in names:
            column = [getattr(value, name) for value in values]
            first = column[0]
            if all(item is first or item == first for item in column):
                same[name] = codec_of(name).encode(first)
            else:
                each[name] = [codec_of(name).encode(item) for item in column]
        return [len(values), same, each]

    def decode(data: Any) -> list[Any]:
        count, same, each = data
        columns: dict[str, Iterable[Any]] = {
            name: itertools.repeat(codec_of(name).decode(item), count) for name, item in same.items()
        }
        columns |= {name: map(codec_of(name).decode, column) for name, column in each.items()}
        if _is_named_tuple(kind):
            return [kind(*row) for row in zip(*(columns[name] for name in names), strict=True)]
        return made(kind, count, columns)

    return _Codec(encode, decode)


def _one_of(table: _Table) -> _Codec:
    return _Codec(
        lambda value: table.encode([value])[1],
        lambda data: table.decode([1, data, {}])[0],
    )
