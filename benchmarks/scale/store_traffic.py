"""Counts what this process asks of the rendezvous store: operations, and bytes of keys and values.

Every client of the store is a :class:`RendezvousStore`, so its methods are counted, whoever opened it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from swift_ft.torch_adapters.rendezvous_store import RendezvousStore

_METHODS = ("set", "get", "multi_get", "add", "check", "wait", "compare_set", "delete_key")


class StoreTraffic:
    """What was asked of the store since :meth:`install`.

    Counting takes no lock: appending to a list is one step of the interpreter.
    """

    def __init__(self) -> None:
        self._bytes: list[int] = []  # of each operation

    def install(self) -> None:
        """Count the calls of all clients of this process from now on."""
        for name in _METHODS:
            original = getattr(RendezvousStore, name)
            setattr(RendezvousStore, name, self._counted(original))

    def operations(self) -> int:
        """Operations so far, those that wait for an answer included."""
        return len(self._bytes)

    def bytes(self) -> int:
        """Bytes of the keys and values that were sent and received so far."""
        return sum(self._bytes)

    def _counted(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def counted(store: RendezvousStore, *args: Any) -> Any:
            answer = original(store, *args)
            self._bytes.append(_size(args) + _size(answer))
            return answer

        return counted


def _size(value: Any) -> int:
    if isinstance(value, (str, bytes)):
        return len(value)
    if isinstance(value, (list, tuple)):
        return sum(map(_size, value))
    return 0
