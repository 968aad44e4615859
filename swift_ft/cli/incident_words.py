"""Incidents in words: one line each, for the console, and its facts for JSON lines."""

from __future__ import annotations

from typing import Any

from swift_ft.cli.news import NEWS, ROUTINE
from swift_ft.recovery.causes import Cause
from swift_ft.recovery.incidents import ENDED, Incident
from swift_ft.units import counted, format_seconds, named


def incident_facts(incident: Incident) -> dict[str, Any]:
    """The facts of the news of an incident."""
    return {
        "number": incident.number,
        "cause": incident.cause.value,
        "reason": incident.reason,
        "evidence": list(incident.evidence),
        "names": list(incident.machines),
        "slots": list(incident.slots),
        "others": list(incident.others),
        "way": incident.way,
        "seconds": round(incident.seconds, 3),
        "iterations_lost": incident.iterations_lost,
        "times": incident.times,
        "advice": incident.advice,
        "machine": incident.slots[0] if incident.slots else None,
        "line": incident_in_words(incident),
        # A test knows whose fault it was.
        "weight": ROUTINE if incident.cause == Cause.INJECTED else NEWS,
    }


def incident_in_words(incident: Incident) -> str:
    """One line, without a full stop."""
    where, what, done = _where(incident), _what(incident), _done(incident)
    head = f"incident {incident.number}{where} (cause: {incident.cause})"
    return f"{head}: {what}. {done}. To do: {incident.advice}"


def _where(incident: Incident) -> str:
    if not incident.slots:
        return ""
    times = f", for the {_ordinal(incident.times)} time" if incident.times > 1 else ""
    return f" on {named('machine', sorted({*incident.slots}))}{times}"


def _ordinal(number: int) -> str:
    ending = "th" if 10 < number % 100 < 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def _what(incident: Incident) -> str:
    evidence = f" ({'; '.join(incident.evidence)})" if incident.evidence else ""
    others = f"; with it: {'; '.join(incident.others)}" if incident.others else ""
    return f"{incident.reason.rstrip('.')}{evidence}{others}"


def _done(incident: Incident) -> str:
    if incident.way == ENDED:
        return "The run has ended"
    lost = f", {counted(incident.iterations_lost, 'iteration')} computed again" * bool(
        incident.iterations_lost
    )
    after = f" after {format_seconds(incident.seconds)}" if incident.seconds else ""
    return f"Training goes on by {incident.way}{after}{lost}"
