"""A fault has struck where the run says so; one of a store where a call has met it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from swift_ft.faults import parse_faults
from swift_ft.testing.chaos.run_folder import logs_of
from swift_ft.testing.chaos.struck import damaged_by, missed_of

PLAN = parse_faults(
    "kill machine=1 iteration=3 point=optimizer; full machine=all iteration=3 point=optimizer calls=2"
)
KILL, FULL = map(str, PLAN)
MET = f"the first call that '{FULL}' meets: grow ('/store/file',)"


def report(*struck: str, ok: bool, began: int = 0) -> dict[str, Any]:
    events = [
        {"event": "FaultInjected", "fault": fault, "position": began + n} for n, fault in enumerate(struck)
    ]
    missed = [fault for fault in (KILL, FULL) if fault not in struck] if ok else []
    return {"ok": ok, "missed_faults": missed, "events": events}


@pytest.mark.parametrize("ok", [True, False])
def test_what_the_journal_does_not_have_has_not_struck(tmp_path: Path, ok: bool) -> None:
    assert missed_of(report(ok=ok), PLAN, MET, tmp_path) == (KILL, FULL)
    assert missed_of(report(FULL, ok=ok), PLAN, MET, tmp_path) == (KILL,)
    assert missed_of(report(KILL, FULL, ok=ok), PLAN, MET, tmp_path) == ()


def test_a_fault_of_the_store_that_no_call_has_met_has_not_struck(tmp_path: Path) -> None:
    assert missed_of(report(KILL, FULL, ok=True), PLAN, "all is well", tmp_path) == (FULL,)


def test_a_log_of_a_worker_tells_of_the_call(tmp_path: Path) -> None:
    log = logs_of(tmp_path) / "0" / "stderr.log"
    log.parent.mkdir(parents=True)
    log.write_text(f"a line\n{MET}\n")
    assert missed_of(report(KILL, FULL, ok=True), PLAN, "", tmp_path) == ()
    log.write_text(MET.replace("calls=2", "calls=3"))  # of another fault
    assert missed_of(report(KILL, FULL, ok=True), PLAN, "", tmp_path) == (FULL,)


@pytest.mark.parametrize("action", ["flip", "truncate", "vanish"])
def test_a_fault_that_has_found_no_file_has_not_struck(action: str, tmp_path: Path) -> None:
    """Its worker says so: the journal had it before."""
    plan = parse_faults(f"{action} worker=0 iteration=3 point=between")
    told = {"ok": True, "missed_faults": [], "events": []}
    assert missed_of(told, plan, f"'{plan[0]}' found nothing to strike", tmp_path) == (str(plan[0]),)
    assert missed_of(told, plan, f"an injected fault strikes: {plan[0]}", tmp_path) == ()


def test_a_worker_says_which_file_a_fault_has_damaged(tmp_path: Path) -> None:
    """In what the launcher prints, or in its log alone."""
    plan = parse_faults("flip worker=0 iteration=3 point=between; kill machine=1 iteration=3")
    log = logs_of(tmp_path) / "0" / "stderr.log"
    log.parent.mkdir(parents=True)
    log.write_text(f"[machine 0] swift_ft: '{plan[0]}' has struck log/rank-00000/a\na line\n")
    said = f"[machine 0] '{plan[0]}' has struck checkpoints/00000004/committed.json"
    found = {"log/rank-00000/a", "checkpoints/00000004/committed.json"}
    assert damaged_by(plan, said, tmp_path) == found
    assert damaged_by(plan[1:], said, tmp_path) == set()


def test_a_journal_without_its_beginning_tells_of_no_missed_fault(tmp_path: Path) -> None:
    """A long run's journal begins with a snapshot."""
    assert missed_of(report(FULL, ok=False, began=900), PLAN, MET, tmp_path) == ()


def test_a_run_without_a_plan_misses_nothing(tmp_path: Path) -> None:
    assert missed_of({}, (), "", tmp_path) == ()


def test_without_a_report_the_output_tells(tmp_path: Path) -> None:
    """As of a launcher that was killed."""
    assert missed_of({}, PLAN, f"an injected fault strikes: {KILL}", tmp_path) == (FULL,)
    assert missed_of({}, PLAN, "", tmp_path) == (KILL, FULL)
