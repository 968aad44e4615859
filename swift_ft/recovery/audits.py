"""Audits: spares compute again what machines have computed, and two of them decide who was wrong. Pure.

One interval between two checkpoints is audited at a time, machine by machine. Its logs and its checkpoints
stay until all machines are done. A replay that differs from what the machine recorded is made once more, in
another process, and on another spare if there is one. So there are three computations:

    the machine   first replay   second replay
        a              b               b           the machine was wrong
        a              b               a           the first spare was wrong
        a              b               c           not deterministic, as far as anybody can tell
        a              b               -           undecided: no second replay can be made

Machines that are rebuilt together have logged nothing to each other. Two replays that agree show only that
one of them was wrong.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from immutables import Map

from swift_ft.recovery.maps import Numbers

MOST_MARKS = 8
"""Intervals and judgements that are remembered."""

BEFORE_ALL_LOGS = -1
"""A generation: what follows a checkpoint that was saved in it is not audited."""


@dataclass(frozen=True, slots=True)
class Interval:
    """The time between two checkpoints of one history.

    Attributes:
        begin: completed iterations of the first checkpoint.
        until: those of the second one.
        epoch: the epoch in which both were committed.
        world: the world in which they were.
        layout: how often layers had moved.
    """

    begin: int
    until: int
    epoch: int = 0
    world: int = 0
    layout: int = 0


@dataclass(frozen=True, slots=True)
class Finding:
    """A difference that one replay has found: see :class:`swift_ft.recovery.events.AuditEnded`."""

    machine: str
    rank: int
    iteration: int
    tensors: str
    digest: str
    slots: tuple[int, ...] = ()


class Wrong(StrEnum):
    """The one who was wrong."""

    MACHINE = "machine"
    """The machine: two replays agree, and differ from what it recorded."""
    SEVERAL = "one of several machines"
    """One of those that were rebuilt together: two replays agree, and differ from what one has recorded."""
    LINK = "link"
    """Two replays computed what the machine has sent. Another one received other bytes."""
    SPARE = "spare"
    """The spare: another replay came out as the machine recorded."""
    NOBODY = "not deterministic"
    """All three differ, or each machine does, so that nothing shows who it was."""
    UNDECIDED = "undecided"
    """One replay differs, and no second one could be made."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """The judgement on a difference.

    Attributes:
        interval: that was audited.
        slot: the machine's.
        machine: its name; empty if it has come to this slot since.
        wrong: who was.
        spares: that have replayed, in order: one if that is undecided.
        rank: the worker on which the first difference is.
        iteration: in which it is.
        tensors: in what.
        slots: all machines whose work was computed again together.
    """

    interval: Interval
    slot: int
    machine: str
    wrong: Wrong
    spares: tuple[str, ...]
    rank: int
    iteration: int
    tensors: str
    slots: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Due:
    """All that is still to follow from a judgement (``--on-corruption``).

    It is part of the state until it is done: whoever is to do it may die, and a loss may come in between.

    Attributes:
        choice: that option.
        reason: the judgement, in words.
        ends: the job is to end.
        back_to: completed iterations of the checkpoint to which all are to go back; None once they have, and
            if they need not.
        leaves: the machine that is to leave; empty if none is.
        at_once: where a spare can take its place, since all go back anyway.
    """

    choice: str
    reason: str
    ends: bool = False
    back_to: int | None = None
    leaves: str = ""
    at_once: bool = False


@dataclass(frozen=True, slots=True)
class Mark:
    """The mark of an interval whose audit is done.

    Attributes:
        begin: completed iterations of its first checkpoint.
        until: those of its second one, which bears the mark.
        clean: slots whose replay came out as recorded.
        whole: these are all machines.
        right: completed iterations of the newest checkpoint that it shows to be right. Of replicas one step
            is audited, that after the first one, and nothing is known of what came after that step.
        epoch: the epoch in which the second one was committed.
    """

    begin: int
    until: int
    clean: tuple[int, ...]
    whole: bool
    right: int
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class Audits:
    """All that is known of audits.

    Attributes:
        interval: the one that is audited; None between two.
        claims: by slot, the spare that replays it.
        findings: by slot, a difference that is not judged yet.
        clean: slots of the interval that came out as recorded.
        closed: slots that did not, or could not be replayed.
        differed: those of them that did not.
        failed: by slot that is not done, the spares that could not replay it, by what they are
            (:meth:`swift_ft.recovery.membership.Membership.identity_of`).
        marks: of the intervals before, the newest last.
        judged: differences that are judged, the newest last.
        due: what is still to follow from judgements, the newest last.
        saved_in: by checkpoint that counts, the generation in which it was committed, or in which all have
            gone back to it; :data:`BEFORE_ALL_LOGS` if no replay from it comes out as what was trained.
    """

    interval: Interval | None = None
    claims: Map[int, str] = field(default_factory=Map)
    findings: Map[int, Finding] = field(default_factory=Map)
    clean: Numbers = field(default_factory=Map)
    closed: Numbers = field(default_factory=Map)
    differed: Numbers = field(default_factory=Map)
    failed: Map[int, frozenset[str]] = field(default_factory=Map)
    marks: tuple[Mark, ...] = ()
    judged: tuple[Judgement, ...] = ()
    due: tuple[Due, ...] = ()
    saved_in: Map[int, int] = field(default_factory=Map)

    def between(self) -> Audits:
        """All that stays when no interval is audited."""
        return Audits(marks=self.marks, judged=self.judged, due=self.due, saved_in=self.saved_in)

    def is_done(self, slot: int) -> bool:
        """Whether a machine's audit in this interval has ended."""
        return slot in self.clean or slot in self.closed


def judged_since(before: Audits, after: Audits) -> list[Judgement]:
    """The judgements that one state has and an earlier one had not."""
    return [judgement for judgement in after.judged if judgement not in before.judged]


def judge(first: Finding, second: Finding | None, *, changed: bool = False) -> Wrong:
    """Decide by a second replay who was wrong.

    Args:
        first: the difference that the first one found.
        second: that of the second one; None if it found none.
        changed: see :class:`swift_ft.recovery.events.AuditEnded`.
    """
    if second is None:
        return Wrong.SPARE
    # Without a digest nobody knows whether they agree.
    alike = (first.rank, first.iteration, first.digest) == (second.rank, second.iteration, second.digest)
    if not alike or not first.digest:
        return Wrong.NOBODY
    if changed:
        return Wrong.LINK
    return Wrong.SEVERAL if len({*first.slots, *second.slots}) > 1 else Wrong.MACHINE
