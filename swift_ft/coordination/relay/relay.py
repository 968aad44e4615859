"""An agent's relay: its workers, and as a head other agents, read and write the journal through it.

Events go up merged (`merging.py`), blocks come down as they are. The agent's own follower reads through the
relay, too, so each block is fetched once for the whole machine, and is pushed on before the agent acts on
it.

Threads: one for each line that is served, which takes what comes up; the agent's journal thread, which
pushes what comes down; one that writes, one that gives signs of life, and one for notes.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.distributed import DistError

from swift_ft.config import detection_timings as timings
from swift_ft.coordination.compaction import may_have_snapshot
from swift_ft.coordination.kept_keys import KeptKeys
from swift_ft.coordination.meeting import Met
from swift_ft.coordination.relay.lines import Line
from swift_ft.coordination.relay.merging import Merging
from swift_ft.coordination.relay.notes import Notes
from swift_ft.coordination.relay.outgoing import Outgoing, Stamper
from swift_ft.coordination.relay.subscriber import Subscriber
from swift_ft.coordination.relay.upstream import Upstream
from swift_ft.errors import FencedError, RendezvousLostError, SwiftError, first_line
from swift_ft.network.messages import TEXT, encoded
from swift_ft.recovery.blocks import Block, Stamped, block_from_text
from swift_ft.recovery.events import Event
from swift_ft.recovery.heads import FANOUT, served_by
from swift_ft.recovery.job_state import State
from swift_ft.recovery.snapshot import JournalSnapshot

_logger = logging.getLogger(__name__)

NOTES_S = 1.0

_REPEAT_S = 1.0
_LONG_S = 3600.0


_MOST_BLOCKS = 4096
_MOST_CHARACTERS = 16 << 20


class Relay:
    """An :class:`EventLog` for its own agent, and for those whose lines it serves.

    Args:
        upstream: the way to the journal.
        outgoing: what is on this way; the same that the upstream has.
        by: the agent, in words.
        append_s: how long an event of the agent itself may take to arrive.
        fanout: see :data:`swift_ft.recovery.heads.FANOUT`.
        write_notes: writes into the store what is known of the groups of some slots.
        kept: takes what workers have set in the store, and machines that this one is the holder for.
        now: a monotonic clock, in seconds.
    """

    def __init__(
        self,
        upstream: Upstream,
        outgoing: Outgoing,
        *,
        by: str,
        append_s: float,
        fanout: int = FANOUT,
        write_notes: Callable[[Notes, Iterable[int]], None] = lambda *_: None,
        kept: KeptKeys | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._notes = Notes()
        self._write_notes = write_notes
        self._kept = kept or KeptKeys()
        self._upstream = upstream
        self._outgoing = outgoing
        self._stamper = Stamper(by)
        self._append_s = append_s
        self._fanout = fanout
        self._now = now
        self._changed = threading.Condition()
        # Guarded by the condition.
        self._merging = Merging(now, fanout)
        self._recent = RecentBlocks()
        self._subscribers: dict[Subscriber, int] = {}  # and the number of the next block that each gets
        self._state, self._slots = State(), range(0)
        self._machine = ""
        # Events that were read, from the first one on; None if a snapshot stands for some. Owner: the thread
        # that reads.
        self._events_read: int | None = 0
        self._closed = False
        self._stopped = threading.Event()
        for target in (self._write, self._give_signs_of_life, self._pass_on_notes):
            threading.Thread(target=target, name=f"swift-relay{target.__name__}", daemon=True).start()

    # ------------------------------------------------------------------------- the agent's own journal

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
            with self._changed:
                self._merging.hold(self._state, block, is_last=self._upstream.head is None)
                self._changed.notify_all()
        return block[-1]

    def note(self, key: str, facts: dict[str, Any]) -> None:
        """See :meth:`EventLog.note`."""
        if (slot := self._state.slot_of(self._machine)) is not None:
            self._notes.put_new(slot, key, facts)

    def read(self, number: int, timeout_s: float) -> Block | None:
        """See :meth:`EventLog.read`. What was read is pushed to those that follow."""
        text = self._upstream.read(number, timeout_s)
        if text is None:
            return None
        self._push(number, text)
        block = block_from_text(text)
        if self._events_read is not None:
            self._events_read += len(block)
        self._outgoing.arrived(block)
        return block

    def snapshot(self) -> JournalSnapshot | None:
        """See :meth:`EventLog.snapshot`. It comes from the store: those that follow read their own."""
        snapshot = self._upstream.journal.snapshot()
        if snapshot is not None:
            self._events_read = None
            self._upstream.copy.begin_from(snapshot)
            self._outgoing.covered(snapshot)
        return snapshot

    def give_up(self, error: BaseException) -> None:
        """See :meth:`EventLog.give_up`."""
        self._outgoing.give_up(error)

    def meet(self, other: Met | None) -> None:
        """See :meth:`Upstream.meet`."""
        self._upstream.meet(other)

    def look(self, state: State, machine: str) -> None:
        """Note what the state of the job is now, and under which name this machine takes part in it."""
        self._upstream.look(state, machine)
        with self._changed:
            if state.membership is not self._state.membership or machine != self._machine:
                self._slots = served_by(state, machine, self._upstream.suspected, self._fanout)
            self._state, self._machine = state, machine
            if self._due_in() <= 0:
                self._changed.notify_all()

    # -------------------------------------------------------------------------------- lines to others

    def serve(self, line: Line) -> None:
        """Serve one that follows, until it closes its line. Blocks."""
        subscriber = Subscriber(line)
        try:
            while (message := _receive(line)) is not None:
                self._take(subscriber, message)
        except (OSError, ValueError, KeyError, TypeError, SwiftError) as error:
            if not self._closed:
                _logger.warning(
                    "a line of the relay ends: %s", first_line(error), extra={"event": "relay_line_broken"}
                )
        finally:
            with self._changed:
                self._subscribers.pop(subscriber, None)
            subscriber.close()

    def _take(self, subscriber: Subscriber, message: dict[str, Any]) -> None:
        if "append" in message:
            self._pass_on(block_from_text(message[TEXT]))
        if "follow" in message:
            self._subscribe(subscriber, int(message["follow"]))
        if "note" in message and (slot := self._state.slot_of(self._machine)) is not None:
            self._notes.put(slot, message["note"])
        for slot, facts in message.get("notes", {}).items():
            self._notes.put(int(slot), facts)
        if "snapshot" in message:
            subscriber.push(encoded({"snapshot": self._may_have_snapshot()}))
        for key, value in message.get("kept", {}).items():
            self._kept.put(key, value)
        if "hello" in message:
            subscriber.machine = str(message["hello"])
        if "hold" in message:
            self._kept.hold(subscriber.machine, message["hold"], anew=message.get("anew", False))
        if "release" in message:
            self._kept.release(subscriber.machine)

    def _subscribe(self, subscriber: Subscriber, number: int) -> None:
        with self._changed:
            recent = self._recent
            for at, text in recent.since(number) if number >= recent.start else ():
                subscriber.push(encoded({"block": at, TEXT: text}))
            subscriber.push(encoded({"end": recent.end, "from": recent.start}))
            self._subscribers[subscriber] = max(number, recent.end)

    def _may_have_snapshot(self) -> bool:
        """Whether one that begins to follow has to look for a snapshot, and cannot begin at the beginning."""
        events = self._events_read
        return events is None or may_have_snapshot(self._state, events)

    def _push(self, number: int, text: str) -> None:
        with self._changed:
            recent = self._recent
            skipped = number > recent.end  # this relay went on from a snapshot
            if not recent.add(number, text):
                return
            if skipped:
                message = encoded({"end": number, "from": number})
                for subscriber, wanted in self._subscribers.items():
                    if wanted < number:  # it will get none of those: it must not wait for them
                        subscriber.push(message)
            message = encoded({"block": number, TEXT: text})
            for subscriber, wanted in self._subscribers.items():
                if wanted <= number:
                    subscriber.push(message)

    # ------------------------------------------------------------------------------- events on the way up

    def _pass_on(self, block: Block) -> None:
        """Take events from below."""
        with self._changed:
            fresh = (s for s in block if s not in self._merging and s not in self._outgoing)
            self._merging.hold(self._state, fresh, is_last=self._upstream.head is None)
            self._changed.notify_all()

    def _due_in(self) -> float:
        return self._merging.due_at(self._state, self._slots) - self._now()

    def _write(self) -> None:
        """In a thread of its own, the only one that writes: send a block whenever one is due.

        A client of the store has a connection for each thread, which takes milliseconds to open.
        """
        while not self._closed:
            with self._changed:
                due_s = self._due_in()
                if self._outgoing.waits_since() is not None:
                    due_s = min(due_s, _REPEAT_S)
                if due_s > 0 and not self._closed:
                    self._changed.wait(None if math.isinf(due_s) else due_s)
                block = self._merging.take() if self._due_in() <= 0 else ()
            try:
                if block:
                    self._upstream.pass_on(block)
                else:
                    self._upstream.repeat()
            except RendezvousLostError as error:  # what was not written is repeated
                self._outgoing.write_failed(error)
            except FencedError as error:  # the journal thread sees it, too
                self._outgoing.give_up(error)

    def _pass_on_notes(self) -> None:
        """In a thread of its own, since it may wait for the store: pass on what has changed."""
        switches = 0
        while not self._stopped.wait(NOTES_S):
            if switches != self._upstream.switches:
                switches = self._upstream.switches
                self._notes.all_are_new()
            if not (changed := self._notes.take()):
                continue
            if not self._upstream.send({"notes": changed}):
                try:
                    self._write_notes(self._notes, changed)
                except (DistError, RuntimeError, RendezvousLostError, FencedError) as error:
                    # The journal thread sees the same, and speaks of it.
                    _logger.debug("notes are not written: %s", first_line(error))

    def _give_signs_of_life(self) -> None:
        """In a thread of its own, which waits for nothing: tell all that follow that this relay lives."""
        while not self._closed:
            with self._changed:
                subscribers = list(self._subscribers)
            message = encoded({"beat": True, "waits": self._upstream.waits()})
            for subscriber in subscribers:
                subscriber.push(message)
            self._upstream.check()
            others_follow = any(s.machine for s in subscribers)
            self._stopped.wait(timings.RELAY_BEAT_S if others_follow else timings.WORKERS_BEAT_S)

    def close(self) -> None:
        """Serve no line any more."""
        with self._changed:
            self._closed = True
            self._stopped.set()
            subscribers = list(self._subscribers)
            self._changed.notify_all()
        for subscriber in subscribers:
            subscriber.close()


def _receive(line: Line) -> dict[str, Any] | None:
    while True:
        try:
            return line.receive(_LONG_S)
        except TimeoutError:
            continue


class RecentBlocks:
    """Neighbouring blocks, up to the newest. The relay's lock guards it.

    Attributes:
        end: the number after the newest block.
    """

    def __init__(self) -> None:
        self._texts: deque[str] = deque()
        self._characters = 0
        self.end = 0

    @property
    def start(self) -> int:
        """The number of the oldest block that is here."""
        return self.end - len(self._texts)

    def add(self, number: int, text: str) -> bool:
        """Add the next block. False if it is here already. After a gap, what was before it is forgotten."""
        if self.start <= number < self.end:
            return False
        if number != self.end:
            self._texts.clear()
            self._characters = 0
        self.end = number + 1
        self._texts.append(text)
        self._characters += len(text)
        while len(self._texts) > _MOST_BLOCKS or self._characters > _MOST_CHARACTERS:
            self._characters -= len(self._texts.popleft())
        return True

    def since(self, number: int) -> Iterator[tuple[int, str]]:
        """The blocks from a number on, as far as they are here."""
        start = self.start
        return ((start + i, text) for i, text in enumerate(self._texts) if start + i >= number)
