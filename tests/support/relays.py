"""Relays of several machines in one process, over a log of blocks in memory."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from swift_ft.coordination.block_log import BlockGoneError
from swift_ft.coordination.follower import Follower
from swift_ft.coordination.journal import Journal
from swift_ft.coordination.meeting import Met
from swift_ft.coordination.relay.lines import Line, LocalLine, local_pair
from swift_ft.coordination.relay.notes import Facts
from swift_ft.coordination.relay.outgoing import Outgoing
from swift_ft.coordination.relay.relay import Relay
from swift_ft.coordination.relay.upstream import Upstream
from swift_ft.coordination.relay.worker_journal import WorkerJournal
from swift_ft.errors import FencedError
from swift_ft.recovery import events as ev
from swift_ft.recovery.blocks import Block, Sequencer, block_from_text
from swift_ft.recovery.heads import met_by
from swift_ft.recovery.job_state import State
from swift_ft.recovery.protocol import step
from swift_ft.recovery.snapshot import JournalSnapshot, snapshot_to_text


class MemoryLog:
    """A :class:`BlockLog` in memory, which counts what is asked of it."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.reads = 0
        self.stalled = threading.Event()
        self._deleted = 0
        self._snapshot: str | None = None
        self._changed = threading.Condition()
        self._closed = False

    def append(self, text: str, name: str) -> None:
        """See :meth:`BlockLog.append`."""
        with self._changed:
            self.texts.append(text)
            self._changed.notify_all()

    def read(self, number: int, timeout_s: float) -> str | None:
        """See :meth:`BlockLog.read`."""
        with self._changed:
            self.reads += 1
            if number < self._deleted:
                raise BlockGoneError(f"block {number}")
            self._changed.wait_for(lambda: self._closed or len(self.texts) > number, timeout_s)
            if self._closed:
                raise FencedError("the test is over")
            return self.texts[number] if len(self.texts) > number else None

    def close(self) -> None:
        """End all that read it."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def first(self) -> int:
        """See :meth:`BlockLog.first`."""
        return self._deleted

    def delete_before(self, number: int) -> None:
        """See :meth:`BlockLog.delete_before`."""
        self._deleted = number

    def snapshot(self) -> str | None:
        """See :meth:`BlockLog.snapshot`."""
        return self._snapshot

    def put_snapshot(self, text: str, number: int) -> None:
        """See :meth:`BlockLog.put_snapshot`."""
        self._snapshot = text

    def compact(self) -> None:
        """Keep a snapshot of all that was written, and delete it."""
        state, sequencer, blocks = State(), Sequencer(), self.blocks()
        for block in blocks:
            sequencer, entries = sequencer.admit_all(block)
            for entry in entries:
                state = step(state, entry.event)
        self.put_snapshot(snapshot_to_text(JournalSnapshot(state, sequencer, len(blocks))), len(blocks))
        self.delete_before(len(blocks))

    def blocks(self) -> list[Block]:
        """All that was written."""
        return [block_from_text(text) for text in list(self.texts)]


@dataclass
class RelayedMachine:
    """One machine's relay, its agent's follower, and its workers' journals.

    Attributes:
        meets: it reads only how the journal begins, until it has met another machine.
    """

    job: RelayedJob
    name: str
    meets: bool = False
    relay: Relay = field(init=False)
    upstream: Upstream = field(init=False)
    follower: Follower = field(init=False)
    workers: list[Follower] = field(default_factory=list)
    journals: list[WorkerJournal] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    is_dead: bool = False

    def __post_init__(self) -> None:
        job, outgoing = self.job, Outgoing()
        self.upstream = Upstream(
            Journal(job.log, by=self.name),
            job.connect,
            outgoing,
            fanout=job.fanout,
            silence_s=job.silence_s,
            meets=self.meets,
        )
        self.relay = Relay(
            self.upstream,
            outgoing,
            by=self.name,
            append_s=30.0,
            fanout=job.fanout,
            write_notes=lambda notes, slots: job.written.append((self.name, notes.of(sorted(slots)))),
        )
        self.follower = Follower(self.relay, on_change=lambda _, state: self.relay.look(state, self.name))
        self.relay.look(self.follower.state, self.name)
        self.follower.start()

    def serve(self, end: socket.socket) -> None:
        """Serve a line in a thread."""
        line = LocalLine(end)
        self.lines.append(line)
        if self.is_dead:  # since the other end was let in, and closed all lines before this one
            line.close()
        threading.Thread(target=self.relay.serve, args=(line,), daemon=True).start()

    def start_worker(self, name: str) -> Follower:
        """A worker's follower, over a line to this machine."""
        ours, theirs = local_pair()
        self.serve(ours)
        journal = WorkerJournal(
            self.job.line(theirs),
            lambda: Journal(self.job.log, by=name),
            by=name,
            append_s=30.0,
            on_agent_lost=lambda: None,
        )
        follower = Follower(journal, on_change=lambda *_: None)
        follower.start()
        self.workers.append(follower)
        self.journals.append(journal)
        return follower

    def kill(self) -> None:
        """End all lines at once, as when the agent's process dies."""
        self.is_dead = True
        self.relay.close()
        for line in self.lines:
            line.close()


