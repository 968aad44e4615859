"""The outcome of a run: what its end says, and what it has computed beside the undisturbed one."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from swift_ft.checkpoint.state_digest import STORED_AS
from swift_ft.checkpoint.state_values import digests
from swift_ft.checkpoint.step.places import UNSAVED
from swift_ft.errors import SwiftError, first_line
from swift_ft.faults import Fault, parse_faults
from swift_ft.program.loop_frame import LOOP, PASSES_ON
from swift_ft.testing.chaos.comparison import (
    UNDO_BOUND,
    are_finite,
    files_of,
    largest_difference,
    last_state,
    names_by_saver,
    newest_intact,
    without_repeated,
)
from swift_ft.testing.chaos.endings import beyond_faults, take_nothing
from swift_ft.testing.chaos.run_folder import output_of, read_report
from swift_ft.testing.chaos.struck import damaged_by
from swift_ft.testing.chaos.trial import Outcome, Training, Trial
from swift_ft.testing.chaos.unstable import FILE, variable_of
from swift_ft.units import shortened

_OF_STEPS = tuple(f".carried.{name}." for name in (LOOP, PASSES_ON, ""))
"""Of variables in the functions that run the loop, and of the script itself, where that is in no function."""
_STATISTICS = ("running_mean", "running_var")
"""Of data that a replica has seen. How many batches that was is the same in all replicas."""
_DIGESTS = f".plain.bytes.{STORED_AS}."
"""Of digests that workers have compared: all values of which they are stand beside them."""
_NO_WORDS = digests([("", "")])[""]
"""The digest of what stands in the place of a value that could not travel if it were smaller either."""
_KEPT = re.compile(
    r"\[machine (\d+)(?: rank (\d+))?\] .*each replica has (.+) for itself: this worker keeps its own"
)
"""The words of swift_ft.runtime.replicas.own_variables. A rank is there if a machine has several workers."""


@dataclass(slots=True)
class End:
    """The end of a launcher, and all that was there then."""

    code: int | None
    output: str
    wall_s: float
    left: list[str] = field(default_factory=list)
    report: dict[str, Any] = field(default_factory=dict)
    missed: tuple[str, ...] = ()
    cpu_s: float | None = None


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
        return *_judged_error(end, plan, url, reason, folder), {}
    return _judged_state(training, folder, plan, end, expected)


def judged_again(trial: Trial, training: Training, expected: Trial) -> Trial:
    """The same run that ended well, where it is known now in which files undisturbed runs differ.

    Args:
        trial: the run.
        training: names them.
        expected: the undisturbed run.
    """
    plan, report = parse_faults(trial.plan), read_report(trial.folder)
    if "iteration" in trial.state:
        outcome, reason = _compared(training, trial.folder, report, trial.state, expected)
        outcome = _unless_missed(outcome, plan, trial.missed)
    else:
        output = output_of(trial.folder).read_text(errors="replace")
        end = End(trial.code, output, trial.wall_s, report=report, missed=trial.missed)
        outcome, reason, _ = _judged_state(training, trial.folder, plan, end, expected)
    return replace(trial, outcome=outcome, reason=reason)


def _judged_state(
    training: Training, folder: Path, plan: Sequence[Fault], end: End, expected: Trial | None
) -> tuple[Outcome, str, dict[str, str]]:
    """As :func:`judged`, of a run that ended well."""
    url, files = training.store_of(folder), files_of(folder)
    try:
        state = {**(last_state(url) if url else {}), **files}
    except SwiftError as error:
        why = f"its last checkpoint is damaged: {first_line(error)}"
        last = None if expected is None else expected.iterations
        try:
            intact = newest_intact(url, committed=last, damaged=damaged_by(plan, end.output, folder))
        except SwiftError:
            return Outcome.WRONG, why, {}
        if intact is None:
            why = f"{why}; no earlier one is left"
        if expected is not None and (reason := _unlike_before(training, folder, end, expected, intact)):
            return Outcome.WRONG, f"{why}; {reason}", files
        return Outcome.DAMAGED, why, files
    if "iteration" not in state:
        return Outcome.WRONG, "it left no checkpoint", state
    if expected is None:
        return _unless_missed(Outcome.IDENTICAL, plan, end.missed), "", state
    outcome, reason = _compared(training, folder, end.report, state, expected)
    return _unless_missed(outcome, plan, end.missed), reason, state


def _unlike_before(training: Training, folder: Path, end: End, expected: Trial, iteration: int | None) -> str:
    """The difference from the undisturbed run, where only an earlier checkpoint can be read.

    Args:
        training: what both have run.
        folder: the run's.
        end: its end.
        expected: the undisturbed run. Of its checkpoints it may have kept others.
        iteration: the checkpoint's; None if none can be read, so that files alone are compared.
    """
    url, other_url = (training.store_of(one) for one in (folder, expected.folder))
    there = last_state(other_url, iteration) if other_url and iteration is not None else {}
    here = last_state(url, iteration) if there else {}
    files = {name: digest for name, digest in expected.state.items() if _is_file(name)}
    then = replace(expected, state={**there, **files})
    state = {**here, **files_of(folder)}
    outcome, reason = _compared(training, folder, end.report, state, then, iteration)
    return reason if outcome == Outcome.WRONG else ""


def _unless_missed(outcome: Outcome, plan: Sequence[Fault], missed: Sequence[str]) -> Outcome:
    if outcome == Outcome.IDENTICAL and plan and len(missed) == len(plan):
        return Outcome.NOT_STRUCK
    return outcome


def _judged_error(
    end: End, plan: Sequence[Fault], url: str, reason: str, folder: Path
) -> tuple[Outcome, str]:
    """The outcome of a run that ended with a line."""
    events = end.report.get("events", ())
    if not events:
        return Outcome.CRASHED, f"it left no events, so its faults may have no part in this: {reason}"
    struck = [fault for fault in plan if str(fault) not in end.missed]
    if why := beyond_faults(events, struck):
        return Outcome.CRASHED, f"no fault of the plan can have caused this: {why}"
    if take_nothing(struck):
        return Outcome.CRASHED, f"its faults have taken nothing away: {reason}"
    committed = [event["iteration"] for event in events if event["event"] == "CheckpointCommitted"]
    is_whole = events[0]["position"] == 0  # else a snapshot took the place of the first, and may have had one
    when = "before its first checkpoint: "
    if committed or not is_whole:
        if not url:
            return Outcome.UNLOADABLE, reason
        last, damaged = committed[-1] if committed else None, damaged_by(plan, end.output, folder)
        try:
            intact = newest_intact(url, committed=last, damaged=damaged)
        except SwiftError:
            return Outcome.UNLOADABLE, reason
        when = "" if intact is not None else "faults have damaged each checkpoint that there was: "
    if plan and not struck:
        return Outcome.NOT_STRUCK, f"it ended before any fault: {reason}"
    return Outcome.ENDED, f"{when}{reason}"


def _compared(
    training: Training,
    folder: Path,
    report: dict[str, Any],
    state: dict[str, str],
    expected: Trial,
    iteration: int | None = None,
) -> tuple[Outcome, str]:
    """The outcome of a run that ended well, and how it differs from the undisturbed one.

    The state may be that of an earlier checkpoint, of this ``iteration``.
    """
    state = without_repeated(state, expected.state)
    differ = training.unstable.differing(state, expected.state)
    if iteration is not None:  # unstable ones that last states have, an earlier one need not have
        known = state.keys() | expected.state.keys()
        differ = [name for name in differ if _is_file(name) or name in known]
    if _came_after_all(report, expected):
        there = {variable_of(name) for name in state}
        differ = [name for name in differ if not _is_made_anew(name, there)]
    came_later = _came_later(report)
    differ = [name for name in differ if not _is_left_out(name, came_later, state, expected.state)]
    if not differ:
        return Outcome.IDENTICAL, ""
    # No bound is known of what a script makes of its values, and writes into a file.
    if not any(map(_is_file, differ)):
        if _are_its_own(folder, report, expected, differ):
            return Outcome.BOUNDED, "what a lost replica had for itself is as in its last checkpoint"
        urls = training.store_of(folder), training.store_of(expected.folder)
        if within := _bound(*urls, report.get("recoveries", ()), differ, iteration):
            return Outcome.BOUNDED, within
    compared = len(training.unstable.compared(state, expected.state))
    shown = f"{len(differ)} of {compared} values and files differ: {shortened(differ, 3)}"
    if _has_rounded(report.get("recoveries", ())):
        shown += "; an update was undone without exact=True, and training may have made more of it"
    return Outcome.WRONG, shown


def _bound(
    url: str,
    other_url: str,
    recoveries: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    iteration: int | None,
) -> str:
    """The documented reason for which values may differ as they do; empty if there is none."""
    values = [name for name in names if _DIGESTS not in name]
    statistics, reasons = [], []
    if replaced := {int(rank) for one in recoveries for rank in one["statistics_from"]}:
        theirs = tuple(name for rank, name in names_by_saver(url, iteration).items() if rank in replaced)
        of_them = [name for name in values if name.startswith(theirs)]
        statistics = [name for name in of_them if name.rpartition(".")[2] in _STATISTICS]
    if statistics:
        if not are_finite(url, other_url, statistics, iteration):
            return ""
        reasons.append("running statistics of a lost replica are another one's")
    if others := [name for name in values if name not in statistics]:
        found = math.inf
        if _has_rounded(recoveries):
            found = largest_difference(url, other_url, others, iteration)
        if found > UNDO_BOUND:
            return ""
        reasons.append(f"an undo without exact=True: values differ by {found:.2g} at most")
    elif len(values) < len(names):  # digests of values that do not differ themselves
        return ""
    return "; ".join(reasons)


def _has_rounded(recoveries: Sequence[Mapping[str, Any]]) -> bool:
    """Whether an update was undone by an optimizer that does not bring back each bit."""
    return any(len(one["undone"]) > len(one["undone_exactly"]) for one in recoveries)


def _are_its_own(folder: Path, report: Mapping[str, Any], expected: Trial, names: Sequence[str]) -> bool:
    """Whether values are variables that each replica has for itself, of workers that came after all steps.

    No step sets them any more, and nobody else had them (docs/step.md). The worker has named them.
    """
    recoveries = [one for one in report.get("recoveries", ()) if one["resume"] == expected.iterations]
    restored = {rank for one in recoveries for rank in one.get("restored", ())}
    if not restored or not all(any(kind in name for kind in _OF_STEPS) for name in names):
        return False
    kept = {
        f"worker {rank}.plain.bytes.carried.{variable if '.' in variable else f'.{variable}'}"
        for rank, own in _kept_by_workers(output_of(folder).read_text(errors="replace"))
        for variable in own
        if rank in restored
    }
    return {variable_of(name) for name in names} <= kept


def _kept_by_workers(output: str) -> Iterator[tuple[int, list[str]]]:
    """The variables that workers have said to have for themselves."""
    for machine, rank, names in _KEPT.findall(output):
        yield int(rank or machine), names.removesuffix(", ...").split(", ")


def _came_after_all(report: Mapping[str, Any], expected: Trial) -> bool:
    """Whether some process may have run no step itself: it took over when the last one was complete."""
    recoveries, worlds = report.get("recoveries", ()), report.get("worlds", ())
    begun = [one["resume"] for one in recoveries]
    begun += [one["iteration"] for one in worlds if one["switched"] is not None]
    return expected.iterations in begun


def _is_made_anew(name: str, there: Collection[str | None]) -> bool:
    """Whether a variable that cannot be saved is not there: the process has run no step that makes it.

    Args:
        name: the whole name of a value in it.
        there: all variables that the process has saved.
    """
    variable = variable_of(name)
    made_by_steps = any(kind in (variable or "") for kind in _OF_STEPS)
    return made_by_steps and name.endswith(f".{UNSAVED}") and variable not in there


def _came_later(report: Mapping[str, Any]) -> set[int]:
    """The ranks whose last process is not the one that the run began with."""
    ends = (event for event in report.get("events", ()) if event["event"] == "ScriptExited")
    return {event["rank"] for event in ends if event["started_in"] > 1}


def _is_left_out(
    name: str, came_later: Collection[int], state: Mapping[str, str], expected: Mapping[str, str]
) -> bool:
    """Whether it is a variable that could not travel at any size, of a process that came later.

    A file for instance, that a line has opened which this process has never run.

    Args:
        name: the whole name of a value that only one of two runs has, if so.
        came_later: ranks.
        state: digests of the disturbed run.
        expected: those of the undisturbed one.
    """
    variable = variable_of(name)
    if variable is None or not name.endswith(f".{UNSAVED}") or not any(k in variable for k in _OF_STEPS):
        return False
    if not any(name.startswith(f"worker {rank}.") for rank in came_later) or name in state.keys() & expected:
        return False
    ours, theirs = (
        {key: digest for key, digest in one.items() if variable_of(key) == variable}
        for one in (state, expected)
    )
    unsaved = all(key.endswith(f".{UNSAVED}") for key in (*ours, *theirs))
    return bool(theirs) and unsaved and {*ours.values(), *theirs.values()} == {_NO_WORDS}


def _is_file(name: str) -> bool:
    return name.startswith(FILE)


def _reason(output: str) -> str:
    """The last line of the launcher itself; empty if it says nothing, or only with a traceback."""
    lines = [line for line in output.splitlines() if line]
    own = [line for line in lines if line.startswith("swift-run: ")]
    own_traceback = any(line.startswith("Traceback ") for line in lines)  # a worker's has a prefix
    return own[-1] if own and not own_traceback else ""
