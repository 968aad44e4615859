"""``swift-recover timeline`` on real runs, whose events can be counted by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from swift_ft.offline.lost_time import Cause
from swift_ft.offline.run_store import open_run_store
from swift_ft.offline.timeline import RunTimeline, run_timeline
from swift_ft.recovery.occupancy import Doing
from tests.cluster.test_fallback import DAMAGED
from tests.support.cluster import CHECKPOINT_EVERY, ITERATIONS, ClusterRun, run_cluster, training

FAULT = "kill machine=1 iteration=5 point=forward"
MICROBATCHES, MESSAGE_BYTES = 8, 32 * 32 * 4


def timeline_of(run: ClusterRun) -> tuple[RunTimeline, dict[Cause, float]]:
    """It, and lost time by cause. Some things hold for each run."""
    assert run.code == 0, run.output[-3000:]
    found = run_timeline(open_run_store(str(run.store)))
    assert (found.problems, found.unknown, found.ok) == ((), (), True)
    lost = {one.cause: one.seconds for one in found.goodput.lost if one.seconds is not None}
    assert set(lost) == set(Cause)
    assert sum(lost.values()) + found.goodput.training_s == pytest.approx(found.goodput.wall_s)
    assert 0 < found.goodput.training_s < found.goodput.wall_s
    assert not found.goodput.at_most
    kept = ("machines", "slots", "detected", "joined", "reported", "replayed", "live", "mode", "resume")
    ours = [report.recovery.to_dict() for report in found.recoveries]
    assert [[one[name] for name in kept] for one in ours] == [
        [r[name] for name in kept] for r in run.recoveries
    ]
    (report,) = found.recoveries
    waits = (Cause.NO_MACHINE, Cause.AGREEING, Cause.REBUILDING)
    took = (report.recovery.live or 0.0) - report.recovery.detected
    assert sum(lost[cause] for cause in waits) == pytest.approx(took, abs=0.01)
    assert sum(report.seconds.values()) == pytest.approx(took + lost[Cause.REGROUPING], abs=0.01)
    return found, lost


def test_a_kill(tmp_path: Path) -> None:
    run = run_cluster(tmp_path, inject=FAULT)
    found, lost = timeline_of(run)
    (report,) = found.recoveries
    assert report.recovery.mode == "replay"
    (killed,) = (event["at"] for event in run.events("FaultInjected"))
    assert lost[Cause.INTERRUPTED] >= report.recovery.detected - killed  # the iteration had begun before
    assert lost[Cause.AGAIN] == 0
    assert lost[Cause.HELD_BACK] == 0
    assert lost[Cause.SAVING] > 0
    for rank in (0, 2, 3):  # each iteration once, and what was interrupted does not count
        assert (found.totals[rank].steps, found.totals[rank].iteration) == (ITERATIONS, ITERATIONS)
        assert not found.totals[rank].at_least
    replaced = found.totals[1]
    assert replaced.replayed == 5 - CHECKPOINT_EVERY
    assert ITERATIONS - 5 <= replaced.steps <= ITERATIONS  # the lost process took its last notes with it
    assert replaced.at_least
    last = found.totals[3]  # it sends gradients only, and had sent none in the interrupted iteration
    assert last.log_messages == ITERATIONS * MICROBATCHES
    assert last.log_bytes == ITERATIONS * MICROBATCHES * MESSAGE_BYTES
    done = [span.doing for span in found.occupancy.workers if span.rank == 1]
    assert [doing for doing in done if doing in (Doing.TRAINS, Doing.REPLAYS)] == [
        Doing.TRAINS,
        Doing.REPLAYS,
        Doing.TRAINS,
    ]
    first, second = (place for place in found.occupancy.tenures if place.slot == 1)
    assert (first.end, first.until, second.since) == ("lost", report.recovery.detected, first.until)
    assert first.machine == report.recovery.machines[0]
    assert {span.stages for span in found.occupancy.workers if span.machine == second.machine} >= {(1,)}


def test_a_fallback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DAMAGE", "delete")
    run = run_cluster(tmp_path, inject=FAULT + " microbatch=3", script=training(tmp_path, DAMAGED))
    found, lost = timeline_of(run)
    (report,) = found.recoveries
    assert report.recovery.mode == "fallback"
    again = 5 - CHECKPOINT_EVERY
    assert max(report.recovery.iterations_lost.values()) == again
    for rank in (0, 2, 3):
        repeated = report.recovery.iterations_lost[rank]
        assert found.totals[rank].steps == ITERATIONS + repeated
    (estimate,) = (one for one in found.goodput.lost if one.cause == Cause.AGAIN)
    assert estimate.estimated
    spans = [span for span in found.occupancy.workers if span.generation == 1]
    trained = [span for span in spans if span.doing == Doing.TRAINS]
    before = max(span.until for span in trained) - min(span.since for span in trained)
    assert 0 < lost[Cause.AGAIN] <= before * again / 5  # five iterations had taken less than that
    assert {span.rank for span in found.occupancy.workers if span.doing == Doing.LOADS} == {0, 1, 2, 3}
