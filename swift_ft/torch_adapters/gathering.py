"""Members of a group wait for each other in a store before their communicator forms.

Nothing ends the wait for a member that never comes while a communicator of NCCL forms: torch's abort waits
until it has formed, or has failed after ``TORCH_NCCL_NONBLOCKING_TIMEOUT`` (seen with torch 2.11). A wait in
a store can be left, and takes as long as it takes. Once all are there, forming takes less than a second.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

_ALL = "all"


class Gathering:
    """The communicators of one group: that of all members, and those of pairs.

    Args:
        store: that only this group uses, or a part of one.
        rank: this member's.
        size: number of members.
        timeout: the longest time that a member may take to come.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._timeout = timeout
        self._met: set[str] = set()

    def meet(self, peer: int | None, wait: Callable[[Callable[[], object]], object]) -> None:
        """Before an operation: wait for those that take part in its communicator, once.

        Args:
            peer: the other member of a pair; None for all.
            wait: calls a function that blocks.
        """
        low, high = sorted((self._rank, self._rank if peer is None else peer))
        name = _ALL if peer is None else f"{low}:{high}"
        if name not in self._met:
            wait(partial(gather, self._store, name, self._size if peer is None else 2, self._timeout))
            self._met.add(name)

    def formed(self) -> None:
        """That of all members is there."""
        self._met.add(_ALL)


def gather(store: Any, name: str, size: int, timeout: timedelta) -> None:
    """Return once so many have called this.

    Args:
        store: where they meet.
        name: no other communicator in this store has it.
        size: how many.
        timeout: the longest time.

    Raises:
        RuntimeError: one of them does not come in time.
    """
    if store.add(f"{name}/come", 1) == size:
        store.set(f"{name}/all-are-here", "")
    store.wait([f"{name}/all-are-here"], timeout)
