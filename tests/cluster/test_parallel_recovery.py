"""Survivors help: they compute microbatches of what was lost, and keep their own state (paper §5.2).

The rebuilt state and the offloaded state of the helpers are compared bit for bit with an undisturbed run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.cluster import ClusterRun, assert_clean, assert_identical, run_cluster, training

SCRIPT = Path(__file__).parent / "scripts" / "helped.py"
MID = "iteration=5 point=forward microbatch=3"


def run_helped(
    folder: Path, *args: str, inject: str, machines: int = 4, workers: int = 1, helpers: int = 9, **more: Any
) -> ClusterRun:
    flags = ["--nproc-per-node", str(workers), "--helpers", str(helpers)]
    return run_cluster(folder, *args, inject=inject, machines=machines, flags=flags, **more)


def run_with(
    folder: Path, monkeypatch: pytest.MonkeyPatch, inject: str = f"kill machine=1 {MID}", **helping: Any
) -> ClusterRun:
    """The example with other arguments of ``attach_pipeline()``."""
    monkeypatch.setenv("HELPING", json.dumps(helping))
    return run_helped(folder, inject=inject, script=training(folder, SCRIPT))


def assert_helped(run: ClusterRun, *helpers: list[int]) -> None:
    """All recoveries were replays with these helpers."""
    assert [recovery["mode"] for recovery in run.recoveries] == ["replay"] * len(helpers), run.output[-3000:]
    assert [recovery["helpers"] for recovery in run.recoveries] == [*helpers]
    for recovery in run.recoveries:
        lost = {int(rank) for rank, count in recovery["iterations_lost"].items() if count}
        assert not lost & set(recovery["helpers"])


@pytest.mark.parametrize("stage", [0, 2, 3])  # the first one has the data, the last one the loss
def test_one_stage(stage: int, tmp_path: Path, references: Any) -> None:
    """Dropout draws the same numbers again. Four members share seven microbatches."""
    options = ("--dropout", "0.2", "--microbatches", "7")
    run = run_helped(tmp_path, *options, inject=f"kill machine={stage} {MID}")
    assert_identical(run, references(*options))
    assert_helped(run, sorted({0, 1, 2, 3} - {stage}))
    assert_clean(run)


@pytest.mark.parametrize("schedule", ["Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"])
def test_other_schedules(schedule: str, tmp_path: Path, references: Any) -> None:
    """Several stages per worker, separate gradients of weights and inputs, transfers within a worker."""
    run = run_helped(tmp_path, "--schedule", schedule, inject=f"kill machine=1 {MID}")
    assert_identical(run, references("--schedule", schedule))
    assert_helped(run, [0, 2, 3])


@pytest.mark.parametrize("slot", [0, 1])
def test_a_machine_with_two_workers(slot: int, tmp_path: Path, references: Any) -> None:
    """All members compute both of its stages."""
    run = run_helped(tmp_path, inject=f"kill machine={slot} {MID}", machines=2, workers=2)
    assert_identical(run, references())
    assert_helped(run, [2, 3] if slot == 0 else [0, 1])


def test_fewer_microbatches_than_workers(tmp_path: Path, references: Any) -> None:
    """Two owners and one helper have one each; a second helper would leave an owner without any."""
    options = ("--schedule", "GPipe", "--microbatches", "3")
    inject = "kill machine=0 iteration=5 point=forward microbatch=1"
    run = run_helped(tmp_path, *options, inject=inject, machines=2, workers=2)
    assert_identical(run, references(*options))
    assert [len(recovery["helpers"]) for recovery in run.recoveries] == [1]


def test_fewer_helpers(tmp_path: Path, references: Any) -> None:
    run = run_helped(tmp_path, inject=f"kill machine=1 {MID}", helpers=1)
    assert_identical(run, references())
    assert_helped(run, [0])


@pytest.mark.parametrize("habit", ["", "tau"])
def test_sums_of_each_helper(habit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """mode="allreduce": rounding differs, and only in the rebuilt stage. No message is compared."""
    monkeypatch.setenv("HELPING", json.dumps({"mode": "allreduce", "habit": habit}))
    undisturbed = run_cluster(tmp_path / "undisturbed", script=training(tmp_path / "undisturbed", SCRIPT))
    script = [*training(tmp_path, SCRIPT), "--checkpoint-every", "20"]  # so that no checkpoint is near
    run = run_helped(tmp_path, inject=f"kill machine=1 {MID}", script=script)
    assert run.code == 0, run.output[-3000:]
    assert_helped(run, [0, 2, 3])
    assert any("other roundings" in event["reason"] for event in run.events("CheckpointRequested"))
    ours, theirs = run.weights(), undisturbed.weights()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-4, atol=1e-5, msg=name)


def test_help_that_ends_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No replay without helpers goes on from other roundings: it begins again at the checkpoint."""
    monkeypatch.setenv("HELPING", json.dumps({"mode": "allreduce", "habit": "freezes"}))
    undisturbed = run_cluster(tmp_path / "undisturbed", script=training(tmp_path / "undisturbed", SCRIPT))
    script = [*training(tmp_path, SCRIPT), "--checkpoint-every", "20"]
    run = run_helped(tmp_path, inject="kill machine=1 iteration=6 point=forward microbatch=3", script=script)
    assert_identical(run, undisturbed)
    assert_helped(run, [])
    (declined,) = run.events("HelpDeclined")
    assert "has changed whether" in declined["reason"]


