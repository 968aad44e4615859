"""Selective logging: machines of a group recover together, and log no messages to each other (paper §5.3)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from swift_ft.costs.chain_profile import ChainProfile
from swift_ft.planning.advisor import boundary_bytes
from swift_ft.planning.grouping.groups import plan_groups, write_groups
from tests.cluster.test_log_settings import MESSAGE_BYTES, metrics_of
from tests.support.cluster import (
    CHECKPOINT_EVERY,
    ClusterRun,
    assert_clean,
    assert_identical,
    run_cluster,
    training,
)

SCRIPT = Path(__file__).parent / "scripts" / "session_settings.py"


def run_with_groups(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    groups: object,
    *,
    inject: str,
    flags: list[str] | None = None,
) -> ClusterRun:
    monkeypatch.setenv("SESSION", json.dumps({"groups": groups}))
    return run_cluster(folder, inject=inject, script=training(folder, SCRIPT), flags=flags)


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize(
    "point", ["point=forward microbatch=3", "point=backward microbatch=6", "point=optimizer"]
)
def test_one_group_goes_back_and_no_other(
    lost: int, point: str, tmp_path: Path, references: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = f"kill machine={lost} iteration=5 {point}"
    run = run_with_groups(tmp_path, monkeypatch, [[0, 1], [2, 3]], inject=fault)
    assert_identical(run, references())
    assert_clean(run)
    (recovery,) = run.recoveries
    assert recovery["mode"] == "replay"
    assert recovery["slots"] == [lost]
    assert set(recovery["replayed_iterations"]) == {"0", "1"}
    survivor = metrics_of(run, 1 - lost)
    assert any(line["replaying"] for line in survivor)
    for rank in (2, 3):
        assert not any(line["replaying"] for line in metrics_of(run, rank))
        assert min(line["iteration"] for line in metrics_of(run, rank) if line["generation"] == 2) >= 5


def test_only_messages_between_groups_are_logged(
    tmp_path: Path, references: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_with_groups(tmp_path, monkeypatch, [[0], [1, 2], [3]], inject="")
    assert_identical(run, references())
    for rank in range(4):
        logged = metrics_of(run, rank)[-1]["log"]["last"]["bytes"]
        assert logged == 8 * MESSAGE_BYTES  # one edge each, one direction
    whole = sum(metrics_of(run, rank)[-1]["log"]["last"]["bytes"] for rank in range(4))
    boundary = boundary_bytes(microbatches=8, microbatch_size=1, sequence=32, hidden=32)  # §5.4's formula
    assert whole == 2 * boundary


def test_the_planners_file(tmp_path: Path, references: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    profile = ChainProfile((1.0, 1.0, 1.0, 1.0), (65536, 65536, 65536))
    plan = plan_groups(profile, budget_bytes=3 * 65536, checkpoint_interval=CHECKPOINT_EVERY, bandwidth=1e9)
    assert 1 < len(plan.groups) < 4
    write_groups(plan, tmp_path / "groups.json")
    fault = "kill machine=2 iteration=5 point=forward microbatch=3"
    run = run_with_groups(tmp_path / "run", monkeypatch, str(tmp_path / "groups.json"), inject=fault)
    assert_identical(run, references())
    (recovery,) = run.recoveries
    together = next(group for group in plan.groups if 2 in group)
    assert set(recovery["replayed_iterations"]) == {str(slot) for slot in together}


def test_a_group_that_is_not_consecutive(
    tmp_path: Path, references: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They roll back together, and each replays alone."""
    fault = "kill machine=0 iteration=5 point=forward microbatch=3"
    run = run_with_groups(tmp_path, monkeypatch, [[0, 2], [1], [3]], inject=fault)
    assert_identical(run, references())
    assert set(run.recoveries[0]["replayed_iterations"]) == {"0", "2"}


def test_two_groups_lose_a_machine_each(
    tmp_path: Path, references: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No machine kept its state, so all return to the checkpoint."""
    at = "iteration=5 point=forward microbatch=3"
    faults = f"kill machine=0 {at}; kill machine=3 {at}"
    run = run_with_groups(tmp_path, monkeypatch, [[0, 1], [2, 3]], inject=faults, flags=["--spares", "2"])
    assert_identical(run, references())


def test_groups_that_leave_out_a_machine_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_with_groups(tmp_path, monkeypatch, [[0, 1], [3]], inject="")
    assert run.code == 2
    assert "groups must name each of the 4 machines once, 0 to 3" in run.output
    assert "Traceback" not in run.output
