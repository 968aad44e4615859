"""The outcome of a run: what its end says, and what it has computed beside the undisturbed one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swift_ft.errors import SwiftError, first_line
from swift_ft.faults import Action, Fault
from swift_ft.testing.chaos.comparison import UNDO_BOUND, files_of, largest_difference, last_state, loads
from swift_ft.testing.chaos.endings import beyond_faults
from swift_ft.testing.chaos.trial import Outcome, Training, Trial

_DAMAGES = (Action.FLIP, Action.TRUNCATE)
_OF_THE_LOOP = ".carried.(loop)."
_OF_THE_SCRIPT = ".carried.."
"""Of variables of the script itself, among them those of a loop that is in no function."""
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


@dataclass(slots=True)
class End:
    """The end of a launcher, and all that was there then."""

    code: int | None
    output: str
    wall_s: float
    left: list[str] = field(default_factory=list)
    report: dict[str, Any] = field(default_factory=dict)
    missed: tuple[str, ...] = ()


def judged(
    training: Training, folder: Path, plan: Sequence[Fault], end: End, expected: Trial | None
) -> tuple[Outcome, str, dict[str, str]]:
    """The outcome, why, and the state as far as it is known."""
    if end.code is None:
        last = next((line for line in reversed(end.output.splitlines()) if line.strip()), "no line")
        return Outcome.HUNG, f"not over after {training.deadline_s:g} s; its last line: {last}", {}
    url = training.store_of(folder)
    reason = _reason(end.output)
    if end.code < 0:
        return Outcome.CRASHED, f"swift-run was killed by signal {-end.code}", {}
    if end.code != 0 and not reason:
        return Outcome.CRASHED, f"exit code {end.code}, and no line that says why", {}
    if end.left:
        return Outcome.LEAKED, "left behind: " + "; ".join(end.left), {}
    if end.code != 0:
        return *_judged_error(end, plan, url, reason), {}
    try:
        state = {**(last_state(url) if url else {}), **files_of(folder)}
    except SwiftError as error:
        damaged = any(fault.action in _DAMAGES for fault in plan) and loads(url)
        why = f"its last checkpoint is damaged: {first_line(error)}"
        return (Outcome.ENDED if damaged else Outcome.WRONG), why, {}
    if "iteration" not in state:
        return Outcome.WRONG, "it left no checkpoint", state
    if expected is None:
        return Outcome.IDENTICAL, "", state
    outcome, reason = _compared(training, folder, end.report, state, expected)
    return outcome, reason, state


def _judged_error(end: End, plan: Sequence[Fault], url: str, reason: str) -> tuple[Outcome, str]:
    """The outcome of a run that ended with a line."""
    if not url or not loads(url):
        return Outcome.UNLOADABLE, reason
    if why := beyond_faults(end.report.get("events", ()), plan):
        return Outcome.CRASHED, f"no fault of the plan can have caused this: {why}"
    if plan and len(end.missed) == len(plan):
        return Outcome.NOT_STRUCK, f"it ended before any fault: {reason}"
    return Outcome.ENDED, reason


def _compared(
    training: Training, folder: Path, report: dict[str, Any], state: dict[str, str], expected: Trial
) -> tuple[Outcome, str]:
    names = sorted((state.keys() | expected.state.keys()) - training.unstable)
    differ = [name for name in names if state.get(name) != expected.state.get(name)]
    # A worker that did not run the last step itself saves none of the variables that each step makes anew.
    both = state.keys() & expected.state.keys()
    after_all = any(one["resume"] == expected.iterations for one in report.get("recoveries", ()))
    anew = (_OF_THE_LOOP, _OF_THE_SCRIPT) if after_all else (_OF_THE_LOOP,)
    differ = [name for name in differ if name in both or not any(part in name for part in anew)]
    if not differ:
        return Outcome.IDENTICAL, ""
    shown = f"{len(differ)} of {len(names)} values and files differ: {', '.join(differ[:3])}"
    shown += ", ..." * (len(differ) > 3)
    recoveries = report.get("recoveries", ())
    if any(one["statistics_from"] for one in recoveries):
        rest = [name for name in differ if not name.endswith(_STATISTICS)]
        if not rest:
            return Outcome.BOUNDED, "running statistics of a lost replica are another one's"
    if any(one["undone"] for one in recoveries):
        urls = (training.store_of(folder), training.store_of(expected.folder))
        found = largest_difference(*urls, [name for name in differ if not name.startswith("file ")])
        if found <= UNDO_BOUND:
            return Outcome.BOUNDED, f"an undo without exact=True: values differ by {found:.2g} at most"
    return Outcome.WRONG, shown


def _reason(output: str) -> str:
    """The last line of the launcher itself; empty if it says nothing, or only with a traceback."""
    lines = [line for line in output.splitlines() if line]
    own = [line for line in lines if line.startswith("swift-run: ")]
    own_traceback = any(line.startswith("Traceback ") for line in lines)  # a worker's has a prefix
    return own[-1] if own and not own_traceback else ""
