"""One run of a real training under swift-run, disturbed or not, and how it ended."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from swift_ft.errors import SwiftError, first_line
from swift_ft.faults import Action, Fault, parse_faults
from swift_ft.faults.strikes import AWAY
from swift_ft.testing.chaos.comparison import (
    UNDO_BOUND,
    files_of,
    largest_difference,
    last_state,
    loads,
    store_in,
)
from swift_ft.testing.chaos.habits import Habit
from swift_ft.testing.chaos.leftovers import MARK, left_by, shared_memory

FOLDER = "{folder}"
"""Stands for a folder of each run's own in a script's arguments."""
_GRACE_S = 20.0
_BACK_S = 60.0
_REPORT = "events.json"
_PLANTED = str(Path(__file__).with_name("planted.py"))
_DAMAGES = (Action.FLIP, Action.TRUNCATE)
_OF_THE_LOOP = ".carried.(loop)."
_OF_THE_SCRIPT = ".carried.."
"""Of variables of the script itself, among them those of a loop that is in no function."""
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class Outcome(StrEnum):
    """The outcome of a disturbed run, in comparison with the undisturbed one."""

    IDENTICAL = "identical"
    """Its last checkpoint and its script's files are those of the undisturbed run, bit for bit."""
    BOUNDED = "within bound"
    """They differ as far as a documented way of recovery may let them: an undo that is not exact, or running
    statistics of a lost replica."""
    NOT_STRUCK = "not struck"
    """None of its faults struck: it shows nothing."""
    ENDED = "ended"
    """It ended with an error in one line, and a checkpoint that loads. Nothing is silently wrong."""
    WRONG = "WRONG"
    """It ended well, with another state or other files."""
    HUNG = "HUNG"
    """It did not end in time."""
    CRASHED = "CRASHED"
    """It ended with a traceback of swift_ft's own, or without saying why."""
    LEAKED = "LEAKED"
    """It left processes, shared memory, temporary files or sockets behind."""
    UNLOADABLE = "NO CHECKPOINT"
    """It ended with an error in one line, and none of its checkpoints loads."""

    @property
    def is_good(self) -> bool:
        """Whether a campaign of such outcomes alone has found nothing."""
        return self in (Outcome.IDENTICAL, Outcome.BOUNDED, Outcome.ENDED)


@dataclass(frozen=True, slots=True)
class Training:
    """The training that all trials run.

    Attributes:
        launch: flags of swift-run.
        script: the script and its arguments; ``{folder}`` stands for a folder of each run's own. If none of
            them has it, each run's working directory is that folder.
        store: the run's store, with ``{folder}``; empty for the one that the run has in its folder.
        deadline_s: seconds after which a run counts as hung.
        habits: that are planted into the script.
        unstable: names of values and files that differ between undisturbed runs, and so are not compared.
    """

    launch: tuple[str, ...]
    script: tuple[str, ...]
    store: str
    deadline_s: float
    habits: tuple[Habit, ...] = ()
    unstable: frozenset[str] = frozenset()

    @property
    def command(self) -> tuple[str, ...]:
        """The script with its habits, and its arguments."""
        return (_PLANTED, ",".join(self.habits), *self.script) if self.habits else self.script

    def store_of(self, folder: Path) -> str:
        """The store of the run in a folder; empty if it has none."""
        return self.store.replace(FOLDER, str(folder)) if self.store else store_in(folder) or ""


@dataclass(frozen=True, slots=True)
class Trial:
    """One run.

    Attributes:
        plan: the faults, as ``--inject`` reads them.
        outcome: how it ended.
        code: exit code; None if it hung.
        reason: the line with which it ended, or what is wrong; empty if nothing is.
        state: digest of each value in the last checkpoint and of each file, by name.
        folder: where its output is.
        habits: that were planted.
        missed: faults that never struck; known only of a run that ended well.
        ways: the mode of each of its recoveries, in order.
        recovery_s: seconds of all recoveries.
        lost: completed iterations that were computed again.
        wall_s: seconds of the whole run.
        seed: of its plan; None if the plan was given.
        points: that its workers passed; known of the undisturbed run.
        checkpoints: the iterations of its committed checkpoints.
    """

    plan: str
    outcome: Outcome
    code: int | None
    reason: str
    state: dict[str, str]
    folder: Path
    habits: tuple[Habit, ...] = ()
    missed: tuple[str, ...] = ()
    ways: tuple[str, ...] = ()
    recovery_s: float = 0.0
    lost: int = 0
    wall_s: float = 0.0
    seed: int | None = None
    points: frozenset[str] = frozenset()
    checkpoints: tuple[int, ...] = ()

    @property
    def iterations(self) -> int:
        """Of the training: a run ends with a checkpoint."""
        return int(self.state.get("iteration", 0))


@dataclass(slots=True)
class _End:
    """The end of a launcher, and all that was there then."""

    code: int | None
    output: str
    wall_s: float
    left: list[str] = field(default_factory=list)
    report: dict[str, Any] = field(default_factory=dict)


