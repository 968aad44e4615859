"""Values of Python and NumPy as ones that ``torch.load(weights_only=True)`` reads.

Most of what stands in a ``state_dict()`` can be written by ``torch.save``, and only a part of that can be
read again without executing what a file names. So each other value becomes a *tagged* dict of readable ones
(an array is the tensor of its bytes). It comes back (`checkpoint/restored_values.py`) as what it was: equal,
of the same type, and shared where it was shared. A tag names a class only for an enum, a dataclass or a named
tuple.
"""

from __future__ import annotations

import contextlib
import datetime
import decimal
import enum
import fractions
import io
import pathlib
import types
import uuid
import zoneinfo
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from swift_ft.checkpoint.plain_classes import (
    NOTHING_KNOWN,
    KnownClasses,
    NotPlainError,
    Unknown,
    attributes,
    kind_of,
    member,
    members,
    name_of,
)

TAG = "swift_ft.plain"
_ATOMS = {
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytearray,
    torch.dtype,
    torch.device,
    torch.Size,
    torch.layout,
    torch.Tensor,
    torch.nn.Parameter,
}
"""Classes of which ``torch.load`` reads objects as they are, but for long integers."""
_LONGEST_BITS = 2039
"""Of an integer that ``torch.load`` reads: one of more than 255 bytes has an opcode that it does not know."""
_KEYS = {type(None), bool, int, float, complex, str}
FACTORIES: dict[str, type] = {c.__name__: c for c in (int, float, complex, bool, str, list, dict, set, tuple)}
"""Classes of the entries that a ``defaultdict`` makes, by name."""
_PATHS = {kind.__name__: kind for kind in (pathlib.PurePosixPath, pathlib.PureWindowsPath, pathlib.PosixPath)}
AS_TEXT: dict[str, Callable[[str], Any]] = {
    "UUID": uuid.UUID,
    "Decimal": decimal.Decimal,
    "Fraction": fractions.Fraction,
    "ZoneInfo": zoneinfo.ZoneInfo,
    **_PATHS,
}
CONSTANTS = {"Ellipsis": Ellipsis, "NotImplemented": NotImplemented}
TIMES: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "timedelta": (datetime.timedelta, ("days", "seconds", "microseconds")),
    "date": (datetime.date, ("year", "month", "day")),
    "time": (datetime.time, ("hour", "minute", "second", "microsecond")),
    "datetime": (
        datetime.datetime,
        ("year", "month", "day", "hour", "minute", "second", "microsecond"),
    ),
}


def classes_in(value: Any) -> set[type]:
    """The enums, dataclasses and named tuples whose objects are in a value."""
    encoder = Encoder(None)
    with contextlib.suppress(NotPlainError):  # it is refused when it is saved
        encoder.encode(value)
    return {kind for kind in encoder.kinds if kind_of(kind)}


_GIVE_PLAIN = "give plain values (numbers, text, tensors, arrays, lists, dicts) in state_dict()"
_GIVE_NAMES = "give names or numbers as keys in state_dict()"


