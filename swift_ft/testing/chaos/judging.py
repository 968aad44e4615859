"""The outcome of a run: what its end says, and what it has computed beside the undisturbed one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from swift_ft.errors import SwiftError, first_line
from swift_ft.faults import Action, Fault, parse_faults
from swift_ft.program.loop_frame import LOOP, PASSES_ON
from swift_ft.testing.chaos.comparison import UNDO_BOUND, files_of, largest_difference, last_state, loads
from swift_ft.testing.chaos.endings import beyond_faults
from swift_ft.testing.chaos.run_folder import read_report
from swift_ft.testing.chaos.trial import Outcome, Training, Trial

_DAMAGES = (Action.FLIP, Action.TRUNCATE)
_OF_THE_LOOP = tuple(f".carried.{name}." for name in (LOOP, PASSES_ON))
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
        struck = [fault for fault in plan if str(fault) not in end.missed]
        damaged = any(fault.action in _DAMAGES for fault in struck) and loads(url)
        why = f"its last checkpoint is damaged: {first_line(error)}"
        return (Outcome.ENDED if damaged else Outcome.WRONG), why, {}
    if "iteration" not in state:
        return Outcome.WRONG, "it left no checkpoint", state
    if expected is None:
        return _unless_missed(Outcome.IDENTICAL, plan, end.missed), "", state
    outcome, reason = _compared(training, folder, end.report, state, expected)
    return _unless_missed(outcome, plan, end.missed), reason, state


def judged_again(trial: Trial, training: Training, expected: Trial) -> Trial:
    """The same run that ended well, where it is known now in which files undisturbed runs differ.

    Args:
        trial: the run.
        training: names them.
        expected: the undisturbed run.
    """
    outcome, reason = _compared(training, trial.folder, read_report(trial.folder), trial.state, expected)
    return replace(
        trial, outcome=_unless_missed(outcome, parse_faults(trial.plan), trial.missed), reason=reason
    )


def _unless_missed(outcome: Outcome, plan: Sequence[Fault], missed: Sequence[str]) -> Outcome:
    if outcome == Outcome.IDENTICAL and plan and len(missed) == len(plan):
        return Outcome.NOT_STRUCK
    return outcome


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
    """The outcome of a run that ended well, and how it differs from the undisturbed one."""
    recoveries = report.get("recoveries", ())
    after_all = any(one["resume"] == expected.iterations for one in recoveries)
    names = sorted((state.keys() | expected.state.keys()) - training.unstable)
    differ = [name for name in names if state.get(name) != expected.state.get(name)]
    differ = [name for name in differ if not _is_made_anew(name, state, expected, after_all=after_all)]
    if not differ:
        return Outcome.IDENTICAL, ""
    shown = f"{len(differ)} of {len(names)} values and files differ: {', '.join(differ[:3])}"
    shown += ", ..." * (len(differ) > 3)
    if any(map(_is_file, differ)):  # no bound is known of what a script makes of its values
        return Outcome.WRONG, shown
    if any(one["statistics_from"] for one in recoveries) and all(n.endswith(_STATISTICS) for n in differ):
        return Outcome.BOUNDED, "running statistics of a lost replica are another one's"
    if any(one["undone"] for one in recoveries):
        found = largest_difference(training.store_of(folder), training.store_of(expected.folder), differ)
        if found <= UNDO_BOUND:
            return Outcome.BOUNDED, f"an undo without exact=True: values differ by {found:.2g} at most"
    return Outcome.WRONG, shown


def _is_made_anew(name: str, state: dict[str, str], expected: Trial, *, after_all: bool) -> bool:
    """Whether only one of the runs has saved a variable that each step makes again.

    A worker that did not run the last step itself saves none of them; one that came after it, also none of
    the script's own.
    """
    kinds = (*_OF_THE_LOOP, _OF_THE_SCRIPT) if after_all else _OF_THE_LOOP
    in_both = name in state and name in expected.state
    return not in_both and not _is_file(name) and any(kind in name for kind in kinds)


def _is_file(name: str) -> bool:
    return name.startswith("file ")


def _reason(output: str) -> str:
    """The last line of the launcher itself; empty if it says nothing, or only with a traceback."""
    lines = [line for line in output.splitlines() if line]
    own = [line for line in lines if line.startswith("swift-run: ")]
    own_traceback = any(line.startswith("Traceback ") for line in lines)  # a worker's has a prefix
    return own[-1] if own and not own_traceback else ""
