"""`session.plan()` forecasts how each machine would recover; then one is lost and does so (paper §3)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.test_log_settings import MESSAGE_BYTES
from tests.support.cluster import ClusterRun, run_cluster, training

SCRIPT = Path(__file__).parent / "scripts" / "plans.py"
LENGTH = 12


def run_with_plans(
    folder: Path, monkeypatch: pytest.MonkeyPatch, example: str, *, session: dict[str, Any], machines: int
) -> ClusterRun:
    monkeypatch.setenv("EXAMPLE", example)
    monkeypatch.setenv("SESSION", json.dumps(session))
    script = training(folder, SCRIPT, iterations=LENGTH)
    point = "forward microbatch=3" if example == "train_swift" else "reducing"
    fault = f"kill machine=1 iteration={LENGTH - 1} point={point}"
    run = run_cluster(folder, script=script, machines=machines, inject=fault)
    assert run.code == 0, run.output[-6000:]
    return run


def plan_of(run: ClusterRun, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run.folder / f"{name}.json").read_text())
    return found


def replays_of(loss: dict[str, Any]) -> dict[int, int]:
    """By rank, the iterations that ``swift-recover plan`` expects to be replayed."""
    return {worker["rank"]: worker["replays"] for worker in loss["workers"] if worker["replays"]}


def sources_of(loss: dict[str, Any]) -> dict[str, str]:
    return {part["what"]: part["source"] for part in loss["estimate"]["parts"]}


def test_a_pipeline_with_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = {"groups": [[0], [1, 2], [3]], "checkpoint_every": 5}
    run = run_with_plans(tmp_path, monkeypatch, "train_swift", session=session, machines=4)
    before, later = plan_of(run, "before"), plan_of(run, "later")
    for plan in (before, later):
        assert [machine["protection"] for machine in plan["machines"]] == ["logging"] * 4
        assert [machine["rolled_back"] for machine in plan["machines"]] == [[0], [1, 2], [1, 2], [3]]
    assert {machine["expected_s"] for machine in before["machines"]} == {None}
    assert before["unknown"]
    assert not later["unknown"]
    for machine in later["machines"]:
        assert machine["expected_s"] == pytest.approx(machine["load_s"] + machine["again_s"])
        assert 0 < machine["load_s"] < machine["checkpoint_s"]
    logged = later["logging"]["log_bytes"]
    assert logged == 5 * 2 * 2 * 8 * MESSAGE_BYTES  # two boundaries, both directions, eight microbatches
    (recovery,) = run.recoveries
    assert recovery["mode"] == "replay"
    foretold = plan_of(run, "from_store")
    assert (foretold["mode"], foretold["resume"]) == ("replay", recovery["resume"])
    assert replays_of(foretold) == {int(r): n for r, n in recovery["replayed_iterations"].items()}
    parts = sources_of(foretold)
    assert parts["replaying 1 iteration"] == "measured: computing in its first iterations"
    assert parts["loading the checkpoint"].startswith("measured: the state")
    assert {int(rank) for rank in recovery["replayed_iterations"]} == set(later["machines"][1]["rolled_back"])


def test_replicas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_with_plans(tmp_path, monkeypatch, "train_ddp", session={}, machines=2)
    later = plan_of(run, "later")
    assert [machine["protection"] for machine in later["machines"]] == ["replication"] * 2
    assert all(machine["expected_s"] == machine["transfer_s"] > 0 for machine in later["machines"])
    assert later["logging"] is None
    assert [recovery["mode"] for recovery in run.recoveries] == ["replica"]
    foretold = plan_of(run, "from_store")
    assert (foretold["mode"], foretold["iterations_again"]) == ("replica", 0)
    given = {worker["rank"]: worker["receives_from"] for worker in foretold["workers"]}
    assert (
        [rank for rank, source in given.items() if source is not None] == run.recoveries[0]["restored"] == [1]
    )
    assert sources_of(foretold)["receiving the state from replicas"].startswith("measured: ")
