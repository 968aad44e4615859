"""One run of a real training under swift-run, disturbed or not."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from swift_ft.faults import Action, Fault, parse_faults
from swift_ft.faults.fault import DEFAULT_FACTOR, DEFAULT_SECONDS
from swift_ft.faults.strikes import AWAY
from swift_ft.storage.store import Store
from swift_ft.testing.chaos.forked_launchers import LAUNCHER
from swift_ft.testing.chaos.judging import End, judged
from swift_ft.testing.chaos.launchers import LAUNCHERS, LauncherEnd
from swift_ft.testing.chaos.leftovers import left_by, shared_memory
from swift_ft.testing.chaos.run_folder import (
    FOLDER,
    logs_of,
    new_own,
    output_of,
    read_report,
    report_of,
    search_path,
    working_directory,
)
from swift_ft.testing.chaos.struck import missed_of
from swift_ft.testing.chaos.trial import Training, Trial

_BACK_S = 60.0
_RECOVERY_S = 60.0
"""For the recovery from one fault: a new machine starts, and silence is waited for."""


def run_trial(
    training: Training,
    folder: Path,
    plan: Sequence[Fault] = (),
    expected: Trial | None = None,
    *,
    learns: bool = False,
    parallel: int = 1,
) -> Trial:
    """Run the training once, and compare it.

    Args:
        training: what.
        folder: an empty folder of this run's own.
        plan: the faults.
        expected: the undisturbed run; None if this is that one.
        learns: note the points that workers pass, for plans.
        parallel: runs at a time, with which it may share this host.
    """
    text = "; ".join(map(str, plan))
    if expected is not None:
        training = replace(training, deadline_s=limit_of(training, plan, expected, parallel))
    end, leaves = _run(training, folder, text or (_NEVER if learns else ""), expected)
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
        spent_s=end.wall_s,
        cpu_s=end.cpu_s,
        points=frozenset(report.get("passed_points", ())),
        checkpoints=_iterations(report, "CheckpointCommitted"),
        completed=max(_iterations(report, "ScriptExited"), default=0),
        leaves=leaves,
    )


def _iterations(report: Mapping[str, Any], event: str) -> tuple[int, ...]:
    """The iterations of all events of a kind that have one."""
    events = (one for one in report.get("events", ()) if one["event"] == event)
    return tuple(one["iteration"] for one in events if one["iteration"] is not None)


def limit_of(training: Training, plan: Sequence[Fault], expected: Trial, parallel: int = 1) -> float:
    """Seconds after which a disturbed run counts as hung: its faults may take their time.

    Args:
        training: has the limit that was asked for, which is the shortest one.
        plan: the faults.
        expected: the undisturbed run.
        parallel: runs at a time. They share the cores of this host, which that one may have had for itself.
    """
    slow = [fault.factor or DEFAULT_FACTOR for fault in plan if fault.action == Action.SLOW]
    lasts = [fault.lasts_s for fault in plan if fault.action in DEFAULT_SECONDS.keys() - {Action.CLOCK}]
    # Each fault may cost all that was computed until then, and it is computed again.
    computes_s = parallel * expected.wall_s * (max(slow, default=1.0) + max(1, len(plan)))
    return max(training.deadline_s, computes_s + sum(lasts) + _RECOVERY_S * len(plan))


_NEVER = "kill machine=0 iteration=999999999"
"""With it workers say which points they pass, and nothing strikes."""


def _run(training: Training, folder: Path, inject: str, expected: Trial | None) -> tuple[End, frozenset[str]]:
    """The end of a run, and the kinds of names that it has left in shared memory."""
    temporary = Path(tempfile.mkdtemp(prefix="swift-chaos-"))  # a short path: loaders have sockets there
    before, began = shared_memory(), time.monotonic()
    try:
        ended = _launched(training, folder, inject, temporary)
        output = output_of(folder).read_text(errors="replace")
        took_s = time.monotonic() - began
        _wait_for_store(training, folder, inject)
        left = left_by(folder, temporary, before, None if expected is None else expected.leaves)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    end = End(ended.code, output, took_s, left.found, read_report(folder), cpu_s=ended.cpu_s)
    return end, left.kinds


def _wait_for_store(training: Training, folder: Path, inject: str) -> None:
    """A store that has vanished comes back after the time that the fault says, whenever the run ended."""
    if not any(fault.action == Action.VANISH for fault in parse_faults(inject)):
        return
    url = training.store_of(folder)
    store = Store(url).local_path("") if url else None
    if store is None:
        return
    # A store that is looked for in the run's folder may be found where it is meanwhile.
    away = store.with_name(f"{store.name.removesuffix(AWAY)}{AWAY}")
    deadline = time.monotonic() + _BACK_S
    while away.exists() and time.monotonic() < deadline:
        LAUNCHERS.check()
        time.sleep(0.1)


def _launched(training: Training, folder: Path, inject: str, temporary: Path) -> LauncherEnd:
    launcher = [LAUNCHER, *training.launch, "--inject", inject]
    launcher += ["--log-dir", str(logs_of(folder)), "--events-out", str(report_of(folder))]
    launcher += _own_name(training, folder)
    if training.checkpoint_at is not None:
        launcher += ["--checkpoint-at", str(training.checkpoint_at)]
    script = [argument.replace(FOLDER, str(folder)) for argument in training.command]
    new_own(folder)
    return LAUNCHERS.run(
        [*launcher, *script],
        folder,
        training.deadline_s,
        output=output_of(folder),
        cwd=working_directory(training.script, folder),
        environment={"TMPDIR": str(temporary), **search_path(training.script)},
        server=training.server,
    )


def _own_name(training: Training, folder: Path) -> list[str]:
    """The flags by which a run in a rendezvous store that others use, too, joins none of these others.

    The last one of a flag counts.
    """
    flags = [flag.replace("_", "-") for flag in training.launch]
    shares = any(flag.startswith(("--rdzv-backend", "--rdzv-endpoint")) for flag in flags)
    return ["--rdzv-id", f"chaos-{folder.parent.name}-{folder.name}"] if shares else []
