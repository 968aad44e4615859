"""Heads of a simulated job: they merge events, stall, die, and write what they held.

An event of a worker, and the join of a machine, goes to a head, which writes it later, with events of others
in one block. A head that stalls keeps what it has: its clients send their events another way, and when it
wakes up, it writes what it held. A head that dies has written it, or not; its clients do not know, and send
again. So events are late, come in blocks, and come twice, and those of a client that has died since may come
very late.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from swift_ft.recovery import events as ev
from swift_ft.recovery.blocks import Stamped

_ROUTES = 3
_FLUSHES, _STALLS, _DIES = 85, 10, 5
"""The chances of what a head does when it acts, in percent."""
_WAKES = 0.02
_SENT_TWICE = 0.05
"""A client that writes itself had tried a head before, which has stalled."""


class Client(Protocol):
    """A process whose events travel.

    Attributes:
        frozen: it does nothing now.
        unanswered: its events that are on their way.
    """

    frozen: bool
    unanswered: int

    @property
    def alive(self) -> bool:
        """Whether the process has not ended."""

    def answered(self, position: int) -> None:
        """Its event is in the journal, which is so long now."""


@dataclass(frozen=True, slots=True)
class _Item:
    stamped: Stamped
    client: Client


class Heads:
    """All heads of a job.

    Args:
        seed: of the run. What happens here has random numbers of its own.
        write: writes a block to the journal, and returns the journal's length.
        seen: how often each kind of thing happened.
    """

    def __init__(self, seed: int, write: Callable[[list[Stamped]], int], seen: Counter[str]) -> None:
        self._rng = random.Random(f"heads {seed}")
        self._rate = self._sent_twice = 0.0
        self._write, self._seen = write, seen
        self._serials: dict[int, int] = {}
        self._clients: list[Client] = []  # keeps the keys of the serials unlike each other
        self._open: list[list[_Item]] = [[] for _ in range(_ROUTES)]
        self._asleep: list[list[_Item]] = []
        self._to_send_again: list[_Item] = []

    def use(self) -> None:
        """Let few or most events travel through heads from now on. Until then all are written at once."""
        self._rate, self._sent_twice = self._rng.choice((0.2, 0.8)), _SENT_TWICE

    def send(self, client: Client, event: ev.Event, by: str) -> int | None:
        """Send an event. The journal's length if it is there already, None if it is on its way."""
        item = _Item(self._stamped(client, event, by), client)
        if client.unanswered:  # its events keep their order
            client.unanswered += 1
            self._queue_of(client).append(item)
            return None
        if self._rng.random() >= self._rate:
            if self._rng.random() < self._sent_twice:
                self._asleep.append([item])
            return self._write([item.stamped])
        client.unanswered = 1
        self._rng.choice(self._open).append(item)
        return None

    def act(self) -> None:
        """A head acts, if any has something to do."""
        if self._asleep and self._rng.random() < _WAKES:
            self._wake(self._rng.randrange(len(self._asleep)))
        if self._to_send_again:
            self._send_again()
        busy = [number for number, queue in enumerate(self._open) if queue]
        if not busy or self._rng.random() < 0.5:
            return
        number = self._rng.choice(busy)
        items, self._open[number] = self._open[number], []
        match self._rng.choices(("flush", "stall", "die"), (_FLUSHES, _STALLS, _DIES))[0]:
            case "flush":
                self._flush(items)
            case "stall":
                self._seen["a head stalled"] += 1
                self._asleep.append(items)
                self._to_send_again += items
            case "die":
                written = self._rng.random() < 0.5
                self._seen[f"a head died {'after' if written else 'before'} it had written"] += 1
                if written:
                    self._write([item.stamped for item in items])
                self._to_send_again += items

    def flush_all(self) -> bool:
        """All heads write what they hold. False if none held anything."""
        held = [*self._open, self._to_send_again, *self._asleep]
        self._open, self._to_send_again, self._asleep = [[] for _ in range(_ROUTES)], [], []
        for items in held:
            if items:
                self._flush(items)
        return any(held)

    def _stamped(self, client: Client, event: ev.Event, by: str) -> Stamped:
        if id(client) not in self._serials:
            self._clients.append(client)
        serial = self._serials[id(client)] = self._serials.get(id(client), 0) + 1
        return Stamped(event, 0.0, by, str(id(client)), serial)

    def _queue_of(self, client: Client) -> list[_Item]:
        """The queue with the events of a client that are on their way."""
        for queue in (*self._open, self._to_send_again):
            if any(item.client is client for item in queue):
                return queue
        raise AssertionError("no head has its events")

    def _flush(self, items: list[_Item]) -> None:
        if len(items) > 1:
            self._seen["block of several events"] += 1
        position = self._write([item.stamped for item in items])
        answered: dict[int, Client] = {}
        for item in items:
            if item.client.unanswered:
                item.client.unanswered -= 1
                if not item.client.unanswered:
                    answered[id(item.client)] = item.client
        for client in answered.values():
            client.answered(position)

    def _send_again(self) -> None:
        """Those that wait for an answer choose another way. All events of one client go the same way."""
        items, self._to_send_again = self._to_send_again, []
        ways: dict[int, list[_Item]] = {}
        for item in items:
            if not item.client.alive:
                continue
            if item.client.frozen:
                self._to_send_again.append(item)
                continue
            way = ways.setdefault(id(item.client), self._rng.choice(self._open))
            way.append(item)

    def _wake(self, number: int) -> None:
        self._seen["a head woke up"] += 1
        self._write([item.stamped for item in self._asleep.pop(number)])