def test_a_helper_with_sums_of_its_own_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two machines are rebuilt then, and the one that was helped begins again, too."""
    monkeypatch.setenv("HELPING", json.dumps({"mode": "allreduce"}))
    script = [*training(tmp_path, SCRIPT), "--checkpoint-every", "20"]
    inject = "kill machine=2 iteration=6 point=forward microbatch=3; kill machine=0 iteration=4 point=help"
    run = run_helped(tmp_path, inject=inject, machines=3, script=script, helpers=1)
    assert run.code == 0, run.output[-3000:]
    assert [(r["mode"], sorted(r["slots"])) for r in run.recoveries] == [("replay", [0, 2])]


def test_parts_in_eval_mode(tmp_path: Path, references: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen part often is. ``build`` does not know what the script did to its own module afterwards."""
    monkeypatch.setenv("HELPING", json.dumps({"without_dropout": True}))
    script = [*training(tmp_path, SCRIPT), "--dropout", "0.2"]
    run = run_helped(tmp_path, inject=f"kill machine=1 {MID}", script=script)
    assert_identical(run, references())  # of the same model without any dropout
    assert_helped(run, [0, 2, 3])


def test_gradients_on_top_of_others(tmp_path: Path, references: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of zero that only the replacement has."""
    run = run_with(tmp_path, monkeypatch, zeros=True)
    assert_identical(run, references())
    assert_helped(run, [0, 2, 3])


LEFT_BEHIND = "which would not see those that others compute"


@pytest.mark.parametrize(
    ("habit", "declined"),
    [
        ("cache", ""),
        ("tau", ""),
        ("draws", ""),
        ("load", f"computing a microbatch changes stage 3.load, {LEFT_BEHIND}"),
        ("counts", f"computing a microbatch changes the loss function.calls, {LEFT_BEHIND}"),
        ("random", f"changes the state of Python's random numbers, {LEFT_BEHIND}"),
        ("scale", "stage 3.scale is 1.0 here, and the script has made it 1.3"),
    ],
)
def test_what_a_stage_has_besides_parameters(
    habit: str, declined: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where helpers do not have it, the lost machine replays alone: the bits are the same."""
    monkeypatch.setenv("HELPING", json.dumps({"habit": habit}))
    undisturbed = run_cluster(tmp_path / "undisturbed", script=training(tmp_path / "undisturbed", SCRIPT))
    run = run_with(tmp_path, monkeypatch, f"kill machine=3 {MID}", habit=habit)
    assert_identical(run, undisturbed)
    assert_helped(run, [] if declined else [0, 1, 2])
    reasons = [event["reason"] for event in run.events("HelpDeclined")]
    assert all(declined in reason for reason in reasons)
    assert bool(reasons) == bool(declined)


def test_state_on_the_local_disk(tmp_path: Path, references: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A helper offloads almost all of its own state."""
    run = run_with(tmp_path, monkeypatch, helper_memory_bytes=4096)
    assert_identical(run, references())
    assert_helped(run, [0, 2, 3])


@pytest.mark.parametrize(
    ("build", "said"),
    [
        ("raises", "MemoryError: there is no room for it"),
        ("wider", "build(1) makes a module that differs from the script's stage 1: see"),
    ],
)
def test_a_machine_that_cannot_help_costs_no_progress(
    build: str, said: str, tmp_path: Path, references: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lost machine replays alone."""
    run = run_with(tmp_path, monkeypatch, build=build)
    assert_identical(run, references())
    assert_helped(run, [])
    assert any(said in event["reason"] for event in run.events("HelpDeclined"))


@pytest.mark.parametrize(
    ("helping", "why"),
    [
        ({"build": "none"}, "attach_pipeline() was given no build"),
        ({"norm": True}, "BatchNorm1d keeps running statistics: microbatches depend on each other"),
    ],
)
def test_it_is_off_and_says_why(
    helping: dict[str, Any], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_with(tmp_path, monkeypatch, **helping)
    assert run.code == 0, run.output[-3000:]
    assert_helped(run, [])
    assert f"swift_ft: parallel recovery is off: {why}" in run.output


def test_a_helper_is_lost(tmp_path: Path, references: Any) -> None:
    """Then two machines are rebuilt, and survivors help with their replay again."""
    inject = f"kill machine=1 {MID}; kill machine=3 iteration=4 point=help"
    run = run_helped(tmp_path, inject=inject)
    assert_identical(run, references())
    assert [(r["slots"], r["helpers"]) for r in run.recoveries] == [([1, 3], [0, 2])]


def test_the_owner_is_lost(tmp_path: Path, references: Any) -> None:
    run = run_helped(tmp_path, inject=f"kill machine=1 {MID}; kill machine=1 iteration=4 point=replay")
    assert_identical(run, references())
    assert [(r["slots"], r["helpers"]) for r in run.recoveries] == [([1, 1], [0, 2, 3])]


@pytest.mark.thorough
def test_connections_break(tmp_path: Path, references: Any) -> None:
    """No machine is lost: the shared replay resumes from the iteration that it has reached."""
    run = run_helped(tmp_path, inject=f"kill machine=1 {MID}; break machine=2 iteration=4 point=help")
    assert_identical(run, references())
    assert_helped(run, [0, 2, 3])
    assert len(run.events("CommunicationFailed")) >= 1


def test_the_neighbour_is_lost_next(tmp_path: Path, references: Any) -> None:
    """The log of the rebuilt machine is complete, including microbatches that helpers computed."""
    inject = f"kill machine=1 {MID}; kill machine=2 iteration=5 point=backward microbatch=6"
    run = run_helped(tmp_path, inject=inject)
    assert_identical(run, references())
    assert_helped(run, [0, 2, 3], [0, 1, 3])


@pytest.mark.thorough
def test_two_distant_machines(tmp_path: Path) -> None:
    """Each replay gets its own helpers."""
    deep = ["--layers=16"]
    reference = run_cluster(tmp_path / "undisturbed", *deep, machines=6)
    inject = "; ".join(f"kill machine={slot} iteration=5 point=optimizer" for slot in (1, 4))
    run = run_helped(tmp_path, *deep, inject=inject, machines=6)
    assert_identical(run, reference)
    assert {recovery["mode"] for recovery in run.recoveries} == {"replay"}
    assert run.recoveries[-1]["helpers"], run.recoveries
