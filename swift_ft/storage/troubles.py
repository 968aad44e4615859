"""Calls of a store that go wrong for a while, as an injected fault says.

The calls of one store's files, and those of its fsspec filesystem that lie in that store, pass a gate.
Nothing of it is there unless a fault asks for it.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import pyarrow as pa

from swift_ft.faults import Action, Fault
from swift_ft.faults.fault import DEFAULT_EACH_S
from swift_ft.storage.files import Files, LocalFiles
from swift_ft.storage.store import Store

_logger = logging.getLogger(__name__)


class _Call(Enum):
    """The kinds of calls."""

    READ = auto()
    """Contents are read."""
    LOOK = auto()
    """It is asked what is there."""
    GROW = auto()
    """Something is written."""
    CHANGE = auto()
    """Something is deleted or renamed."""


_OF_FILES = {
    "make_root": _Call.GROW,
    "make_parent": _Call.GROW,
    "open_sink": _Call.GROW,
    "reserve": _Call.GROW,
    "upload": _Call.GROW,
    "put": _Call.GROW,
    "trim": _Call.CHANGE,
    "rename": _Call.CHANGE,
    "open_source": _Call.READ,
    "exists": _Call.LOOK,
    "list": _Call.LOOK,
    "find": _Call.LOOK,
}
_OF_FILESYSTEMS = {
    "pipe_file": _Call.GROW,
    "put_file": _Call.GROW,
    "makedirs": _Call.GROW,
    "rm": _Call.CHANGE,
    "rm_file": _Call.CHANGE,
    "mv": _Call.CHANGE,
    "rename": _Call.CHANGE,
    "cat_file": _Call.READ,
    "get_file": _Call.READ,
    "exists": _Call.LOOK,
    "size": _Call.LOOK,
    "ls": _Call.LOOK,
}
_READS = frozenset({_Call.READ})
_WRITES = frozenset({_Call.GROW, _Call.CHANGE})
_EVERY = frozenset(_Call)
_MEETS = {
    Action.UNWRITABLE: _WRITES,
    Action.UNREADABLE: _READS,
    Action.MISSING: _READS | {_Call.LOOK},
    Action.LAG: _EVERY,
    Action.BUSY: _EVERY,
    Action.DENIED: _EVERY,
    Action.TORN: _READS | {_Call.GROW},
    Action.FULL: frozenset({_Call.GROW}),
    Action.READ_ONLY: _WRITES,
}
"""The calls that a fault meets."""
_NUMBERS = {
    Action.UNWRITABLE: errno.EIO,
    Action.UNREADABLE: errno.EIO,
    Action.MISSING: errno.ENOENT,
    Action.BUSY: errno.EBUSY,
    Action.DENIED: errno.EACCES,
    Action.TORN: errno.EIO,
    Action.FULL: errno.ENOSPC,
    Action.READ_ONLY: errno.EROFS,
}


@dataclass(slots=True)
class _Trouble:
    fault: Fault
    until: float
    calls: int | None
    met: bool = False


class Troubles:
    """Troubles of the calls that this process makes of a store.

    Args:
        store: whose calls pass from now on. Copies of it do, too.
    """

    def __init__(self, store: Store) -> None:
        self._root = store.root
        self._local = isinstance(store.files, LocalFiles)
        self._lock = threading.Lock()
        self._there: list[_Trouble] = []  # guarded by the lock
        self._inner = threading.local()  # a call that another one makes is a part of it
        self._planted: list[tuple[Any, str]] = []
        for name, call in _OF_FILES.items():
            self._plant(store.files, name, call)
        for name, call in _OF_FILESYSTEMS.items():
            self._plant(store.files.fs, name, call)
        self._plant_open(store.files)

    def begin(self, fault: Fault) -> None:
        """From now on calls go wrong as a fault says, until its time or its calls are over."""
        with self._lock:
            self._there.append(_Trouble(fault, time.monotonic() + fault.lasts_s, fault.calls))

    def remove(self) -> None:
        """Nothing passes any more. fsspec keeps its filesystems, which other stores use, too."""
        for place, name in self._planted:
            vars(place).pop(name, None)

    def _plant(self, place: Any, name: str, call: _Call) -> None:
        original = getattr(place, name)

        @functools.wraps(original)
        def passed(*args: Any, **kwargs: Any) -> Any:
            if getattr(self._inner, "depth", 0) or not self._is_inside(args):
                return original(*args, **kwargs)
            self._inner.depth = 1
            try:
                self._meet(call, args, tears=lambda: self._tear(args))
                found = original(*args, **kwargs)
                return self._writing(found, args[0]) if name == "open_sink" else found
            except FileNotFoundError:
                if call == _Call.LOOK and name == "exists":
                    return False
                raise
            finally:
                self._inner.depth = 0

        setattr(place, name, passed)
        self._planted.append((place, name))

    def _plant_open(self, files: Files) -> None:
        """Files that other libraries open in the store: each write is a call."""
        original = files.fs.open

        @functools.wraps(original)
        def opened(path: Any, mode: str = "rb", *args: Any, **kwargs: Any) -> Any:
            if getattr(self._inner, "depth", 0) or not self._is_inside((path,)):
                return original(path, mode, *args, **kwargs)
            writes = any(letter in mode for letter in "wax+")
            self._meet(_Call.GROW if writes else _Call.READ, (path,), tears=lambda: None)
            file = original(path, mode, *args, **kwargs)
            return _Written(file, self._before_write(file, path)) if writes else file

        files.fs.open = opened
        self._planted.append((files.fs, "open"))

    def _is_inside(self, args: tuple[Any, ...]) -> bool:
        return any(isinstance(one, str | os.PathLike) and self._root in os.fspath(one) for one in args)

    def _meet(self, call: _Call, args: tuple[Any, ...], *, tears: Callable[[], None]) -> None:
        """Raise the error that a call meets now, or wait."""
        if (trouble := self._next(call)) is None:
            return
        fault = trouble.fault
        if not trouble.met:
            trouble.met = True
            _logger.warning(
                "the first call that '%s' meets: %s %s",
                fault,
                call.name.lower(),
                args[:1],
                extra={"event": "fault_met"},
            )
        if fault.action == Action.LAG:
            time.sleep(DEFAULT_EACH_S if fault.each is None else fault.each)
            return
        if fault.action == Action.TORN and call == _Call.GROW:
            tears()
        number = _NUMBERS[fault.action]
        words = "503 Slow Down" if fault.action == Action.BUSY else os.strerror(number)
        raise OSError(number, f"{words} (injected)", str(args[0]) if args else None)

    def _next(self, call: _Call) -> _Trouble | None:
        """The trouble that meets a call, which counts."""
        with self._lock:
            now = time.monotonic()
            self._there = [one for one in self._there if now < one.until and one.calls != 0]
            for one in self._there:
                if call in _MEETS[one.fault.action]:
                    if one.calls is not None:
                        one.calls -= 1
                    return one
        return None

    def _tear(self, args: tuple[Any, ...]) -> None:
        """Leave half of it behind where a call writes. An object store shows no object before its end."""
        data = next((one for one in args if isinstance(one, bytes)), None)
        if self._local and data is not None:
            with open(args[0], "wb") as file:  # noqa: PTH123  (a path as a filesystem writes it)
                file.write(data[: len(data) // 2])

    def _writing(self, sink: pa.NativeFile, path: str) -> pa.NativeFile:
        """An open file whose writes are calls. Arrow's own of a local file asks nobody."""
        file: Any = sink
        if isinstance(sink, pa.OSFile):
            sink.close()
            file = open(path, "wb", buffering=0)  # noqa: PTH123, SIM115  (Arrow closes it)
        return pa.PythonFile(_Written(file, self._before_write(file, path)), mode="w")

    def _before_write(self, file: Any, path: Any) -> Callable[[Any], None]:
        def meet(data: Any) -> None:
            def tear() -> None:
                file.write(bytes(data)[: memoryview(data).nbytes // 2])

            self._meet(_Call.GROW, (path,), tears=tear)

        return meet


class _Written:
    """A file that is being written, with a gate before each write."""

    def __init__(self, file: Any, before: Callable[[Any], None]) -> None:
        self._file = file
        self._before = before

    def write(self, data: Any) -> Any:
        self._before(data)
        return self._file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _Written:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