@dataclass
class RelayedJob:
    """Machines whose relays follow each other.

    Attributes:
        written: which machine has written which notes into the store.
    """

    fanout: int = 2
    silence_s: float = 1.0
    log: MemoryLog = field(default_factory=MemoryLog)
    machines: dict[str, RelayedMachine] = field(default_factory=dict)
    written: list[tuple[str, Facts]] = field(default_factory=list)
    _lines: list[Line] = field(default_factory=list)
    _is_closed: bool = False

    def line(self, end: socket.socket) -> Line:
        """The line of one that follows a relay, until the job is closed."""
        line = LocalLine(end)
        self._lines.append(line)
        if self._is_closed:  # by another thread, which did not see this line
            line.close()
        return line

    def connect(self, address: str) -> Line:
        """A line to a machine's relay."""
        machine = self.machines[address]
        if machine.is_dead:
            raise ConnectionRefusedError(address)
        ours, theirs = local_pair()
        machine.serve(theirs)
        return self.line(ours)

    def add(self, name: str) -> RelayedMachine:
        """One more machine, whose address is its name. It joins the job."""
        machine = self.machines[name] = RelayedMachine(self, name)
        machine.follower.append(ev.MachineJoined(machine=name, address=name))
        return machine

    def add_at_once(self, names: Sequence[str]) -> None:
        """Machines that take tickets in this order, meet, and have joined when this returns."""
        for name in names:
            self.machines[name] = RelayedMachine(self, name, meets=True)
        with ThreadPoolExecutor(len(names)) as pool:
            list(pool.map(self._meet_and_join, range(len(names)), names))

    def _meet_and_join(self, ticket: int, name: str) -> None:
        above, machine = met_by(ticket, self.fanout), self.machines[name]
        other = None if above is None else list(self.machines)[above]
        machine.relay.meet(None if other is None else Met(other, other))
        machine.follower.append(ev.MachineJoined(machine=name, address=name))

    def close(self) -> None:
        """End all threads of all machines and workers, and see them end."""
        self.log.close()
        self._is_closed = True
        for machine in self.machines.values():
            machine.kill()
        for line in list(self._lines):
            line.close()
        for machine in self.machines.values():
            for follower in (machine.follower, *machine.workers):
                assert follower.has_ended(20.0), machine.name

    def until(self, condition: Callable[[State], bool], limit_s: float = 20.0) -> None:
        """Wait until the state of all living machines and their workers fulfils a condition."""
        for machine in self.machines.values():
            if not machine.is_dead:
                for follower in (machine.follower, *machine.workers):
                    assert follower.wait_for(condition, limit_s) is not None, machine.name
