"""Follows the journal and keeps the state of the job up to date."""

from __future__ import annotations

import threading
from collections.abc import Callable

from swift_ft.coordination.journal import Journal
from swift_ft.errors import RendezvousLostError
from swift_ft.recovery.events import Entry, Event
from swift_ft.recovery.job_state import State
from swift_ft.recovery.protocol import step
from swift_ft.waits import waiting

__all__ = ["Follower"]


class Follower:
    """Keeps the state up to date with the journal, in a thread of its own: the journal thread.

    Args:
        journal: the journal to follow.
        on_change: called in the journal thread after each entry that arrives after :meth:`start`, with the
            state before and after it. If the journal is lost, it is called with the same state twice. It
            must return soon.
        on_entry: called in the journal thread with each entry, before the state shows it.
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
        # Owner of these three: the journal thread, once it runs. All threads read them.
        self._state = State()
        self._position = 0
        self._error: BaseException | None = None
        self._started = False  # owner: the constructing thread; set before the journal thread starts
        self._catch_up()
        self._thread = threading.Thread(target=self._run, name="swift-journal", daemon=True)

    def start(self) -> None:
        """Begin to follow. Until then the state is that of the construction."""
        self._started = True
        self._thread.start()

    @property
    def state(self) -> State:
        """The newest state.

        Raises:
            RendezvousLostError: if the journal cannot be followed any more.
        """
        if self._error is not None:
            lost = isinstance(self._error, RendezvousLostError)
            text = str(self._error) if lost else f"The journal cannot be followed: {self._error}"
            raise RendezvousLostError(text) from self._error
        return self._state

    def append(self, event: Event, timeout_s: float = 60.0) -> State:
        """Append an event, and wait until it is part of this follower's own state."""
        position = self._journal.append(event)
        with waiting("the rendezvous store to return an entry of the journal", timeout_s), self._changed:
            self._changed.wait_for(lambda: self._error is not None or self._position > position, timeout_s)
        return self.state

    def wait_for(self, condition: Callable[[State], bool], timeout_s: float) -> State | None:
        """Wait until a condition on the state holds. None if the deadline passes first."""
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or condition(self._state), timeout_s)
        state = self.state
        return state if condition(state) else None

    def has_ended(self, timeout_s: float) -> bool:
        """Wait for the end of the journal thread, which ends with its connection."""
        with waiting("the end of the journal thread", timeout_s):
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

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
        if self._on_entry is not None:
            self._on_entry(entry)
        with self._changed:
            self._state = after
            self._position = entry.position + 1
            self._changed.notify_all()
        if self._on_change is not None and self._started:
            self._on_change(before, after)
