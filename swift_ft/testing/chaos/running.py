"""One run of a real training under swift-run, disturbed or not."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from swift_ft.faults import Action, Fault, parse_faults
from swift_ft.faults.strikes import AWAY
from swift_ft.testing.chaos.judging import End, judged
from swift_ft.testing.chaos.leftovers import MARK, left_by, shared_memory
from swift_ft.testing.chaos.run_folder import (
    FOLDER,
    is_at_home,
    logs_of,
    new_own,
    output_of,
    read_report,
    report_of,
)
from swift_ft.testing.chaos.struck import missed_of
from swift_ft.testing.chaos.trial import Training, Trial

_GRACE_S = 20.0
_BACK_S = 60.0


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
    if end.code == 1 and report.get("ok") and report.get("missed_faults"):
        end.code = 0  # all went well but for these faults
    end.missed = missed_of(report, plan, end.output, folder)
    outcome, reason, state = judged(training, folder, plan, end, expected)
    recoveries = report.get("recoveries", ())
    return Trial(
        text,
        outcome,
        end.code,
        reason,
        state,
        folder,
        training.habits,
        end.missed,
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


def _run(training: Training, folder: Path, inject: str, *, killed: bool) -> End:
    temporary = Path(tempfile.mkdtemp(prefix="swift-chaos-"))  # a short path: loaders have sockets there
    before, began = shared_memory(), time.monotonic()
    try:
        code, output = _launched(training, folder, inject, temporary)
        took_s = time.monotonic() - began
        _wait_for_store(folder, inject)
        left = left_by(folder, temporary, before, killed=killed)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    output_of(folder).write_text(output)
    return End(code, output, took_s, left, read_report(folder))


def _wait_for_store(folder: Path, inject: str) -> None:
    """A store that has vanished comes back after the time that the fault says, whenever the run ended."""
    if any(fault.action == Action.VANISH for fault in parse_faults(inject)):
        deadline = time.monotonic() + _BACK_S
        while any(folder.rglob(f"*{AWAY}")) and time.monotonic() < deadline:
            time.sleep(0.1)


def _launched(training: Training, folder: Path, inject: str, temporary: Path) -> tuple[int | None, str]:
    launcher = [sys.executable, "-m", "swift_ft.cli.run", *training.launch]
    launcher += ["--log-dir", str(logs_of(folder)), "--events-out", str(report_of(folder))]
    launcher += ["--inject", inject]
    script = [argument.replace(FOLDER, str(folder)) for argument in training.command]
    environment = {**os.environ, MARK: str(folder), "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary)}
    with (new_own(folder) / "console").open("w+", errors="replace") as console:
        process = subprocess.Popen(
            [*launcher, *script],
            stdout=console,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
            cwd=None if is_at_home(training.script) else folder,
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
