"""Errors of a script that another restart would meet again, whatever differs between two starts. Pure."""

from __future__ import annotations

import re

from swift_ft.recovery import events as ev
from swift_ft.recovery.causes import Cause, cause_of
from swift_ft.recovery.job_state import Phase, State

_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+")
"""Ranks, processes, addresses and free bytes differ between two starts that fail alike."""

_PASSES = frozenset({Cause.NETWORK, Cause.STORE, Cause.SCHEDULER, Cause.SIGNAL, Cause.INJECTED})
"""Causes from outside, which may be over at the next start."""


def passes(event: ev.ScriptFailed) -> bool:
    """Whether what a script has met may be over at the next start."""
    return cause_of(event) in _PASSES


def error_to_note(state: State, event: ev.ScriptFailed) -> tuple[int | None, str] | None:
    """An error for which all workers start again, as the state remembers it (``Tries.script_error``)."""
    if passes(event):
        return state.tries.script_error
    # Before an iteration nothing shows that all begin as they did before: a server may not be up yet.
    noted = _completed(state, event) if cause_of(event) == Cause.MEMORY else event.iteration
    return noted, _kind(event)


def why_again(state: State, event: ev.ScriptFailed) -> str:
    """Why another restart would meet an error again. Empty if nothing shows that it would."""
    earlier = state.tries.script_error
    if earlier is None or earlier[1] != _kind(event) or passes(event):
        return ""
    if not state.has_sessions:  # it may have trained for days in between: nobody has said
        return ""
    before, after = earlier[0], _completed(state, event)
    if cause_of(event) == Cause.MEMORY and (after or 0) < (before or 0):
        return "twice without progress"  # it comes a little sooner or later
    if cause_of(event) == Cause.MEMORY and not before and not after:
        return "twice before the first iteration"
    return f"twice, after {after} iterations" if before and before == after else ""


def _completed(state: State, event: ev.ScriptFailed) -> int | None:
    """Iterations that the worker's state had completed; None before it had one.

    A worker that has completed none since its process began says nothing of them.
    """
    if event.iteration is None and state.phase == Phase.LIVE and state.plan is not None:
        return state.plan.resume
    return event.iteration


def _kind(event: ev.ScriptFailed) -> str:
    """The same text for two errors that are one: of memory, how much was left differs, and for whom."""
    if cause_of(event) == Cause.MEMORY:
        return Cause.MEMORY.value
    return f"{event.exit_code} {_NUMBER.sub('', event.reason)}"
