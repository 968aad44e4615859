"""Follows the journal and keeps the state of the job up to date."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from swift_ft.coordination.journal import EventLog
from swift_ft.coordination.journal_reader import JournalReader
from swift_ft.errors import FencedError, RendezvousLostError
from swift_ft.observe.waits import waiting
from swift_ft.recovery.blocks import Sequencer
from swift_ft.recovery.entries import Entry
from swift_ft.recovery.events import Event
from swift_ft.recovery.job_state import State
from swift_ft.recovery.protocol import step_all
from swift_ft.recovery.snapshot import JournalSnapshot

_ASK_AGAIN_S = 3600.0
"""For so long one wait for the next block may last. A process that was frozen may miss that it is gone."""


class Follower:
    """Keeps the state up to date with the journal, in a thread of its own: the journal thread.

    Args:
        journal: the journal to follow.
        on_change: called in the journal thread after each block that arrives after :meth:`start`, with the
            state before and after it. If the journal is lost, it is called with the same state twice. It
            must return soon.
        on_entries: called in the journal thread with those of each block, before the state shows them.
        on_snapshot: called in the journal thread with a snapshot that stands for entries which are not read.
        on_block: called in the journal thread after each block, with where the journal stands.
    """

    def __init__(
        self,
        journal: EventLog,
        *,
        on_change: Callable[[State, State], None] | None = None,
        on_entries: Callable[[Sequence[Entry]], None] | None = None,
        on_snapshot: Callable[[JournalSnapshot], None] | None = None,
        on_block: Callable[[JournalSnapshot], None] | None = None,
    ) -> None:
        self._journal = journal
        self._reader = JournalReader(journal, self._begin_from)
        self._on_snapshot = on_snapshot
        self._on_block = on_block
        self._on_change = on_change
        self._on_entries = on_entries
        self._changed = threading.Condition()
        # Owner of these three: the journal thread, once it runs. All threads read them.
        self._state = State()
        self._applied = Sequencer()
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
            FencedError: if this process has followed another one than the others go on with.
        """
        if isinstance(self._error, FencedError):
            raise FencedError(str(self._error)) from self._error
        if self._error is not None:
            lost = isinstance(self._error, RendezvousLostError)
            text = str(self._error) if lost else f"The journal cannot be followed: {self._error}"
            raise RendezvousLostError(text) from self._error
        return self._state

    def append(self, event: Event, timeout_s: float = 60.0) -> State:
        """Append an event, and wait until it is part of this follower's own state."""
        stamped = self._journal.append(event)
        with waiting("the rendezvous store to return an entry of the journal", timeout_s), self._changed:
            self._changed.wait_for(lambda: self._error is not None or self._applied.has(stamped), timeout_s)
        return self.state

    def post(self, event: Event) -> None:
        """Have an event written, before all that is appended later, without waiting for it."""
        self._journal.post(event)

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
        while (entries := self._reader.next(0.0)) is not None:
            self._apply(entries)

    def _run(self) -> None:
        try:
            while True:
                if (entries := self._reader.next(_ASK_AGAIN_S)) is not None:
                    self._apply(entries)
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()
            self._journal.give_up(error)
            if self._on_change is not None:
                self._on_change(self._state, self._state)

    def _begin_from(self, snapshot: JournalSnapshot) -> None:
        before = self._state
        if self._on_snapshot is not None:
            self._on_snapshot(snapshot)
        self._advance(before, snapshot.state, changed=True)

    def _apply(self, entries: Sequence[Entry]) -> None:
        before = self._state
        after = after_entries(before, entries)
        if entries and self._on_entries is not None:
            self._on_entries(entries)
        self._advance(before, after, changed=bool(entries))

    def _advance(self, before: State, after: State, *, changed: bool) -> None:
        with self._changed:
            self._state = after
            self._applied = self._reader.sequencer
            self._changed.notify_all()
        if changed and self._on_change is not None and self._started:
            self._on_change(before, after)
        if self._on_block is not None:
            self._on_block(JournalSnapshot(after, self._reader.sequencer, self._reader.number))


def after_entries(state: State, entries: Sequence[Entry]) -> State:
    """The state after some entries of the journal."""
    return step_all(state, (entry.event for entry in entries))
