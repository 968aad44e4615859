"""An agent's way to the journal: its head, another one if that is dead or slow, or the store itself.

Which machine is the head follows from the state (`recovery/heads.py`), and from what this agent has seen
itself: a head whose line ends, that is silent for a second, or that passes nothing on, is suspected and
passed over. The second one that fails is the last: then the agent goes to the store, until the suspicion
ends.

Before the job has formed there are no heads. A machine then goes through the one that it has met
(`coordination/meeting.py`), and until it has met that it reads no more than how the journal begins.

What was sent and did not come back in a block is sent again on the new way, in the same order. So each hop
sends an origin's events without a gap, from the first that may be missing.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from swift_ft.config import detection_timings as timings
from swift_ft.coordination.block_log import StoreRenewedError
from swift_ft.coordination.journal import Journal
from swift_ft.coordination.meeting import Met
from swift_ft.coordination.relay.feed import Feed, LineEndedError, NotHereError, SilentError
from swift_ft.coordination.relay.lines import Line
from swift_ft.coordination.relay.outgoing import Outgoing
from swift_ft.coordination.restoring import JournalCopy
from swift_ft.errors import RendezvousLostError
from swift_ft.recovery.blocks import Block, Stamped
from swift_ft.recovery.heads import FANOUT, upstream_of
from swift_ft.recovery.job_state import State

_logger = logging.getLogger(__name__)

_MOST_SUSPECTED = 2
"""More heads are not tried: a whole rack may be lost, and each of them may take a second."""


class Upstream:
    """Reads blocks and passes events on.

    Args:
        journal: in the store.
        connect: opens a line to a machine's relay, by its address; None in a job that has no heads.
        outgoing: what has not arrived yet.
        fanout: see :data:`swift_ft.recovery.heads.FANOUT`.
        silence_s: the silence after which a head is passed over.
        now: a monotonic clock, in seconds.
        meets: this machine is about to :meth:`meet` another one.
        copy: what this machine could republish of the journal; one of its own if None.

    Attributes:
        journal: in the store.
        copy: of what was read.
        switches: how often the way has changed.
    """

    def __init__(
        self,
        journal: Journal,
        connect: Callable[[str], Line] | None,
        outgoing: Outgoing,
        *,
        fanout: int = FANOUT,
        silence_s: float = timings.HEAD_SILENCE_S,
        now: Callable[[], float] = time.monotonic,
        meets: bool = False,
        copy: JournalCopy | None = None,
    ) -> None:
        self.journal = journal
        self.copy = copy or JournalCopy()
        self._connect = connect
        self._outgoing = outgoing
        self._fanout = fanout
        self._silence_s = silence_s
        self._now = now
        self._state = State()  # owner: the thread that reads, as of the next ones; others read them
        self._machine = ""
        self._suspected: dict[str, float] = {}  # and until when
        self._meeting = threading.Condition()
        self._meets = meets  # guarded by the condition
        self._met: Met | None = None  # through whom it goes until the job has formed
        self._sending = threading.Lock()
        self._has_way = not meets  # the thread that reads sets it, under the lock
        self._before_way: list[Stamped] = []  # what was to be sent before; guarded by the lock
        self.switches = 0  # how often the way has changed
        self._way: tuple[str, Feed] | None = (
            None  # None: the store. The thread that reads sets it, under the lock
        )

    # ------------------------------------------------------------------------------------- the way

    def look(self, state: State, machine: str) -> None:
        """Note what the state of the job is now, and this machine's name."""
        self._state, self._machine = state, machine
        if machine in state.membership.slots:
            self._met = None

    def meet(self, other: Met | None) -> None:
        """Go through a machine until the job has formed; None: to the store."""
        with self._meeting:
            self._met, self._meets = other, False
            self._meeting.notify_all()

    def _is_to_meet(self, timeout_s: float) -> bool:
        """Whether this machine still has to meet another one after so long."""
        with self._meeting:
            return not self._meeting.wait_for(lambda: not self._meets, timeout_s)

    @property
    def suspected(self) -> frozenset[str]:
        """Heads that are passed over now."""
        now = self._now()
        return frozenset(machine for machine, until in list(self._suspected.items()) if until > now)

    def _wanted(self) -> Met | None:
        if self._connect is None:
            return None
        suspected, slots = self.suspected, self._state.membership.slots
        if sum(machine in slots for machine in suspected) >= _MOST_SUSPECTED:
            return None
        head = upstream_of(self._state, self._machine, suspected, self._fanout)
        if head is not None:
            return Met(head, self._state.membership.addresses[head])
        met = self._met
        return met if met is not None and met.machine not in suspected else None

    def _choose(self) -> Feed | None:
        """The feed to read from, which may be a new one; None for the store."""
        while True:
            wanted = self._wanted()
            if self._has_way and (wanted.machine if wanted else None) == self.head:
                break
            if wanted is None:
                self._switch(None)
                continue
            try:
                self._switch((wanted.machine, self._open(wanted.address)))
            except OSError as error:
                self._suspect(wanted.machine, str(error) or type(error).__name__)
        return self._way[1] if self._way else None

    def _open(self, address: str) -> Feed:
        assert self._connect is not None
        return Feed(self._connect(address), self._machine, silence_s=self._silence_s, now=self._now)

    def _switch(self, way: tuple[str, Feed] | None) -> None:
        """Go another way from now on, and send there what may not have arrived on the one before."""
        with self._sending:
            missing = self._outgoing.all() if self._has_way else tuple(self._before_way)
            if missing and way is not None:
                way[1].append(missing)
            before, self._way = self._way, way
            self._has_way = True
            self.switches += 1
            if before is not None:
                before[1].close()
            if missing and way is None:
                with contextlib.suppress(RendezvousLostError):  # they are repeated later
                    self._write(missing)
        through = f"through {way[0]}" if way else "in the store"
        _logger.debug("reads the journal %s", through, extra={"event": "head_changed"})

    def _suspect(self, machine: str, why: str) -> None:
        self._suspected[machine] = self._now() + timings.SUSPECTED_FOR_S
        _logger.debug("passes over %s: %s", machine, why, extra={"event": "head_suspected"})

    def check(self) -> None:
        """Pass over a head that lives, and passes nothing on. Any thread may call it, now and then."""
        way = self._way
        if way is not None and not way[1].waits and self._outgoing.is_overdue():
            self._suspect(way[0], "it passes nothing on")
            way[1].close()  # which wakes the thread that reads

    def repeat(self) -> None:
        """Write again what the store has not taken. Blocks for as long as the store is silent.

        Raises:
            RendezvousLostError: if the store does not answer.
        """
        if self._way is None and self._outgoing.is_overdue():
            with self._sending:
                if self._way is None and (missing := self._outgoing.all()):
                    self._write(missing)

    # ---------------------------------------------------------------------------------- the traffic

    def read(self, number: int, timeout_s: float) -> str | None:
        """Wait for a block. None if it is not there in time, or earlier; 0 does not wait.

        Raises:
            BlockGoneError: if it was deleted.
            RendezvousLostError: if the store does not answer.
            FencedError: the store was restarted without all that this machine has read.
        """
        deadline = self._now() + timeout_s
        while True:
            epoch = self.copy.epoch(max(0.0, deadline - self._now()))
            if epoch is None:  # the store is being restored
                return None
            found = self._read(number, deadline)
            text = found.decode() if isinstance(found, bytes) else found
            if text is None or self.copy.take(number, text, epoch):
                return text

    def _read(self, number: int, deadline: float) -> str | bytes | None:
        if self._meets:
            left_s = max(0.0, deadline - self._now())
            if number == 0:
                return self.journal.log.read(number, left_s)
            if self._is_to_meet(left_s):
                return None
        while True:
            feed = self._choose()
            left_s = max(0.0, deadline - self._now())
            if feed is None:
                return self.journal.log.read(number, min(left_s, timings.HEAD_LOOK_S))
            try:
                return feed.next(number, left_s)
            except NotHereError:
                return self.journal.log.read(number, min(left_s, self._silence_s))
            except (LineEndedError, SilentError) as error:
                if self._way is not None and self._way[0] not in self.suspected:
                    self._suspect(self._way[0], str(error))

    def pass_on(self, block: Block) -> None:
        """Send events towards the journal. They arrive, unless the store is lost.

        Raises:
            RendezvousLostError: if this machine writes to the store, and it does not answer.
        """
        with self._sending:
            self._outgoing.add(block)
            if not self._has_way:
                self._before_way += block
                return
            if self._way is None:
                self._write(block)
            else:
                with contextlib.suppress(OSError):  # the thread that reads sees it, and sends all again
                    self._way[1].append(block)

    def send(self, message: Mapping[str, Any]) -> bool:
        """Send to the head what may be lost. False if this machine goes to the store."""
        way = self._way
        if way is None:
            return False
        with contextlib.suppress(OSError):  # what is lost is sent again on the next way
            way[1].try_send(dict(message))
        return True

    def _write(self, block: Block) -> None:
        """Events have arrived once they are read again: until then a store that is lost loses them."""
        while block:
            try:
                self.journal.pass_on(block)
            except StoreRenewedError:
                block = self._outgoing.all()
            else:
                return

    @property
    def head(self) -> str | None:
        """The machine through which this one reads now; None for the store."""
        return self._way[0] if self._way else None

    def waits(self) -> bool:
        """Whether what this machine has passed on takes unusually long."""
        since = self._outgoing.waits_since()
        return since is not None and self._now() - since > self._silence_s / 2
