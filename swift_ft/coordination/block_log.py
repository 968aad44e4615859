"""The log of the journal's blocks: numbered texts in the rendezvous store.

Block n is written by compare-and-set from absent, so two writers never share a number and no number stays
empty. Readers block in the store until the next one is there; none of them polls.

Old blocks may be deleted, and the key of a deleted block is absent, too. A writer
that was frozen could therefore write to a number that all others have passed. The key ``first`` is raised
before blocks are deleted, so the writer sees it after such a write, and writes again at the end. A reader
takes a block together with ``first``, in one answer, and so sees no block that was written in this way.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol, TypeVar, runtime_checkable

from torch.distributed import DistError, DistStoreError

from swift_ft.config import store_keys
from swift_ft.coordination.incarnations import incarnation_of
from swift_ft.errors import FencedError, NotRestoredError, RendezvousLostError, first_line
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore, Store

_ABSENT = "absent"

_SURE_S = 1.0
"""For so long after the last answer a reader may wait for a block without asking whether it is gone."""

_ANSWER = timedelta(seconds=60)
"""For a block that is there."""


_Answer = TypeVar("_Answer")


class BlockGoneError(LookupError):
    """The block was deleted: a snapshot covers it."""


class StoreRenewedError(RendezvousLostError):
    """The store was restarted since the last append.

    What was written before, and not read, may be lost with the store before, so it comes first.
    """


class BlockLog(Protocol):
    """Blocks of text with numbers from 0, and the newest snapshot of what they lead to.

    All methods may be called by several threads, and raise :class:`RendezvousLostError` if the store does not
    answer.
    """

    def append(self, text: str, name: str) -> None:
        """Write a block after the last one.

        An append whose outcome is unknown may be repeated under the same name. It is there once then, or
        twice: readers drop what they have read (:class:`swift_ft.recovery.blocks.Sequencer`).

        Raises:
            StoreRenewedError: nothing was written. The next call writes.
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

    Where the store's client outlasts its losses, so does the log: what it was about to do is done again in
    the store that was restarted, once machines have republished the journal there (`restoring.py`). The
    blocks of each incarnation of the store have keys of their own.

    Args:
        store: a client of its own, since its reads change how long it waits.
    """

    def __init__(self, store: RendezvousStore) -> None:
        self._store = store
        store.repeats = False  # several calls make one of these here
        self._lock = threading.Lock()
        self._of_thread = threading.local()  # where the blocks are, by the number of its connection
        # Guarded by the lock.
        self._incarnation: str | None = None  # of the store, as this log knows it
        self._written_in: str | None = None  # the incarnation of the last append
        self._tail = 0  # a number that is not after the first free one
        self._read_to = 0  # the number after the last block that was read
        # The first block, and when that was known. Written at once by each thread that reads.
        self._seen_first = (0, -math.inf)

    def append(self, text: str, name: str) -> None:
        """See :meth:`BlockLog.append`."""

        def act(at: str) -> None:
            with self._lock:
                before, self._written_in = self._written_in, at
            if before not in (None, at):
                raise StoreRenewedError("The rendezvous store was started anew.")
            self._append(at, text)

        self._settled(act)

    def _append(self, at: str, text: str) -> None:
        number = self._tail
        while True:
            found = self._store.compare_set(store_keys.journal_block(at, number), "", text).decode()
            first = self._number(store_keys.journal_first(at))
            if found == text and first <= number:
                break
            if found == text:  # all others have passed this number, and it was deleted
                self._store.delete_key(store_keys.journal_block(at, number))
            number = max(number + 1, first)
        self._passed(number)

    def read(self, number: int, timeout_s: float) -> str | bytes | None:
        """See :meth:`BlockLog.read`. While the store is lost, no block is there in time.

        Raises:
            FencedError: the store was restarted, and less was republished than was read here.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return self._settled(lambda at: self._read(at, number, max(0.0, deadline - time.monotonic())))
            except RendezvousLostError as error:
                if isinstance(error, NotRestoredError) or not self._store.patience_s or timeout_s <= 0:
                    raise
                if time.monotonic() > deadline:
                    return None

    def _read(self, at: str, number: int, timeout_s: float) -> str | bytes | None:
        keys = [store_keys.journal_block(at, number)]
        if time.monotonic() > self._seen_first[1] + _SURE_S:
            self._note_first(self._number(store_keys.journal_first(at)))
        self._check(number)
        if timeout_s <= 0 and not self._store.check(keys):
            self._note_first(self._number(store_keys.journal_first(at)))
            self._check(number)
            return None
        self._store.set_timeout(timedelta(seconds=timeout_s) if timeout_s > 0 else _ANSWER)
        try:
            text, first = self._store.multi_get([*keys, store_keys.journal_first(at)])
        except DistStoreError:
            return None
        self._note_first(int(first))
        self._check(number)
        self._passed(number)
        with self._lock:
            self._read_to = max(self._read_to, number + 1)
        return text

    def first(self) -> int:
        """See :meth:`BlockLog.first`."""
        return self._settled(lambda at: self._number(store_keys.journal_first(at)))

    def delete_before(self, number: int) -> None:
        """See :meth:`BlockLog.delete_before`. What a process that died has left is deleted, too."""

        def delete(at: str) -> None:
            self._raise_to(store_keys.journal_first(at), number)
            for old in range(self._number(store_keys.journal_lowest(at)), number):
                self._store.delete_key(store_keys.journal_block(at, old))
            self._raise_to(store_keys.journal_lowest(at), number)

        self._settled(delete)

    def snapshot(self) -> str | bytes | None:
        """See :meth:`BlockLog.snapshot`."""
        return self._settled(self._snapshot)

    def _snapshot(self, at: str) -> bytes | None:
        while number := self._number(store_keys.journal_snapshot(at)):
            found = self._store.compare_set(store_keys.journal_snapshot_text(at, number), _ABSENT, _ABSENT)
            if found != _ABSENT.encode():  # else a newer one has just replaced it
                return found
        return None

    def put_snapshot(self, text: str, number: int) -> None:
        """See :meth:`BlockLog.put_snapshot`."""

        def put(at: str) -> None:
            self._store.set(store_keys.journal_snapshot_text(at, number), text)
            before = self._raise_to(store_keys.journal_snapshot(at), number)
            if before != number:
                self._store.delete_key(store_keys.journal_snapshot_text(at, min(before, number)))

        self._settled(put)

    def _settled(self, act: Callable[[str], _Answer]) -> _Answer:
        """Do something in the store, all of it in one incarnation.

        Raises:
            RendezvousLostError: the store does not answer, within its client's patience.
        """
        while True:
            try:
                return act(self._here())
            except (DistError, RuntimeError) as error:
                if not self._store.patience_s:
                    raise RendezvousLostError(
                        f"The rendezvous store does not answer ({first_line(error)}). "
                        "Start it again and resume from the last checkpoint with --resume."
                    ) from error

    def _here(self) -> str:
        """The incarnation at the end of this thread's connection; empty for a store without incarnations."""
        number = self._store.connection_number
        known: tuple[int, str] | None = getattr(self._of_thread, "known", None)
        if known is not None and known[0] == number:
            return known[1]
        incarnation = incarnation_of(self._store)
        self._enter(incarnation)
        if self._store.connection_number == number:
            self._of_thread.known = number, incarnation
        return incarnation

    def _enter(self, incarnation: str) -> None:
        if incarnation == self._incarnation:
            return
        end = self._number(store_keys.journal_end(incarnation))
        with self._lock:
            if self._incarnation is not None and self._read_to > end:
                raise FencedError(
                    f"The rendezvous store was started anew, and the journal republished up to block {end}: "
                    f"this process has read up to block {self._read_to}, and its state is not theirs."
                )
            self._incarnation, self._tail, self._seen_first = incarnation, end, (0, -math.inf)

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


def republish(store: Store, incarnation: str, first: int, snapshot: str, blocks: Sequence[str]) -> None:
    """Write a journal into a store, where it counts once that has the incarnation.

    Args:
        store: a connection, on which the incarnation is to be set, too: what is set on one comes in order.
        incarnation: a new one.
        first: the number of the first block.
        snapshot: what was before it, as text; empty if nothing was.
        blocks: from the first on.
    """
    for number, text in enumerate(blocks, first):
        store.set(store_keys.journal_block(incarnation, number), text)
    if snapshot:
        store.set(store_keys.journal_snapshot_text(incarnation, first), snapshot)
        store.set(store_keys.journal_snapshot(incarnation), str(first))
    store.set(store_keys.journal_first(incarnation), str(first))
    store.set(store_keys.journal_lowest(incarnation), str(first))
    store.set(store_keys.journal_end(incarnation), str(first + len(blocks)))


def republished_to(store: Store, incarnation: str) -> int:
    """The number after the blocks that were republished in an incarnation; 0 in the first one."""
    return int(store.compare_set(store_keys.journal_end(incarnation), "", "0"))
