"""A report in the words of a reader who knows trainings, and not the protocol. Nothing here is escaped."""

from __future__ import annotations

import re

from swift_ft.cli.timeline.chart import lost_or_interrupted
from swift_ft.offline.lost_time import Cause, Goodput
from swift_ft.offline.timeline import RecoveryReport
from swift_ft.recovery.plan import RecoveryMode
from swift_ft.units import format_seconds

_WAYS: dict[str, str] = {
    RecoveryMode.START: "all workers started",
    RecoveryMode.CONTINUE: "all workers kept their state",
    RecoveryMode.LAYOUT: "layers moved",
    RecoveryMode.REPLICA: "its state came from a replica",
    RecoveryMode.REPLAY: "its state was rebuilt from a checkpoint and logs",
    RecoveryMode.MEMORY: "all workers went back to a memory checkpoint",
    RecoveryMode.FALLBACK: "all workers went back to the checkpoint in the store",
    RecoveryMode.RESTART: "all processes started again",
}
_COLUMNS = {
    "payload": "bytes logged",
    "held back": "waited for the log",
    "noted up to": "known up to iteration",
    "then": "why no longer",
}
_GOOD, _FAIR = 0.9, 0.5
"""Shares of training: a run with less than the second one has lost more than it has kept."""


def told(report: RecoveryReport) -> str:
    """The loss, and the way back."""
    return f"{lost_or_interrupted(report)}, {_WAYS.get(report.recovery.mode, 'no way back was chosen')}"


def parts_of(report: RecoveryReport) -> str:
    """The time of a recovery in parts."""
    return ", ".join(f"{cause.told} {format_seconds(s)}" for cause, s in report.seconds.items())


def cause_named(value: str) -> str:
    """The name of a cause; any other text as it is."""
    return next((cause.told for cause in Cause if cause == value), value)


def column_named(name: str) -> str:
    """The name of a column."""
    return _COLUMNS.get(name, name)


def without_slots(text: str) -> str:
    """A slot is where a machine stands in the job: a reader knows it as the machine with that number."""
    return re.sub(r"\btook slot (\d+)\b", r"took the place of machine \1", text).replace(
        "empty slot", "no machine there"
    )


def grade(good: Goodput) -> str:
    """The share of training as ``good``, ``fair`` or ``bad``; empty where it is unknown."""
    if good.share is None:
        return ""
    return "good" if good.share >= _GOOD else "fair" if good.share >= _FAIR else "bad"