def run_trial(
    training: Training,
    folder: Path,
    plan: Sequence[Fault] = (),
    expected: Trial | None = None,
    *,
    learns: bool = False,
) -> Trial:
    """Run the training once, and compare it.

    Args:
        training: what.
        folder: an empty folder of this run's own.
        plan: the faults.
        expected: the undisturbed run; None if this is that one.
        learns: note the points that workers pass, for plans.
    """
    text = "; ".join(map(str, plan))
    end = _run(training, folder, text or (_NEVER if learns else ""), killed=bool(plan))
    report = end.report
    missed = tuple(report.get("missed_faults", ())) if plan else ()
    if (
        end.code == 1 and report.get("ok") and report.get("missed_faults")
    ):  # all went well but for these faults
        end.code = 0
    outcome, reason, state = _judged(training, folder, plan, end, expected)
    if outcome == Outcome.IDENTICAL and plan and len(missed) == len(plan):
        outcome = Outcome.NOT_STRUCK
    recoveries = report.get("recoveries", ())
    return Trial(
        text,
        outcome,
        end.code,
        reason,
        state,
        folder,
        training.habits,
        missed,
        ways=tuple(recovery["mode"] or "unfinished" for recovery in recoveries),
        recovery_s=sum((one["live"] or one["detected"]) - one["detected"] for one in recoveries),
        lost=sum(max(one["iterations_lost"].values(), default=0) for one in recoveries),
        wall_s=end.wall_s,
        points=frozenset(report.get("passed_points", ())),
        checkpoints=tuple(
            event["iteration"]
            for event in report.get("events", ())
            if event["event"] == "CheckpointCommitted"
        ),
    )


_NEVER = "kill machine=0 iteration=999999999"
"""With it workers say which points they pass, and nothing strikes."""


def _judged(
    training: Training, folder: Path, plan: Sequence[Fault], end: _End, expected: Trial | None
) -> tuple[Outcome, str, dict[str, str]]:
    """The outcome, why, and the state as far as it is known."""
    if end.code is None:
        last = next((line for line in reversed(end.output.splitlines()) if line.strip()), "no line")
        return Outcome.HUNG, f"not over after {training.deadline_s:g} s; its last line: {last}", {}
    url = training.store_of(folder)
    reason = _reason(end.output)
    if end.code != 0 and not reason:
        return Outcome.CRASHED, f"exit code {end.code}, and no line that says why", {}
    if end.left:
        return Outcome.LEAKED, "left behind: " + "; ".join(end.left), {}
    if end.code != 0:
        if not url or not loads(url):
            return Outcome.UNLOADABLE, reason, {}
        return Outcome.ENDED, reason, {}
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


def _run(training: Training, folder: Path, inject: str, *, killed: bool) -> _End:
    temporary = Path(tempfile.mkdtemp(prefix="swift-chaos-"))  # a short path: loaders have sockets there
    before, began = shared_memory(), time.monotonic()
    try:
        code, output = _launched(training, folder, inject, temporary)
        took_s = time.monotonic() - began
        _wait_for_store(folder, inject)
        left = left_by(folder, temporary, before, killed=killed)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    (folder / "output.log").write_text(output)
    try:
        report: dict[str, Any] = json.loads((folder / _REPORT).read_text())
    except OSError:  # the launcher wrote none
        report = {}
    return _End(code, output, took_s, left, report)


def _wait_for_store(folder: Path, inject: str) -> None:
    """A store that has vanished comes back after the time that the fault says, whenever the run ended."""
    if any(fault.action == Action.VANISH for fault in parse_faults(inject)):
        deadline = time.monotonic() + _BACK_S
        while any(folder.rglob(f"*{AWAY}")) and time.monotonic() < deadline:
            time.sleep(0.1)


def _launched(training: Training, folder: Path, inject: str, temporary: Path) -> tuple[int | None, str]:
    launcher = [sys.executable, "-m", "swift_ft.cli.run", *training.launch]
    launcher += ["--log-dir", str(folder / "logs"), "--events-out", str(folder / _REPORT)]
    launcher += ["--inject", inject]
    at_home = any(FOLDER in argument for argument in training.script)
    script = [argument.replace(FOLDER, str(folder)) for argument in training.command]
    environment = {**os.environ, MARK: str(folder), "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary)}
    with (folder / "console").open("w+", errors="replace") as console:
        process = subprocess.Popen(
            [*launcher, *script],
            stdout=console,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
            cwd=None if at_home else folder,
        )
        code: int | None
        try:
            code = process.wait(training.deadline_s)
        except subprocess.TimeoutExpired:
            code = None
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait(_GRACE_S)
        console.seek(0)
        return code, console.read()


def _reason(output: str) -> str:
    """The last line of the launcher itself; empty if it says nothing, or only with a traceback."""
    lines = [line for line in output.splitlines() if line]
    own = [line for line in lines if line.startswith("swift-run: ")]
    own_traceback = any(line.startswith("Traceback ") for line in lines)  # a worker's has a prefix
    return own[-1] if own and not own_traceback else ""
