"""The script's own communication: logged by the workers that get it, and served to a replay.

A replay runs the script's step without the other workers. So does the repetition of an iteration that another
worker has completed. Both get the results of collectives from the log of a worker that has them. What a
worker broadcasts itself must be what the others got. Other contributions cannot be compared, since no log has
them: the results of the original count.

Not everything is logged. What is large, or different for each member, would fill the log. The members of such
a group are rebuilt and replay together (:attr:`swift_ft.recovery.events.StatusReported.together`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import xxhash

from swift_ft.determinism import UNLIKE_RESULT
from swift_ft.errors import DivergenceError, RecoveryError
from swift_ft.logging import Direction, LogReader, MessageKey, MessageLog, checksum_of
from swift_ft.runtime.pipeline.arrivals import Arrivals
from swift_ft.runtime.script.script_line import script_line
from swift_ft.torch_adapters.script_operations import PERSONAL, Operation
from swift_ft.units import format_bytes, some

LIMIT_BYTES = 1 << 20
"""Default limit of what a group may give to a worker in one iteration and still be logged."""


@dataclass(frozen=True, slots=True)
class Absence:
    """Workers that do not take part in some iterations, because they have completed them.

    Attributes:
        ranks: these workers.
        until: before this iteration.
        read: opens the log of one of them.
        near: those whose logs are read in any case.
        present: those that do take part; None for all others.
        arrivals: in an audit, what this worker was given in the original; None elsewhere.
    """

    ranks: Collection[int]
    until: int
    read: Callable[[int], LogReader]
    near: Sequence[int] = ()
    present: Collection[int] | None = None
    arrivals: Arrivals | None = None


@dataclass(slots=True)
class GroupUse:
    """The script's use of one of its groups, or of two members of it that send each other something.

    Attributes:
        members: global ranks.
        together: its members replay together; otherwise its results are logged.
        nbytes: what it has given to this worker in the running iteration.
        most: in any iteration.
        why: the call that let its members replay together, and why; empty if they are lost together anyway,
            and if they do not.
    """

    members: tuple[int, ...]
    together: bool = False
    nbytes: int = 0
    most: int = 0
    why: str = ""


@dataclass
class ScriptCommunication:
    """Decides about each operation of the script in a pipeline.

    See :class:`swift_ft.torch_adapters.script_operations.OperationInterceptor`.

    Attributes:
        rank: this worker.
        group_of: the recovery group of each worker. Its members are lost and replayed together.
        log: where results go.
        limit_bytes: how much a group may give to this worker in one iteration and still be logged.
        on_together: called before the first operation with workers that are not in :attr:`together` yet, with
            how the group is used.
        absence: who does not take part; None if all do.
        iteration: the current one; None before the first.
        logged: whether there was an operation that others may have to be given.
        together: other workers that are rebuilt and replay together with this one.
        why: the call of the script that demands it; empty if none does.
        uses: of the script's groups so far.
    """

    rank: int
    group_of: Callable[[int], int]
    log: MessageLog
    limit_bytes: int = LIMIT_BYTES
    on_together: Callable[[GroupUse], None] = lambda use: None
    absence: Absence | None = None
    iteration: int | None = None
    logged: bool = False
    together: set[int] = field(default_factory=set)
    why: str = ""
    uses: dict[tuple[str, tuple[int, ...]], GroupUse] = field(default_factory=dict)
    _numbers: Counter[tuple[str | int, ...]] = field(default_factory=Counter)
    _readers: dict[int, LogReader] = field(default_factory=dict)

    def begin_iteration(self, iteration: int) -> None:
        """A step begins. What the script communicates until the next one belongs to it."""
        self.iteration = iteration
        self._numbers.clear()
        for use in self.uses.values():
            use.nbytes = 0

    def without(self, absence: Absence | None) -> None:
        """From now on some workers do not take part, or all do again."""
        self.absence = absence
        self._readers.clear()

    def remember(self, together: Iterable[int], why: str) -> None:
        """A worker that this one replaces was to replay together with others."""
        self.together |= {*together} - {self.rank}
        self.why = self.why or why

    def begin(self, operation: Operation) -> Callable[[], None] | None:
        """See the protocol."""
        if self.iteration is None or operation.members == (self.rank,):
            return _nothing
        use = self._use(operation)
        if use.together:
            self._take_part(operation)
            return _nothing
        self.logged = True
        key, absence = self._next_key(operation), self.absence
        if absence is None or self.iteration >= absence.until:
            return partial(self._record, operation, key)
        if not self._involved(operation, absence):
            self._take_part(operation)
            return partial(self._record, operation, key)
        # A send is not compared with its receipt, also where that says otherwise: a script may send what
        # differs each time, such as how long its step took. The receiver keeps what it got (see _arrived).
        if operation.name != "send":
            self._fill(operation, key, absence)
        self._record(operation, key)
        return None

    def _use(self, operation: Operation) -> GroupUse:
        """Count an operation; what its group gives may become too much for the log with it."""
        pair = operation.peer is not None
        members = (self.rank, operation.peer) if operation.peer is not None else operation.members
        name = (operation.group, tuple(sorted(members)) if pair else ())
        use = self.uses.get(name)
        if use is None:
            use = self.uses[name] = GroupUse(tuple(sorted(members)))
        use.nbytes += operation.nbytes
        use.most = max(use.most, use.nbytes)
        if not use.together and (why := self._why_together(operation, use)) is not None:
            use.together, use.why = True, why
            if not self.together.issuperset({*use.members} - {self.rank}):
                self.remember(use.members, use.why)  # before it is published: the worker's record has it, too
                self.on_together(use)
        return use

    def _why_together(self, operation: Operation, use: GroupUse) -> str | None:
        """Why no log is to have what a group communicates; None if one can have it."""
        if {self.group_of(rank) for rank in use.members} == {self.group_of(self.rank)}:
            return ""  # they are lost together
        if operation.name in PERSONAL:
            return self._told(operation, use, "gives each of them something else")
        if operation.name == "recv_anysource":
            return self._told(operation, use, "takes from the first sender")
        if use.nbytes > self.limit_bytes:
            size, limit = format_bytes(use.nbytes), format_bytes(self.limit_bytes)
            return self._told(operation, use, f"has {size} in one iteration, and {limit} may be logged")
        return None

    def _told(self, operation: Operation, use: GroupUse, what: str) -> str:
        members = some(use.members, 4)
        return f"{script_line()} calls {operation.name} on a group of workers {members}, which {what}"

    def _take_part(self, operation: Operation) -> None:
        """No log has an operation: all that it needs are to take part.

        Raises:
            RecoveryError: someone does not. Another way back is needed.
        """
        absence = self.absence
        assert self.iteration is not None
        if absence is None or self.iteration >= absence.until:
            return
        present = absence.present
        others = {*_others(operation)} - {self.rank}
        if others.isdisjoint(absence.ranks) and (present is None or others.issubset(present)):
            return
        raise RecoveryError(
            f"worker {self.rank} calls {operation.name} in iteration {self.iteration} again, which is in no "
            "log, and not all members of its group do"
        )

    def _involved(self, operation: Operation, absence: Absence) -> bool:
        return any(rank in absence.ranks for rank in _others(operation))

    def _next_key(self, operation: Operation) -> MessageKey:
        """Names the first tensor of an operation, but for the worker that has it."""
        assert self.iteration is not None
        source, to = -1, -1
        if operation.peer is not None:
            sends = operation.name == "send"
            source, to = (self.rank, operation.peer) if sends else (operation.peer, self.rank)
        counted: tuple[str | int, ...] = (operation.group, source, to)
        if operation.tag:  # receivers may take messages in another order than that in which they were sent
            counted += ("tag", operation.tag)
        number = self._numbers[counted]
        self._numbers[counted] += 1
        place = xxhash.xxh3_64_intdigest(" ".join(map(str, counted)).encode()) >> 1  # an int64
        return MessageKey(self.iteration, number, Direction.SCRIPT, place, self.rank, 0)

    def _record(self, operation: Operation, key: MessageKey) -> None:
        if self.log.writer is None:  # the run is about to end
            return
        # Clones: the log keeps references, and scripts go on to change what they were given.
        if not operation.kept:
            operation.keep()
        for slot, tensor in enumerate(operation.kept):
            own = replace(key, slot=slot)
            if operation.name == "recv":  # the sender has it
                assert operation.peer is not None
                self.log.received(replace(own, destination_stage=operation.peer), tensor)
            else:
                self.log.sent(own, tensor)

    def _fill(self, operation: Operation, key: MessageKey, absence: Absence) -> None:
        holder = self._holder(operation, absence)
        reader = self._reader(holder, absence)
        for slot, tensor in enumerate(operation.tensors):
            given = checksum_of(tensor) if operation.source == self.rank else None
            own = replace(key, slot=slot)
            there = replace(own, destination_stage=holder)
            arrived = self._arrived(there, reader, absence) if operation.peer is not None else None
            served = reader.read_into(there, tensor, arrived)
            if given is not None and given != served:
                raise DivergenceError(
                    f"The replay diverged at {own}: {script_line()} broadcasts other bytes than the original "
                    f"did. {UNLIKE_RESULT}.",
                    key=own,
                    computed_in=key.iteration,
                    computed=given,
                )
            if absence.arrivals is not None and given is None:
                arrived = absence.arrivals.of_result(own) if arrived is None else arrived
                self._compare_arrival(operation, own, there, served, arrived)

    def _reader(self, rank: int, absence: Absence) -> LogReader:
        if rank not in self._readers:
            self._readers[rank] = absence.read(rank)
        return self._readers[rank]

    def _arrived(self, there: MessageKey, reader: LogReader, absence: Absence) -> int | None:
        """The checksum of a message as the original got it; None if that is not known, or does not matter.

        A sender that replays sends nothing to a receiver that is there, and logs what it would have sent. If
        that is something else, the newest copy in its log is one that nobody has received.
        """
        copies = reader.checksums(there)
        if copies and absence.arrivals is not None:
            return absence.arrivals.of_message(there)
        if len(copies) < 2:  # there is no choice, and this worker's log need not be opened
            return None
        try:
            return self._reader(self.rank, absence).receipt_of_completed(there)
        except RecoveryError:  # the log was lost with its worker, or is damaged
            return None

    def _compare_arrival(
        self, operation: Operation, own: MessageKey, there: MessageKey, served: int, arrived: int
    ) -> None:
        """Another worker has these bytes of an operation. The original of this one may have got others."""
        if arrived != served:
            sender = there.destination_stage if operation.source is None else operation.source
            raise DivergenceError(
                f"The replay diverged at {own}: {script_line()} calls {operation.name}, and worker "
                f"{there.destination_stage} has other bytes of it than this worker got. {UNLIKE_RESULT}.",
                key=own,
                computed_in=own.iteration,
                computed=served,
                sender=sender,
            )

    def _holder(self, operation: Operation, absence: Absence) -> int:
        if operation.peer is not None:
            return operation.peer
        held_by = [rank for rank in operation.members if rank in absence.ranks]
        return next((rank for rank in absence.near if rank in held_by), held_by[0])


def _others(operation: Operation) -> tuple[int, ...]:
    """Whom it takes: all members, or the other side."""
    return operation.members if operation.peer is None else (operation.peer,)


def _nothing() -> None:
    pass
