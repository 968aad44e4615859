"""Events of the journal about what was computed twice: steps, and the work of audited stages."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDiffered:
    """A step was computed again from the same state and data, and something came out unlike.

    ``kind`` is ``once``, ``each time`` or ``not deterministic`` (`runtime/verify/verdict.py`), ``ranks`` are
    the workers on which the difference began, and ``tensors`` says in what. ``right``: what counts now is a
    result that came out twice.
    """

    generation: int
    iteration: int
    ranks: tuple[int, ...]
    kind: str
    tensors: str
    right: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditBegun:
    """A spare computes again what a machine has computed between two checkpoints (`recovery/audits.py`).

    Attributes:
        machine: the spare.
        slot: the machine that is audited.
        begin: completed iterations of the checkpoint that it begins with.
        until: those of the checkpoint with which its state is compared.
    """

    machine: str
    slot: int
    begin: int
    until: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEnded:
    """A spare has computed again what a machine has computed between two checkpoints.

    Attributes:
        machine: the spare, as the next three are those of :class:`AuditBegun`.
        slots: all machines whose work was computed again: those that are rebuilt together. Empty if that was
            not possible, and may be so if a machine was rebuilt alone and differs.
        rank: the worker on which the first difference is; of a message, its sender.
        iteration: in which it is; None if there is none.
        tensors: in what, in words.
        digest: of what the spare has computed there: two audits that agree have the same one. Empty if it is
            not known.
        changed: a message that the worker has sent has arrived as other bytes. What it has sent is what the
            spare has computed, or has computed with.
        problem: why it could not be computed again; empty if it could.
        on_corruption: what is to follow if a judgement is made; empty for nothing.
    """

    machine: str
    slot: int
    begin: int
    until: int
    slots: tuple[int, ...] = ()
    rank: int = 0
    iteration: int | None = None
    tensors: str = ""
    digest: str = ""
    changed: bool = False
    problem: str = ""
    on_corruption: str = ""
