"""Other campaigns count ends as this tool does: an error that no fault had a part in is a finding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.recovery.campaign import _is_bad, report
from swift_ft.testing.chaos.trial import Outcome, Trial
from tests.support.change_chaos import Plan, _judged
from tests.support.cluster import ClusterRun

FAULT = "kill machine=1 iteration=3 point=between"
STRUCK = {"event": "FaultInjected", "fault": FAULT}
FAILED = {
    "event": "ScriptFailed",
    "machine": "a",
    "started_in": 1,
    "reason": "worker 0: KeyError: 'x'",
    "cause": "script",
    "usage": False,
}
LOST = {"event": "JobClosed", "by": "agent 0", "reason": "nobody is left", "cause": "machine"}


@pytest.mark.parametrize(
    ("events", "outcome", "reason"),
    [
        ([STRUCK, LOST], "ended", "swift-run: the reason"),
        ([STRUCK, FAILED], "CRASHED", "worker 0: KeyError: 'x'"),
        ([LOST], "CRASHED", "no fault struck: swift-run: the reason"),
    ],
)
def test_a_change_that_ends_with_an_error(
    tmp_path: Path, events: list[dict[str, Any]], outcome: str, reason: str
) -> None:
    told = {"ok": False, "missed_faults": [], "recoveries": [], "events": events, "worlds": []}
    run = ClusterRun(tmp_path, 1, "swift-run: the reason\n", told)
    result = _judged(
        run, Plan("train_ddp", (), FAULT, ()), lambda *_: pytest.fail("it is compared with none")
    )
    assert (result.outcome, result.reason) == (outcome, reason)


def trial(outcome: Outcome, reason: str = "") -> Trial:
    return Trial(FAULT, outcome, 1, reason, {}, Path())


def test_a_campaign_over_topologies_counts_a_run_that_ended_by_itself() -> None:
    by_itself = trial(Outcome.NOT_STRUCK, "it ended before any fault: no data")
    assert _is_bad(by_itself)
    assert not _is_bad(trial(Outcome.NOT_STRUCK))
    assert not _is_bad(trial(Outcome.ENDED, "no machine is left"))
    (row,) = [
        line for line in report({"a": [by_itself]}, 0, 1).splitlines() if "ended before any fault" in line
    ]
    assert "| 1 |" in row
