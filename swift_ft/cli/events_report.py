"""The report of ``swift-run --events-out``: all events and recoveries of a run, as JSON."""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from swift_ft.checkpoint.recording_file import StoredRecording
from swift_ft.cli.timeline.words import path_in_words
from swift_ft.coordination.journal_reader import Excerpt
from swift_ft.errors import first_line
from swift_ft.faults import Fault
from swift_ft.offline.recovery_spans import read_recordings, trace_recoveries
from swift_ft.recovery.history import History
from swift_ft.recovery.job_state import Verdict
from swift_ft.storage.read_only import ReadOnlyStore

_logger = logging.getLogger(__name__)

_STORE_PATIENCE_S = 10.0
"""The time for which the report of a run waits for the session's store."""


def write_report(
    file: str,
    verdict: Verdict,
    excerpt: Excerpt,
    run_id: str,
    store: str,
    missed: Sequence[Fault] = (),
    passed: Collection[str] = (),
) -> None:
    """Write what the journal tells. The file appears whole, also where several launchers share its folder.

    The launcher of a machine that came late tells what was since the snapshot that it began with.

    Args:
        file: where.
        verdict: how the run ended.
        excerpt: the entries of the journal.
        run_id: the run.
        store: the session's, which has what each process did in recoveries; empty if it is not known.
        missed: injected faults that never struck.
        passed: points for faults that workers passed; known where a fault was injected.
    """
    history = History.of(excerpt.entries, excerpt.began)
    report = {
        "ok": verdict.ok,
        "reason": verdict.reason,
        "missed_faults": [str(fault) for fault in missed],
        "passed_points": sorted(set(passed)),
        "recoveries": _recoveries(history, run_id, store),
        "incidents": [incident.to_dict() for incident in history.incidents],
        "layouts": [change.to_dict() for change in history.layouts],
        "worlds": [change.to_dict() for change in history.worlds],
        "loads": [load.to_dict() for load in history.loads],
        "events": [entry.to_dict() for entry in excerpt.entries],
    }
    path = Path(file)
    draft = path.with_name(f"{path.name}.{socket.gethostname()}.{os.getpid()}.tmp")
    draft.write_text(json.dumps(report, indent=1))
    draft.replace(path)


def _recoveries(history: History, run_id: str, url: str) -> list[dict[str, Any]]:
    """Each recovery as the journal tells it, with the spans of all processes where it ended."""
    ended = {recovery.generation for recovery in history.recoveries if recovery.live is not None}
    recordings: list[StoredRecording] = []
    if url and ended:
        try:
            store = ReadOnlyStore(url, patience_s=_STORE_PATIENCE_S)
            recordings, damages = read_recordings(store, run_id, ended)
        except Exception as error:  # clients of stores raise all kinds of errors, and the journal is here
            damages = [f"the session's store cannot be read: {first_line(error)}"]
        for damage in damages:
            _logger.warning("--events-out: %s", damage, extra={"event": "recordings_not_read"})
    traced = trace_recoveries(history.courses, recordings)
    reports = []
    for recovery in history.recoveries:
        course = traced.get(recovery.generation) if recovery.live is not None else None
        path = path_in_words(course.path) if course is not None else None
        trace = course.to_dict() if course is not None else None
        reports.append({**recovery.to_dict(), "path": path, "trace": trace})
    return reports
