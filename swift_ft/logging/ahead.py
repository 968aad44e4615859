"""Fetching what will be wanted next while what is at hand is used."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

__all__ = ["ReadAhead"]

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class ReadAhead(Generic[K, T]):
    """Fetches things in the order in which they will be wanted, a few ahead of the one that is asked for.

    For use by one thread.

    Args:
        fetch: gets one thing by its name; called in threads.
        depth: how many things are fetched, or wait to be taken, at a time.
        threads: how many are fetched at once.
    """

    def __init__(self, fetch: Callable[[K], T], depth: int, *, threads: int) -> None:
        self._fetch = fetch
        self._depth = depth
        self._planned: list[K] = []  # not begun
        self._begun: dict[K, Future[T]] = {}
        self._pool = ThreadPoolExecutor(threads, "swift_ft read-ahead")

    def plan(self, names: Iterable[K]) -> None:
        """Says what will be wanted, in this order, in place of what was said before."""
        names = list(names)
        for name in self._begun.keys() - names:
            self._begun.pop(name).cancel()
        self._planned = [name for name in names if name not in self._begun]
        self._begin()

    def take(self, name: K) -> T:
        """Waits for a thing that was planned, and lets go of it. Raises what fetching it raised."""
        if name not in self._begun:
            # It is in none of the two where fetching it failed before.
            self._planned = [planned for planned in self._planned if planned != name]
            self._begun[name] = self._pool.submit(self._fetch, name)
        try:
            return self._begun[name].result()
        finally:
            del self._begun[name]
            self._begin()

    def _begin(self) -> None:
        while self._planned and len(self._begun) < self._depth:
            name = self._planned.pop(0)
            self._begun[name] = self._pool.submit(self._fetch, name)
