"""Checks that the logs have every message that a replay of each worker would need. Pure.

Nothing but the logs is asked about who sent what. A sender logs each message, a receiver a receipt of it, so
the records show who holds which stage, and what crosses each boundary in an iteration: the same microbatches
and slots in all of them. Only which workers are rebuilt together is the plan's decision (`replay_plan.py`).
Records are added in the order of their iterations and compared one iteration after the other, so that only a
few iterations are in memory with all their keys.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from swift_ft.logging.format.record import Direction, MessageKey, RecordKind

Order = tuple[int, int, int]
"""Generation, sequence of the segment, position in it: the newest copy of a message counts."""


class Boundary(NamedTuple):
    """One direction between two stages."""

    source: int
    destination: int
    direction: Direction

    def __str__(self) -> str:
        return f"stage {self.source} -> {self.destination}, {self.direction}"


class Entry(NamedTuple):
    """The facts about one record."""

    kind: RecordKind
    key: MessageKey
    checksum: int
    intact: bool
    path: str
    order: Order

    @property
    def is_message(self) -> bool:
        """Whether it has a payload, unlike a receipt."""
        return self.kind is RecordKind.MESSAGE


@dataclass(frozen=True, slots=True)
class Hole:
    """Messages of one iteration that a replay needs, and that no log has.

    Attributes:
        writer: the worker whose log they should be in; None if nothing shows who held the stage.
        boundary: that they crossed.
        iteration: the messages'.
        count: how many.
        sent: the receiver has receipts of them, or later messages are in the writer's log. Otherwise they may
            never have been sent.
        later: the writer's log goes on after them.
    """

    writer: int | None
    boundary: Boundary
    iteration: int
    count: int
    sent: bool
    later: bool


@dataclass(frozen=True, slots=True)
class Replay:
    """The findings of one worker's replay.

    Attributes:
        rank: the worker.
        stages: on it, as the logs show them.
        together: other workers that would be rebuilt with it.
        writers: the workers whose logs it would read.
        until: the iterations that it would have completed at the first hole; the newest if there is none.
        holes: what is missing, oldest first.
    """

    rank: int
    stages: tuple[int, ...]
    together: tuple[int, ...]
    writers: tuple[int, ...]
    until: int
    holes: tuple[Hole, ...]


_Slots = frozenset[tuple[int, int]]  # microbatch and slot


@dataclass(slots=True)
class ReplayCoverage:
    """Collects the records of all logs.

    Attributes:
        mismatches: receipts that differ from what was logged, and copies of one message that differ: by path
            of a segment, one line each.
    """

    mismatches: list[tuple[str, str]] = field(default_factory=list)
    _open: dict[int, dict[tuple[int, RecordKind, Boundary], dict[tuple[int, int], Entry]]] = field(
        default_factory=dict
    )
    _interned: dict[_Slots, _Slots] = field(default_factory=dict)
    _expected: dict[Boundary, set[tuple[int, int]]] = field(default_factory=lambda: defaultdict(set))
    _sent: dict[tuple[int, Boundary], dict[int, _Slots]] = field(default_factory=lambda: defaultdict(dict))
    _received: dict[tuple[int, Boundary], dict[int, _Slots]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    _agreed: Counter[tuple[Boundary, int, int]] = field(default_factory=Counter)
    _differing: list[tuple[int, int, Entry]] = field(default_factory=list)  # receiver, sender
    _last: dict[int, int] = field(default_factory=dict)  # newest iteration in a worker's log

    def add(self, rank: int, entries: Iterable[Entry]) -> None:
        """Add records of a worker's log, of iterations that are not compared yet."""
        for entry in entries:
            key = entry.key
            if key.direction is Direction.SCRIPT:  # how many there are of these, nothing tells
                self.reaches(rank, key.iteration)
                continue
            boundary = _boundary_of(key)
            places = self._open.setdefault(key.iteration, {}).setdefault((rank, entry.kind, boundary), {})
            other = places.get((key.microbatch, key.slot))
            if other is not None and other.checksum != entry.checksum:
                what = f"two copies of {key} differ: the other one is in {other.path}"
                self.mismatches.append((entry.path, what))
            if other is None or other.order < entry.order:
                places[key.microbatch, key.slot] = entry
            self.reaches(rank, key.iteration)

    def reaches(self, rank: int, iteration: int) -> None:
        """A worker's log had records of an iteration, even if they cannot be read."""
        self._last[rank] = max(self._last.get(rank, -1), iteration)

    def expect(self, boundary: Boundary, slots: Set[tuple[int, int]]) -> None:
        """Every iteration has messages of these microbatches and slots, whatever the logs show."""
        self._expected[boundary] |= slots

    def compare_before(self, iteration: float) -> None:
        """All records of the iterations before this one were added: compare them, and forget their keys."""
        for number in sorted(number for number in self._open if number < iteration):
            self._compare(number, self._open.pop(number))

    def _compare(
        self, iteration: int, found: Mapping[tuple[int, RecordKind, Boundary], dict[tuple[int, int], Entry]]
    ) -> None:
        for (rank, kind, boundary), entries in found.items():
            self._expected[boundary] |= entries.keys()
            intact = frozenset(place for place, entry in entries.items() if entry.intact)
            kept = self._sent if kind is RecordKind.MESSAGE else self._received
            kept[rank, boundary][iteration] = self._interned.setdefault(intact, intact)
            if kind is not RecordKind.RECEIPT:
                continue
            for (sender, other, same), messages in found.items():
                if other is RecordKind.MESSAGE and same == boundary:
                    self._compare_receipts(rank, sender, entries, messages)

    def _compare_receipts(
        self,
        receiver: int,
        sender: int,
        receipts: Mapping[tuple[int, int], Entry],
        messages: Mapping[tuple[int, int], Entry],
    ) -> None:
        both = receipts.keys() & messages.keys()
        differing = [place for place in both if receipts[place].checksum != messages[place].checksum]
        if differing:
            self._differing.append((receiver, sender, messages[min(differing)]))
        elif both:
            key = messages[next(iter(both))].key
            self._agreed[
                Boundary(key.source_stage, key.destination_stage, key.direction), receiver, sender
            ] += 1

    # -------------------------------------------------------------------------------- what it all means

    @property
    def newest(self) -> int:
        """Iterations that at least one worker has completed: all its messages of them are in its log."""
        complete = (
            iteration + 1
            for (_, boundary), iterations in self._sent.items()
            for iteration, slots in iterations.items()
            if slots >= self._expected[boundary]
        )
        return max(complete, default=0)

    def complete_until(self, senders: Collection[int], begin: int) -> int:
        """The iterations that are complete for who reads all that some workers have logged.

        Args:
            senders: the workers; each message that is expected is one of theirs.
            begin: the first iteration that is read.
        """
        end = 1 + max((self._last.get(sender, -1) for sender in senders), default=-1)
        iterations = range(begin, max(begin, end))
        holes = (
            self._holes(None, boundary, self._sender(boundary, senders), iterations)
            for boundary in self._expected
        )
        first = [hole.iteration for own in holes for hole in itertools.islice(own, 1)]
        return min(first, default=max(begin, end))

    def _sender(self, boundary: Boundary, senders: Collection[int]) -> int | None:
        return next((sender for sender in senders if (sender, boundary) in self._sent), None)

    def last(self, rank: int) -> int | None:
        """The newest iteration in a worker's log; None if it holds nothing."""
        return self._last.get(rank)

    def receipts_that_differ(self) -> list[tuple[str, str]]:
        """Messages that were received with other bytes than were logged: path of the segment, and a line."""
        links = self._links()
        return [
            (
                message.path,
                f"worker {receiver} received other bytes of {message.key} than worker {sender} logged: a "
                "replay would diverge",
            )
            for receiver, sender, message in self._differing
            if links.get((receiver, _boundary_of(message.key))) == sender
        ]

    def replays(self, begin: int, rebuilt: Mapping[int, Set[int]] | None = None) -> dict[int, Replay]:
        """The findings of each worker's replay, from a checkpoint to the newest iteration.

        Args:
            begin: completed iterations of the checkpoint.
            rebuilt: by rank, the workers that are rebuilt with it, itself included. Others are rebuilt alone.
        """
        stages, links = self._stages(), self._links()
        together = {rank: (rebuilt or {}).get(rank, {rank}) & stages.keys() for rank in stages}
        return {rank: self._replay(rank, begin, stages, together[rank], links) for rank in sorted(stages)}

    def _stages(self) -> dict[int, set[int]]:
        stages: dict[int, set[int]] = defaultdict(set)
        for rank, boundary in self._sent:
            stages[rank].add(boundary.source)
        for rank, boundary in self._received:
            stages[rank].add(boundary.destination)
        return stages

    def _links(self) -> dict[tuple[int, Boundary], int]:
        """By receiver and boundary, the sender. Checksums tell the pipelines of replicas apart."""
        senders: dict[Boundary, set[int]] = defaultdict(set)
        for rank, boundary in self._sent:
            senders[boundary].add(rank)
        links: dict[tuple[int, Boundary], int] = {}
        best: Counter[tuple[int, Boundary]] = Counter()
        for (boundary, receiver, sender), votes in self._agreed.items():
            if votes > best[receiver, boundary]:
                best[receiver, boundary] = votes
                links[receiver, boundary] = sender
        stages = self._stages()
        for boundary, ranks in senders.items():
            for receiver in (rank for rank, own in stages.items() if boundary.destination in own):
                back = Boundary(boundary.destination, boundary.source, _opposite(boundary.direction))
                known = [rank for rank in ranks if links.get((rank, back)) == receiver]
                if len(ranks) == 1 or known:
                    links.setdefault((receiver, boundary), (known or sorted(ranks))[0])
        return links

    def _replay(
        self,
        rank: int,
        begin: int,
        stages: Mapping[int, set[int]],
        together: Set[int],
        links: Mapping[tuple[int, Boundary], int],
    ) -> Replay:
        newest = self.newest
        holes: list[Hole] = []
        writers: set[int] = set()
        for member, boundary in itertools.product(sorted(together), list(self._expected)):
            sender = links.get((member, boundary))
            if boundary.destination not in stages[member] or sender in together:
                continue
            if sender is None and any(sent == boundary for _, sent in self._sent):
                continue  # one of several pipelines, and nothing shows which
            if sender is not None:
                writers.add(sender)
            holes += self._holes(member, boundary, sender, range(begin, newest))
        holes.sort(key=lambda hole: (hole.iteration, hole.boundary))
        until = holes[0].iteration if holes else max(begin, newest)
        return Replay(
            rank,
            tuple(sorted(stages[rank])),
            tuple(sorted(together - {rank})),
            tuple(sorted(writers)),
            until,
            tuple(holes),
        )

    def _holes(
        self, receiver: int | None, boundary: Boundary, sender: int | None, iterations: range
    ) -> Iterable[Hole]:
        expected = self._expected[boundary]
        sent = self._sent.get((sender, boundary), {}) if sender is not None else {}
        received = self._received.get((receiver, boundary), {}) if receiver is not None else {}
        for iteration in iterations:
            missing = expected - sent.get(iteration, frozenset())
            if missing:
                later = sender is not None and self._last.get(sender, -1) > iteration
                proven = later or bool(missing & received.get(iteration, frozenset()))
                yield Hole(sender, boundary, iteration, len(missing), proven, later)


def _opposite(direction: Direction) -> Direction:
    return Direction.BACKWARD if direction is Direction.FORWARD else Direction.FORWARD


def _boundary_of(key: MessageKey) -> Boundary:
    return Boundary(key.source_stage, key.destination_stage, key.direction)
