"""Fetches the next items in the background."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from swift_ft.observe.waits import waiting

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class Prefetcher(Generic[K, T]):
    """Fetches items in the order in which they are needed, a few ahead of the current one.

    For use by one thread.

    Args:
        fetch: fetches one item by its name; called in threads.
        depth: most items that are being fetched or wait to be taken.
        threads: how many are fetched in parallel.
    """

    def __init__(self, fetch: Callable[[K], T], depth: int, *, threads: int) -> None:
        self._fetch = fetch
        self._depth = depth
        self._planned: list[K] = []  # not begun
        self._begun: dict[K, Future[T]] = {}
        self._pool = ThreadPoolExecutor(threads, "swift_ft read-ahead")

    def plan(self, names: Iterable[K]) -> None:
        """Replaces the plan: these items are needed, in this order."""
        names = list(names)
        for name in self._begun.keys() - names:
            self._begun.pop(name).cancel()
        self._planned = [name for name in names if name not in self._begun]
        self._begin()

    def take(self, name: K) -> T:
        """Waits for a planned item and removes it. Raises the error of its fetch."""
        if name not in self._begun:
            # It is neither planned nor begun if an earlier fetch of it failed.
            self._planned = [planned for planned in self._planned if planned != name]
            self._begun[name] = self._pool.submit(self._fetch, name)
        try:
            with waiting(f"{name}, which a replay reads"):
                return self._begun[name].result()
        finally:
            del self._begun[name]
            self._begin()

    def _begin(self) -> None:
        while self._planned and len(self._begun) < self._depth:
            name = self._planned.pop(0)
            self._begun[name] = self._pool.submit(self._fetch, name)
