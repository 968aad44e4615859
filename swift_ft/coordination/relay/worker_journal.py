"""A worker's journal: its agent's relay.

If the agent is silent, because it was stopped, the worker reads and writes the store itself. It may have
been replaced in the meantime, and must learn of that. If the agent is gone, the worker ends.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any

from swift_ft.config import detection_timings as timings
from swift_ft.coordination.block_log import StoreRenewedError
from swift_ft.coordination.journal import EventLog, Journal
from swift_ft.coordination.relay.feed import Feed, LineEndedError, NotHereError, SilentError
from swift_ft.coordination.relay.lines import Line, take_line_of_worker
from swift_ft.coordination.relay.outgoing import Outgoing, Stamper
from swift_ft.errors import FencedError, RendezvousLostError
from swift_ft.recovery.blocks import Block, Stamped, block_from_text
from swift_ft.recovery.events import Event
from swift_ft.recovery.snapshot import JournalSnapshot


def journal_of_worker(journal: Callable[[], Journal], *, by: str, append_s: float) -> EventLog:
    """The journal of this process: over its line to its agent's relay, or where it has none, in the store.

    Args:
        journal: opens the journal in the store.
        by: the worker, in words.
        append_s: how long an event may take to arrive.
    """
    line = take_line_of_worker()
    if line is None:
        return journal()
    # As the channel to the agent does: nothing is cleaned up, nothing more is sent.
    return WorkerJournal(line, journal, by=by, append_s=append_s, on_agent_lost=lambda: os._exit(1))


class WorkerJournal:
    """An :class:`EventLog` over the line to the agent.

    Args:
        line: to the agent's relay.
        journal: opens the journal in the store; it is called if it is needed, and once.
        by: the worker, in words.
        on_agent_lost: called in the thread that reads when the line ends; does not return.
        append_s: how long an event may take to arrive.
    """

    def __init__(
        self,
        line: Line,
        journal: Callable[[], Journal],
        *,
        by: str,
        append_s: float,
        on_agent_lost: Callable[[], None],
        silence_s: float = timings.AGENT_SILENCE_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._feed = Feed(line, "", silence_s=silence_s, now=now)
        self._open = journal
        self._on_agent_lost = on_agent_lost
        self._append_s = append_s
        self._now = now
        # Owner of these two: the thread that reads.
        self._journal: Journal | None = None
        self._unshared: tuple[int, str | bytes] | None = None  # the last block, if the agent did not send it
        self._outgoing = Outgoing(now)
        self._stamper = Stamper(by)

    def append(self, *events: Event) -> Stamped:
        """See :meth:`EventLog.append`."""
        last = self.post(*events)
        self._outgoing.confirm(last, self._append_s)
        return last

    def post(self, *events: Event) -> Stamped:
        """See :meth:`EventLog.post`."""
        with self._stamper.lock:
            block = self._stamper.stamp(events)
            self._outgoing.add(block)
            with contextlib.suppress(OSError):  # the thread that reads sees that the agent is gone
                self._feed.append(block)
        return block[-1]

    def note(self, key: str, facts: dict[str, Any]) -> None:
        """See :meth:`EventLog.note`."""
        with contextlib.suppress(OSError):  # the thread that reads sees that the agent is gone
            self._feed.try_send({"note": {key: facts}})

    def keep(self, key: str, value: str | None) -> None:
        """Let the agent keep what this worker has set in the store (`coordination/kept_keys.py`)."""
        with contextlib.suppress(OSError):  # the thread that reads sees that the agent is gone
            self._feed.keep(key, value)

    def read(self, number: int, timeout_s: float) -> Block | None:
        """See :meth:`EventLog.read`."""
        text = self._read(number, timeout_s)
        if text is None:
            return None
        block = block_from_text(text)
        self._outgoing.arrived(block)
        return block

    def snapshot(self) -> JournalSnapshot | None:
        """See :meth:`EventLog.snapshot`. It comes from the store, as blocks do that the agent has no more.

        A job that has just formed has none, which its agent knows: else each worker asked the store.
        """
        with contextlib.suppress(SilentError, LineEndedError):  # the next read sees the same
            if not self._feed.begins_at_snapshot():
                return None
        snapshot = self._store().snapshot()
        if snapshot is not None:
            self._outgoing.covered(snapshot)
        return snapshot

    def give_up(self, error: BaseException) -> None:
        """See :meth:`EventLog.give_up`."""
        self._outgoing.give_up(error)

    def _read(self, number: int, timeout_s: float) -> str | bytes | None:
        deadline = self._now() + timeout_s
        while True:
            left_s = max(0.0, deadline - self._now())
            try:
                return self._from_agent(number, left_s)
            except NotHereError:
                self._unshared = None  # this log itself knows what it has read
                return self._store().log.read(number, min(left_s, timings.STORE_GLANCE_S))
            except SilentError:
                journal = self._store()
                if missing := self._outgoing.all():
                    with contextlib.suppress(StoreRenewedError):  # they are still here in the next round
                        journal.pass_on(missing)
                text = journal.log.read(number, min(left_s, timings.STORE_GLANCE_S))
                if text is not None:
                    self._unshared = number, text
                if text is not None or left_s <= 0:
                    return text
            except LineEndedError as error:
                self._on_agent_lost()
                raise RendezvousLostError("The agent of this machine is gone.") from error

    def _from_agent(self, number: int, timeout_s: float) -> str | None:
        if self._unshared is not None:
            before, text = self._unshared
            theirs = self._feed.next(before, timeout_s)
            if theirs is None:
                return None
            if theirs.encode() != (text if isinstance(text, bytes) else text.encode()):
                raise FencedError(
                    f"The rendezvous store was started anew without block {before} of the journal, which "
                    "this worker has read while its agent was silent: its state is not that of the others."
                )
            self._unshared = None
        return self._feed.next(number, timeout_s)

    def _store(self) -> Journal:
        if self._journal is None:
            self._journal = self._open()
        return self._journal
