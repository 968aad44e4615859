"""Where the journal's blocks are kept: a log of texts with numbers, in the rendezvous store.

Block n is written by compare-and-set from absent, so two writers never share a number and no number stays
empty. Readers block in the store until the next one is there; none of them polls.

Old blocks may be deleted, and the key of a deleted block is absent, too. A writer
that was frozen could therefore write to a number that all others have passed. The key ``first`` is raised
before blocks are deleted, so the writer sees it after such a write, and writes again at the end. A reader
takes a block together with ``first``, in one answer, and so sees no block that was written in this way.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Protocol, runtime_checkable

from torch.distributed import DistError, DistStoreError

from swift_ft.errors import RendezvousLostError, first_line
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore

__all__ = ["BlockGoneError", "BlockLog", "StoreBlockLog", "block_log_in"]

_FIRST = "journal/first"
_LOWEST = "journal/lowest"
_SNAPSHOT = "journal/snapshot"
_ABSENT = "absent"

_SURE_S = 1.0
"""For so long after the last answer a reader may wait for a block without asking whether it is gone."""

_ANSWER = timedelta(seconds=60)
"""For a block that is there."""


class BlockGoneError(LookupError):
    """The block was deleted: a snapshot covers it."""


class BlockLog(Protocol):
    """Blocks of text with numbers from 0, and the newest snapshot of what they lead to.

    All methods may be called by several threads, and raise :class:`RendezvousLostError` if the store does not
    answer.
    """

    def append(self, text: str, name: str) -> None:
        """Write a block after the last one.

        An append whose outcome is unknown may be repeated under the same name. It is there once then, or
        twice: readers drop what they have read (:class:`swift_ft.recovery.blocks.Sequencer`).
        """

    def read(self, number: int, timeout_s: float) -> str | bytes | None:
        """Wait for a block. None if it is not there in time; 0 does not wait.

        Raises:
            BlockGoneError: if it was deleted.
        """

    def first(self) -> int:
        """The number of the first block that was not deleted."""

    def delete_before(self, number: int) -> None:
        """Delete the blocks before a number. A snapshot covers them."""

    def snapshot(self) -> str | bytes | None:
        """The newest snapshot, or None if there is none yet."""

    def put_snapshot(self, text: str, number: int) -> None:
        """Keep a snapshot of the blocks before a number, unless there is a newer one."""


@runtime_checkable
class HasBlockLog(Protocol):
    """A store that keeps blocks better than key by key."""

    def block_log(self) -> BlockLog:
        """The blocks."""


def block_log_in(store: RendezvousStore) -> BlockLog:
    """The journal's blocks in a store.

    Args:
        store: a client of its own, since its reads change how long it waits.
    """
    own = store.underlying
    return own.block_log() if isinstance(own, HasBlockLog) else StoreBlockLog(store)


class StoreBlockLog:
    """A :class:`BlockLog` in torch's TCPStore.

    Args:
        store: a client of its own, since its reads change how long it waits.
    """

    def __init__(self, store: RendezvousStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._tail = 0  # a number that is not after the first free one; guarded by the lock
        # The first block, and when that was known. Written at once by each thread that reads.
        self._seen_first = (0, -math.inf)

    def append(self, text: str, name: str) -> None:
        """See :meth:`BlockLog.append`."""
        number = self._tail
        with _answers():
            while True:
                found = self._store.compare_set(_key(number), "", text).decode()
                first = self._number(_FIRST)
                if found == text and first <= number:
                    break
                if found == text:  # all others have passed this number, and it was deleted
                    self._store.delete_key(_key(number))
                number = max(number + 1, first)
        self._passed(number)

    def read(self, number: int, timeout_s: float) -> str | bytes | None:
        """See :meth:`BlockLog.read`."""
        keys = [_key(number)]
        with _answers():
            if time.monotonic() > self._seen_first[1] + _SURE_S:
                self._note_first(self._number(_FIRST))
            self._check(number)
            if timeout_s <= 0 and not self._store.check(keys):
                self._note_first(self._number(_FIRST))
                self._check(number)
                return None
            self._store.set_timeout(timedelta(seconds=timeout_s) if timeout_s > 0 else _ANSWER)
            try:
                text, first = self._store.multi_get([*keys, _FIRST])
            except DistStoreError:
                return None
        self._note_first(int(first))
        self._check(number)
        self._passed(number)
        return text

    def first(self) -> int:
        """See :meth:`BlockLog.first`."""
        with _answers():
            return self._number(_FIRST)

    def delete_before(self, number: int) -> None:
        """See :meth:`BlockLog.delete_before`. What a process that died has left is deleted, too."""
        with _answers():
            self._raise_to(_FIRST, number)
            for old in range(self._number(_LOWEST), number):
                self._store.delete_key(_key(old))
            self._raise_to(_LOWEST, number)

    def snapshot(self) -> str | bytes | None:
        """See :meth:`BlockLog.snapshot`."""
        with _answers():
            while number := self._number(_SNAPSHOT):
                found = self._store.compare_set(_snapshot_key(number), _ABSENT, _ABSENT)
                if found != _ABSENT.encode():  # else a newer one has just replaced it
                    return found
        return None

    def put_snapshot(self, text: str, number: int) -> None:
        """See :meth:`BlockLog.put_snapshot`."""
        with _answers():
            self._store.set(_snapshot_key(number), text)
            before = self._raise_to(_SNAPSHOT, number)
            if before != number:
                self._store.delete_key(_snapshot_key(min(before, number)))

    def _number(self, key: str) -> int:
        """A number that begins with 0."""
        return int(self._store.compare_set(key, "", "0"))

    def _raise_to(self, key: str, number: int) -> int:
        """Raise a number. Returns the one before, or the larger one that is there."""
        before = self._number(key)
        while before < number:
            found = int(self._store.compare_set(key, str(before), str(number)))
            if found == number:
                break
            before = found
        return before

    def _passed(self, number: int) -> None:
        with self._lock:
            self._tail = max(self._tail, number + 1)

    def _note_first(self, first: int) -> None:
        self._seen_first = (first, time.monotonic())

    def _check(self, number: int) -> None:
        if number < self._seen_first[0]:
            raise BlockGoneError(f"block {number} of the journal is gone")


def _key(number: int) -> str:
    return f"journal/{number}"


def _snapshot_key(number: int) -> str:
    return f"{_SNAPSHOT}/{number}"


@contextlib.contextmanager
def _answers() -> Iterator[None]:
    try:
        yield
    except (DistError, RuntimeError) as error:
        raise RendezvousLostError(
            f"The rendezvous store does not answer ({first_line(error)}). "
            "Start it again and resume from the last checkpoint with --resume."
        ) from error
