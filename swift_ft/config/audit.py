"""A request for an audit, and its result: what a spare's agent and the audit's process tell each other."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from swift_ft.plain import from_plain

OUTPUT = "output.txt"
"""The file beside the rebuilt state with what the audit's process has printed."""


@dataclass(frozen=True, slots=True)
class AuditRequest:
    """The request for an audit.

    Attributes:
        store: URL of the run's store.
        machine: the slot.
        begin: completed iterations of the checkpoint to begin with.
        until: those of the checkpoint to compare with.
        out: an empty or absent folder for what is rebuilt.
        kind: of the script, as the next two are those of :class:`swift_ft.offline.replay.ReplayRequest`.
        target: see there.
        args: see there.
        setup: the facts of :class:`swift_ft.offline.replay.ToldRun`, as the next two are.
        log_since: see there.
        moved: see there.
        machines: in the run now, as the next one is.
        workers: on each machine.
        epoch: in which the checkpoints were committed.
        limit_s: for a script to start, and to take each step.
        start_values: what the scripts of its workers had set at first, as the rendezvous store has it.
        gradients: of replicas, which log no messages: only the step after the first checkpoint is computed,
            and its own gradients are compared (`offline/gradient_audit.py`).
    """

    store: str
    machine: int
    begin: int
    until: int
    out: str
    kind: str
    target: str
    args: tuple[str, ...]
    setup: tuple[str, ...]
    log_since: int
    moved: int
    machines: int
    workers: int
    epoch: int
    limit_s: float
    start_values: Mapping[str, str]
    gradients: bool

    def to_json(self) -> str:
        """As text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> AuditRequest:
        """The inverse of :meth:`to_json`."""
        return from_plain(cls, json.loads(text))


@dataclass(frozen=True, slots=True)
class AuditResult:
    """The outcome: the fields of :class:`swift_ft.recovery.events.AuditEnded` that the spare finds out."""

    slots: tuple[int, ...] = ()
    rank: int = 0
    iteration: int | None = None
    tensors: str = ""
    digest: str = ""
    changed: bool = False
    problem: str = ""

    def to_json(self) -> str:
        """As text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> AuditResult:
        """The inverse of :meth:`to_json`."""
        return from_plain(cls, json.loads(text))