class Encoder:
    """Makes of one value another one that can be read back.

    What this module does not know stays as it is: a script may have told torch that it is safe.

    Args:
        known: classes that the reader will know; None for all.
        strict: try at once whether torch reads what this module does not know.

    Attributes:
        kinds: types that were met and that torch does not read by itself.
        foreign: whether there is something that this module does not know.
    """

    def __init__(self, known: KnownClasses | None = NOTHING_KNOWN, *, strict: bool = False) -> None:
        self._known = known
        self._strict = strict
        self.foreign = False
        self._done: dict[int, tuple[Any, Any]] = {}  # by id(): the value, which must live on, and its form
        self.kinds: set[type] = set()

    def encode(self, value: Any) -> Any:
        """The other value.

        Raises:
            NotPlainError: something in it cannot be read back.
        """
        kind = type(value)
        if kind in _ATOMS:
            return value if _is_atom(value) else _integer(value)
        if (done := self._done.get(id(value))) is not None:
            return done[1]
        if kind is list:
            return self._filled(value, [], lambda form: form.extend(self._items(value)))
        if kind is tuple:
            return self._note(value, tuple(self._items(value)))
        if kind is dict:
            return self._dict(value)
        self.kinds.add(kind)
        if (way := _ENCODE.get(kind)) is not None:
            return way(self, value)
        if isinstance(value, np.generic):
            return self._note(value, self._scalar(value))
        return self._object(value)

    def strict(self) -> Encoder:
        """One that finds what torch does not read."""
        return Encoder(self._known, strict=True)

    def _note(self, value: Any, form: Any) -> Any:
        self._done[id(value)] = value, form
        return form

    def _filled(self, value: Any, form: Any, fill: Callable[[Any], object]) -> Any:
        """A container is known before its content, which may hold it again."""
        self._note(value, form)
        fill(form)
        return form

    def _items(self, values: Iterable[Any]) -> Iterable[Any]:
        values = list(values)
        if all(map(_is_atom, values)):
            return values
        return [self._at(key, value) for key, value in enumerate(values)]

    def _at(self, key: Any, value: Any) -> Any:
        try:
            return self.encode(value)
        except NotPlainError as error:
            error.path.insert(0, key)
            raise

    def _pairs(self, values: Any) -> list[list[Any]]:
        return [[self._key(key), self._at(key, value)] for key, value in values.items()]

    def _key(self, key: Any) -> Any:
        """A key, or an element of a set."""
        for part in key if type(key) is tuple else (key,):
            if isinstance(part, torch.Tensor):
                raise NotPlainError(part, "as a key, which nobody finds when it is read", _GIVE_NAMES)
        return self.encode(key)

    def _tagged(self, value: Any, kind: str, fill: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        form: dict[str, Any] = self._filled(value, {TAG: kind}, lambda form: form.update(fill()))
        return form

    def _dict(self, value: dict[Any, Any]) -> Any:
        if TAG not in value and all(_is_key(key) for key in value):
            content = value.items()
            return self._filled(value, {}, lambda form: form.update((k, self._at(k, v)) for k, v in content))
        return self._tagged(value, "dict", lambda: {"items": self._pairs(value)})

    def _set(self, value: set[Any]) -> Any:
        if all(_is_key(item) for item in value):
            return self._note(value, set(value))
        return self._tagged(value, "set", lambda: {"items": [*map(self._key, value)]})

    def _ordered(self, value: OrderedDict[Any, Any]) -> Any:
        # The attributes are those that ``Module.state_dict()`` sets.
        return self._tagged(
            value, "OrderedDict", lambda: {"items": self._pairs(value), "attributes": self._dict(vars(value))}
        )

    def _default(self, value: defaultdict[Any, Any]) -> Any:
        factory = value.default_factory
        name = getattr(factory, "__name__", "")
        if factory is not None and FACTORIES.get(name) is not factory:
            raise NotPlainError(
                value, f"whose default comes from {name or factory!r}", "give dict(...) of it in state_dict()"
            )
        return self._tagged(
            value, "defaultdict", lambda: {"factory": factory and name, "items": self._pairs(value)}
        )

    def _deque(self, value: deque[Any]) -> Any:
        return self._tagged(value, "deque", lambda: {"items": self._items(value), "maxlen": value.maxlen})

    def _array(self, value: np.ndarray[Any, Any]) -> Any:
        if value.dtype == object:
            return self._tagged(
                value, "objects", lambda: {"items": self._items(value.flat), "shape": list(value.shape)}
            )
        kind, order = _spec_of(value.dtype, value), "F" if value.flags.fnc else "C"
        data = np.frombuffer(bytearray(value.tobytes(order="A")), np.uint8)
        content = {"dtype": kind, "shape": list(value.shape), "order": order, "data": torch.from_numpy(data)}
        return self._note(value, {TAG: "array", **content})

    def _scalar(self, value: np.generic) -> Any:
        return {TAG: "scalar", "dtype": _spec_of(value.dtype, value), "data": bytearray(value.tobytes())}

    def _text(self, value: Any) -> Any:
        text = value.key if isinstance(value, zoneinfo.ZoneInfo) else str(value)
        if text is None:  # a zone that was read from a file
            return self._object(value)
        return {TAG: "text", "type": type(value).__name__, "text": text}

    def _time(self, value: Any) -> Any:
        numbers = [getattr(value, name) for name in TIMES[type(value).__name__][1]]
        form: dict[str, Any] = {TAG: "time", "type": type(value).__name__, "numbers": numbers}
        if isinstance(value, datetime.datetime | datetime.time):
            form |= {"fold": value.fold, "zone": self._at("tzinfo", value.tzinfo)}
        return form

    def _zone(self, value: datetime.timezone) -> Any:
        name = value.__getinitargs__()[1:]  # type: ignore[attr-defined]  # typeshed does not have it
        return {TAG: "timezone", "offset": self.encode(value.utcoffset(None)), "name": list(name)}

    def _slice(self, value: slice | range) -> Any:
        bounds = [self._at(name, getattr(value, name)) for name in ("start", "stop", "step")]
        return {TAG: type(value).__name__, "bounds": bounds}

    def _file(self, value: io.BytesIO) -> Any:
        return self._note(
            value, {TAG: "BytesIO", "data": bytearray(value.getvalue()), "position": value.tell()}
        )

    def _unknown(self, value: Unknown) -> Any:
        return self._note(
            value, {TAG: value.kind, "class": value.name, "content": self.encode(value.content)}
        )

    def _object(self, value: Any) -> Any:
        """An object of a class of someone else's."""
        kind, name = kind_of(type(value)), name_of(type(value))
        if not kind:
            return self._foreign(value)
        if self._known is not None and self._known.find(name) is not type(value):
            raise NotPlainError(
                value,
                "whose class was not in the state when training began: who reads it would not know it",
                "have one in the state from the beginning, or give plain values in state_dict()",
            )
        if kind == "enum":
            names = members(value)
            if isinstance(value, enum.Flag) and member(type(value), names) != value:
                raise NotPlainError(value, "with bits that have no name", "give its value in state_dict()")
            return self._note(value, {TAG: kind, "class": name, "content": names})
        if kind == "namedtuple":
            return self._note(value, {TAG: kind, "class": name, "content": self._items(value)})
        return self._tagged(value, kind, lambda: {"class": name, "content": self._dict(attributes(value))})

    def _foreign(self, value: Any) -> Any:
        self.foreign = True
        if self._strict:
            try:
                file = io.BytesIO()
                torch.save(value, file)
                file.seek(0)
                torch.load(file, weights_only=True)
            except Exception as error:
                raise NotPlainError(
                    value, "which cannot be read back without executing code", _GIVE_PLAIN
                ) from error
        return value


def _is_atom(value: Any) -> bool:
    kind = type(value)
    return kind in _ATOMS and (kind is not int or value.bit_length() <= _LONGEST_BITS)


def _is_key(key: Any) -> bool:
    return all(type(part) in _KEYS and _is_atom(part) for part in (key if type(key) is tuple else (key,)))


def _integer(value: int) -> dict[str, Any]:
    size = value.bit_length() // 8 + 1
    return {TAG: "integer", "data": bytearray(value.to_bytes(size, "little", signed=True))}


def _spec_of(dtype: np.dtype[Any], value: Any) -> Any:
    """The argument from which ``np.dtype`` makes an equal dtype.

    Raises:
        NotPlainError: there is none, or the dtype holds objects.
    """
    spec: Any = dtype.str if dtype.fields is None else dtype.descr
    try:
        same = np.dtype(spec) == dtype
    except (TypeError, ValueError):
        same = False
    if not same or dtype.hasobject:
        raise NotPlainError(value, f"of the dtype {dtype}", _GIVE_PLAIN)
    return spec


_ENCODE: dict[type, Callable[[Encoder, Any], Any]] = {
    set: Encoder._set,
    frozenset: lambda self, value: self._tagged(
        value, "frozenset", lambda: {"items": [*map(self._key, value)]}
    ),
    OrderedDict: Encoder._ordered,
    Counter: lambda self, value: self._tagged(value, "Counter", lambda: {"items": self._pairs(value)}),
    defaultdict: Encoder._default,
    deque: Encoder._deque,
    bytes: lambda _, value: value or {TAG: "no bytes"},  # torch does not read empty ones
    np.ndarray: Encoder._array,
    io.BytesIO: Encoder._file,
    datetime.timezone: Encoder._zone,
    slice: Encoder._slice,
    range: Encoder._slice,
    types.SimpleNamespace: lambda self, value: self._tagged(
        value, "SimpleNamespace", lambda: {"content": self._dict(vars(value))}
    ),
    Unknown: Encoder._unknown,
    **{kind: Encoder._text for kind in AS_TEXT.values() if isinstance(kind, type)},
    **{kind: Encoder._time for kind, _ in TIMES.values() if isinstance(kind, type)},
    **{type(one): lambda self, value: {TAG: "constant", "name": repr(value)} for one in CONSTANTS.values()},
}
