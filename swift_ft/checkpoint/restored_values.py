"""Values of Python and NumPy from the ones that an encoder made of them (`checkpoint/plain_values.py`).

A class that a tag names is looked up among those that the reader :class:`knows <KnownClasses>`, and an object
is made without calling it: nothing that is read executes anything.

Text comes back as the very object that the script's constants and attributes of that text are. Pickle writes
an object once and refers to it afterwards, so a script's file would have other bytes otherwise.
"""

from __future__ import annotations

import datetime
import io
import math
import pickle
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from swift_ft.checkpoint.plain_classes import NOTHING_KNOWN, KnownClasses, Unknown, kind_of, member
from swift_ft.checkpoint.plain_values import AS_TEXT, CONSTANTS, FACTORIES, TAG, TIMES


def restored(value: Any, known: KnownClasses = NOTHING_KNOWN) -> Any:
    """The value that was given to :meth:`~swift_ft.checkpoint.plain_values.Encoder.encode`.

    Args:
        value: what it returned, or what a version without it has written.
        known: classes of which objects are made; objects of others become :class:`Unknown`.

    Raises:
        pickle.UnpicklingError: a later version has written it.
    """
    return _Decoder(known).decode(value)


class _Decoder:
    """Walks through one value that was read."""

    def __init__(self, known: KnownClasses) -> None:
        self._known = known
        self._done: dict[int, Any] = {}
        self._texts: dict[str, str] = {}

    def decode(self, form: Any) -> Any:
        kind = type(form)
        if kind is str:
            return self._text(form)
        if kind not in (dict, list, tuple):
            return form
        if id(form) in self._done:
            return self._done[id(form)]
        if kind is tuple:
            return self._note(form, tuple(self._items(form)))
        if kind is list:
            value: list[Any] = self._note(form, [])
            value.extend(self._items(form))
            return value
        if TAG not in form:
            found: dict[Any, Any] = self._note(form, {})
            found.update((self.decode(key), self.decode(item)) for key, item in form.items())
            return found
        if (way := _DECODE.get(form[TAG])) is None:
            raise pickle.UnpicklingError(
                f"the state has a {form[TAG]!r}, which a later version of swift_ft wrote"
            )
        return way(self, form)

    def _note(self, form: Any, value: Any) -> Any:
        self._done[id(form)] = value
        return value

    def _text(self, text: str) -> str:
        """The interned object of a text, in the place of the first one that comes.

        Another object of that text was another one where it was saved, too: a script has made it.
        """
        if self._texts.setdefault(text, text) is text:
            return sys.intern(text)
        return text

    def _items(self, forms: Iterable[Any]) -> list[Any]:
        return [self.decode(form) for form in forms]

    def _collected(self, form: Any, empty: Any) -> Any:
        """A container, known before its content."""
        value = self._note(form, empty)
        if isinstance(value, dict):
            for key, item in form["items"]:
                value[self.decode(key)] = self.decode(item)
        elif isinstance(value, set):
            value.update(self._items(form["items"]))
        else:
            value.extend(self._items(form["items"]))
        return value

    def _ordered(self, form: Any) -> Any:
        value: Any = self._collected(form, OrderedDict())
        vars(value).update(self.decode(form["attributes"]))
        return value

    def _default(self, form: Any) -> Any:
        factory = form["factory"]
        return self._collected(form, defaultdict(FACTORIES[factory] if factory else None))

    def _array(self, form: Any) -> Any:
        data = _numbers(form["data"].cpu().numpy().tobytes(), form["dtype"], math.prod(form["shape"]))
        return self._note(form, data.reshape(form["shape"], order=form["order"]))

    def _objects(self, form: Any) -> Any:
        value = self._note(form, np.empty(form["shape"], object))
        for number, item in enumerate(form["items"]):
            value.flat[number] = self.decode(item)
        return value

    def _time(self, form: Any) -> Any:
        more = {}
        if "fold" in form:
            more = {"fold": form["fold"], "tzinfo": self.decode(form["zone"])}
        return self._note(form, TIMES[form["type"]][0](*form["numbers"], **more))

    def _file(self, form: Any) -> Any:
        value = self._note(form, io.BytesIO(form["data"]))
        value.seek(form["position"])
        return value

    def _namespace(self, form: Any) -> Any:
        value = self._note(form, types.SimpleNamespace())
        vars(value).update(self.decode(form["content"]))
        return value

    def _object(self, form: Any) -> Any:
        kind, name = form[TAG], form["class"]
        known = self._known.find(name)
        if known is None or kind_of(known) != kind:
            return self._note(form, Unknown(kind, name, self.decode(form["content"])))
        if kind == "enum":
            return self._note(form, member(known, form["content"]))
        if kind == "namedtuple":
            return self._note(form, tuple.__new__(known, self._items(form["content"])))
        value = self._note(form, object.__new__(known))
        for name, item in form["content"].items():
            object.__setattr__(value, name, self.decode(item))
        return value


def _numbers(data: bytes | bytearray, spec: Any, count: int = 1) -> np.ndarray[Any, Any]:
    """A flat array that can be written; an empty text's type has no bytes."""
    dtype = np.dtype(spec)
    return np.frombuffer(bytearray(data), dtype) if dtype.itemsize and count else np.zeros(count, dtype)


def _once(made: Callable[[_Decoder, Any], Any]) -> Callable[[_Decoder, Any], Any]:
    return lambda self, form: self._note(form, made(self, form))


_DECODE: dict[str, Callable[[_Decoder, Any], Any]] = {
    "dict": lambda self, form: self._collected(form, {}),
    "set": lambda self, form: self._collected(form, set()),
    "frozenset": _once(lambda self, form: frozenset(self._items(form["items"]))),
    "OrderedDict": _Decoder._ordered,
    "Counter": lambda self, form: self._collected(form, Counter()),
    "defaultdict": _Decoder._default,
    "deque": lambda self, form: self._collected(form, deque(maxlen=form["maxlen"])),
    "no bytes": lambda _, form: b"",
    "integer": _once(lambda self, form: int.from_bytes(form["data"], "little", signed=True)),
    "array": _Decoder._array,
    "objects": _Decoder._objects,
    "scalar": _once(lambda self, form: _numbers(form["data"], form["dtype"])[0]),
    "text": _once(lambda self, form: AS_TEXT[form["type"]](form["text"])),
    "time": _Decoder._time,
    "timezone": _once(lambda self, form: datetime.timezone(self.decode(form["offset"]), *form["name"])),
    "slice": _once(lambda self, form: slice(*self._items(form["bounds"]))),
    "range": _once(lambda self, form: range(*self._items(form["bounds"]))),
    "BytesIO": _Decoder._file,
    "SimpleNamespace": _Decoder._namespace,
    "constant": _once(lambda self, form: CONSTANTS[form["name"]]),
    "enum": _Decoder._object,
    "namedtuple": _Decoder._object,
    "dataclass": _Decoder._object,
}
