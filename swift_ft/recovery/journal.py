"""The journal: one totally ordered list of events in the rendezvous store, read by everybody.

Entry n is written by compare-and-set from absent, so two writers never share a place and no place stays
empty. Readers block in the store until the next entry is there: nobody polls. Each participant runs the pure
protocol over the entries, so all of them hold the same state at the same position.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta

from torch._C._distributed_c10d import Store
from torch.distributed import DistError

from swift_ft.errors import RendezvousLostError
from swift_ft.recovery.events import Entry, Event, event_from_dict, event_to_dict
from swift_ft.recovery.job_state import State
from swift_ft.recovery.protocol import step

__all__ = ["Follower", "Journal"]

_FOREVER = timedelta(days=365)


class Journal:
    """Appends to the journal and reads it.

    Args:
        connect: opens a client of the rendezvous store. Called twice: a client that blocks in a read cannot
            be used for a write meanwhile.
        by: the name under which this participant writes.
    """

    def __init__(self, connect: Callable[[], Store], *, by: str) -> None:
        self._by = by
        self._nonce = f"{socket.gethostname()}:{os.getpid()}"
        self._serial = itertools.count()
        self._writer = connect()
        self._reader = connect()
        self._reader.set_timeout(_FOREVER)
        self._lock = threading.Lock()
        self._tail = 0

    def append(self, event: Event) -> int:
        """Write an event behind the last one and return its position.

        Raises:
            RendezvousLostError: if the store does not answer.
        """
        entry = {
            **event_to_dict(event),
            "at": time.time(),
            "by": self._by,
            "nonce": f"{self._nonce}:{next(self._serial)}",
        }
        text = json.dumps(entry, separators=(",", ":"))
        with self._lock:
            try:
                while self._writer.compare_set(_key(self._tail), "", text).decode() != text:
                    self._tail += 1
            except (DistError, RuntimeError) as error:
                raise _lost(error) from error
            self._tail += 1
            return self._tail - 1

    def read(self, position: int) -> Entry:
        """Wait for the entry at a position.

        Raises:
            RendezvousLostError: if the store does not answer any more.
        """
        try:
            data = json.loads(self._reader.get(_key(position)))
        except (DistError, RuntimeError) as error:
            raise _lost(error) from error
        with self._lock:
            self._tail = max(self._tail, position + 1)
        return Entry(position, event_from_dict(data), data["at"], data["by"])

    def has(self, position: int) -> bool:
        """Whether there is an entry at a position."""
        try:
            with self._lock:
                return bool(self._writer.check([_key(position)]))
        except (DistError, RuntimeError) as error:
            raise _lost(error) from error


class Follower:
    """Keeps the state up to date with the journal, in a thread of its own.

    Args:
        journal: what to follow.
        on_change: called in the follower's thread after each entry that came after the start, with the state
            before and after it; with twice the same state when the journal is lost. Must return soon.
        on_entry: called in the follower's thread with each entry.
    """

    def __init__(
        self,
        journal: Journal,
        *,
        on_change: Callable[[State, State], None] | None = None,
        on_entry: Callable[[Entry], None] | None = None,
    ) -> None:
        self._journal = journal
        self._on_change = on_change
        self._on_entry = on_entry
        self._changed = threading.Condition()
        self._state = State()
        self._position = 0
        self._error: BaseException | None = None
        self._started = False
        self._catch_up()
        self._thread = threading.Thread(target=self._run, name="swift-journal", daemon=True)

    def start(self) -> None:
        """Begin to follow; until then the state is that of the construction."""
        self._started = True
        self._thread.start()

    @property
    def state(self) -> State:
        """The newest state.

        Raises:
            RendezvousLostError: if the journal cannot be followed any more.
        """
        if self._error is not None:
            raise RendezvousLostError(f"The journal cannot be followed: {self._error}") from self._error
        return self._state

    def tell(self, event: Event, timeout_s: float = 60.0) -> State:
        """Append an event, and wait until it is part of this follower's own state."""
        position = self._journal.append(event)
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or self._position > position, timeout_s)
        return self.state

    def wait_for(self, condition: Callable[[State], bool], timeout_s: float) -> State | None:
        """Wait until a condition on the state holds; None when the deadline passed first."""
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or condition(self._state), timeout_s)
        state = self.state
        return state if condition(state) else None

    def _catch_up(self) -> None:
        while self._journal.has(self._position):
            self._apply(self._journal.read(self._position))

    def _run(self) -> None:
        try:
            while True:
                self._apply(self._journal.read(self._position))
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()
            if self._on_change is not None:
                self._on_change(self._state, self._state)

    def _apply(self, entry: Entry) -> None:
        before = self._state
        after = step(before, entry.event)
        with self._changed:
            self._state = after
            self._position = entry.position + 1
            self._changed.notify_all()
        if self._on_entry is not None:
            self._on_entry(entry)
        if self._on_change is not None and self._started:
            self._on_change(before, after)


def _key(position: int) -> str:
    return f"journal/{position}"


def _lost(error: Exception) -> RendezvousLostError:
    return RendezvousLostError(
        f"The rendezvous store does not answer ({str(error).splitlines()[0]}). "
        "Start it again and resume from the last checkpoint with --resume."
    )
