"""Machines that read and write the journal through others: these die, freeze, or are slow, in every phase.

With a fanout of two, machine 0 of four goes to the store, 1 and 2 go through it, and 3 through machine 2.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import (
    KILLS_OTHERS,
    ClusterRun,
    assert_identical,
    at_once,
    run_cluster,
    run_launcher,
    training,
)

HEADS = ["--relay-fanout", "2", "--spares", "2"]
FREEZES_AGENT = KILLS_OTHERS.with_name("freezes_agent.py")
MID = "iteration=5 point=forward microbatch=3"
FAULTS = {
    "while all train": f"kill machine=2 {MID}",
    "while all report": f"kill machine=1 {MID}; kill machine=2 iteration=any point=report",
    "while the head itself is rebuilt": f"kill machine=2 {MID}; kill machine=2 iteration=4 point=replay",
    "with a machine that it serves": f"kill machine=2 {MID}; kill machine=3 {MID}",
    "while a checkpoint is saved": "kill machine=2 iteration=6 point=checkpoint",
    "while a checkpoint is committed": "kill machine=0 iteration=3 point=commit",
    "before all are live": f"kill machine=1 {MID}; kill machine=0 iteration=any point=join",
}


def assert_counted_once(run: ClusterRun) -> None:
    """No worker reports twice in a generation, nor tells twice of one part of a checkpoint."""
    kinds = ("StatusReported", "WorkerReady", "PartPersisted", "WorkerFinished")
    counted = Counter(
        (
            kind,
            event["rank"],
            event["generation"],
            event.get("iteration") if kind == "PartPersisted" else None,
        )
        for kind in kinds
        for event in run.events(kind)
    )
    assert counted
    assert max(counted.values()) == 1, counted.most_common(3)


@pytest.mark.parametrize("when", FAULTS)
def test_a_head_is_killed(when: str, tmp_path: Path, references: Any) -> None:
    run = run_cluster(tmp_path, inject=FAULTS[when], flags=HEADS)
    assert_identical(run, references())
    assert_counted_once(run)
    assert run.recoveries


def test_both_heads_at_once(tmp_path: Path, references: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KILLS", at_once(0, 2, by=1))
    run = run_cluster(tmp_path, flags=HEADS, script=training(tmp_path, KILLS_OTHERS))
    assert_identical(run, references())
    assert_counted_once(run)


@pytest.mark.parametrize("seconds", [4, 0.7])
def test_a_head_is_frozen_and_wakes_up(
    seconds: float, tmp_path: Path, references: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it still held counts once. It was replaced in between, or goes on."""
    monkeypatch.setenv("FREEZES", json.dumps({"by": 1, "iteration": 4, "victim": 2, "seconds": seconds}))
    long = ("--iterations", "40")
    run = run_cluster(tmp_path, *long, flags=HEADS, script=training(tmp_path, FREEZES_AGENT))
    assert_identical(run, references(*long))
    assert_counted_once(run)


def test_a_head_is_slow(tmp_path: Path, references: Any) -> None:
    """It lives, and answers half a second late: machine 3 follows it through a loss."""
    run = run_launcher(
        "tests.cluster.scripts.slow_head", tmp_path, inject=f"kill machine=1 {MID}", flags=HEADS
    )
    assert_identical(run, references())
    assert_counted_once(run)
    assert [recovery["slots"] for recovery in run.recoveries] == [[1]]
    late = [line.split() for line in (tmp_path / "late").read_text().splitlines()]
    assert any(int(followers) for _, followers in late), late
