"""Silent machines: all are found at once, and none is where it only stands still for a moment."""

from __future__ import annotations

import json
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import KILLS_OTHERS, assert_identical, at_once, run_cluster, training

STALLS_AGENTS = Path(__file__).parents[2] / "benchmarks" / "scale" / "scripts" / "stalls_agents.py"
LONG = ("--layers", "12", "--iterations", "40")
RACK = (1, 2, 4)


@pytest.mark.parametrize(
    "by_signal", [signal.SIGSTOP, pytest.param(signal.SIGKILL, marks=pytest.mark.thorough)]
)
def test_a_rack_is_lost_at_once(
    by_signal: signal.Signals, tmp_path: Path, references: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the machines, at the same instant: one recovery, in which each survivor reports once."""
    monkeypatch.setenv("KILLS", at_once(*RACK, by=0, by_signal=by_signal))
    script = training(tmp_path, KILLS_OTHERS)
    run = run_cluster(tmp_path, *LONG, machines=6, flags=["--spares", "3"], script=script)
    assert_identical(run, references(*LONG, machines=6))
    (recovery,) = run.recoveries
    assert sorted(recovery["slots"]) == [*RACK]
    lost = Counter(event["machine"] for event in run.events("MachineLost"))
    assert len(lost) == len(RACK)
    reports = Counter(event["rank"] for event in run.events("StatusReported") if event["generation"] > 1)
    assert {reports[rank] for rank in range(6) if rank not in RACK} == {1}


@pytest.mark.parametrize("times", [6, pytest.param(60, marks=pytest.mark.thorough)])
def test_stalls_are_not_taken_for_losses(
    times: int, tmp_path: Path, references: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Agents stand still for half a second, one after the other, and two processes per core compute."""
    stalls = {"times": times, "seconds": 0.5, "busy": 1, "folder": str(tmp_path)}
    monkeypatch.setenv("STALLS", json.dumps(stalls))
    run = run_cluster(tmp_path, script=training(tmp_path, STALLS_AGENTS))
    assert_identical(run, references())
    assert (tmp_path / "stalled").read_text() == str(times)
    assert not run.events("MachineLost")
    assert not run.recoveries
