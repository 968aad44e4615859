"""Scripts that catch what broken communication raises: the step is interrupted, whatever they make of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from swift_ft.recovery.causes import Cause
from tests.support.cluster import ClusterRun, once
from tests.support.habits import assert_put_back, run_habit
from tests.support.integrations import assert_same_files

SCRIPT = Path(__file__).parent / "scripts" / "catches.py"
KILL = "kill machine=1 iteration=5 point="

Reference = Callable[[str, str], ClusterRun]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Undisturbed runs. What a script does with an error makes no difference to one."""
    reference = once(tmp_path_factory, lambda folder, *habit: run_habit(folder, SCRIPT, *habit))
    return lambda kind, habit: reference(kind, habit if habit == "its own collective" else "the body")


@pytest.mark.parametrize(
    ("kind", "habit", "point", "mode"),
    [
        ("ddp", "the body", "reduce", "replica"),
        ("ddp", "the passes", "reduce", "replica"),  # and an update, which is undone
        ("ddp", "a plain optimizer", "reduce", "restart"),
        ("ddp", "an undo that rounds", "reduce", "restart"),
        ("ddp", "another error", "reducing", "replica"),
        ("ddp", "from none", "reduce", "replica"),
        ("ddp", "its own collective", "optimizer", "replica"),
        ("pipeline", "the body", "backward microbatch=2", "replay"),
        ("pipeline", "the passes", "forward microbatch=1", "replay"),
        ("fsdp", "the body", "optimizer", "memory"),
    ],
)
def test_the_step_is_repeated(
    tmp_path: Path, undisturbed: Reference, kind: str, habit: str, point: str, mode: str
) -> None:
    run = run_habit(tmp_path, SCRIPT, kind, habit, inject=f"{KILL}{point}")
    assert run.code == 0, run.output[-6000:]
    assert [recovery["mode"] for recovery in run.recoveries] == [mode]
    assert_same_files(run, undisturbed(kind, habit))


def test_what_ddp_communicates_by_itself_interrupts_a_step_too(
    tmp_path: Path, undisturbed: Reference
) -> None:
    """Before a process's second forward, its choice of buckets: a step without gradients counted there."""
    inject = "kill machine=1 iteration=0 point=between"
    run = run_habit(tmp_path, SCRIPT, "ddp", "the passes", inject=inject)
    assert run.code == 0, run.output[-6000:]
    assert [recovery["mode"] for recovery in run.recoveries] == ["replica"]
    assert_same_files(run, undisturbed("ddp", "the passes"))


@pytest.mark.parametrize(
    ("habit", "machines", "mode"),
    [
        ("breaks", 2, "start"),
        ("the first one breaks", 3, "replica"),
        ("exits", 2, "start"),
        ("the first one exits", 3, "replica"),
    ],
)
def test_a_loop_that_is_left_by_an_interrupted_step(
    tmp_path: Path, habit: str, machines: int, mode: str
) -> None:
    """The process begins again, and gets its state from a replica, if one has stayed in its loop."""
    inject = f"kill machine={machines - 1} iteration=5 point=reduce"
    run = assert_put_back(tmp_path, SCRIPT, "ddp", habit, inject=inject, machines=machines)
    assert run.recoveries[-1]["mode"] == mode
    again = [lost["reason"] for lost in run.events("MachineLost") if lost.get("starts_again")]
    assert len(again) == 1
    assert "worker 0: its script has left its loop in a step that was interrupted" in again[0]
    assert "which does not count" not in run.output  # as of a loop that is left after a complete one


def test_a_process_that_ends_at_once_in_an_interrupted_step(tmp_path: Path) -> None:
    """By ``os._exit(0)``, which asks nobody: its agent knows better."""
    inject = "kill machine=1 iteration=5 point=reduce"
    run = assert_put_back(tmp_path, SCRIPT, "ddp", "ends its process", inject=inject)
    again = [lost["reason"] for lost in run.events("MachineLost") if lost.get("starts_again")]
    assert len(again) == 1
    assert "worker 0: its script has ended with exit code 0 where it was interrupted" in again[0]


def test_an_argument_that_torch_does_not_take_interrupts_nothing(
    tmp_path: Path, undisturbed: Reference
) -> None:
    run = run_habit(tmp_path, SCRIPT, "ddp", "an argument")
    assert run.code == 0, run.output[-6000:]
    assert not run.recoveries
    assert_same_files(run, undisturbed("ddp", "an argument"))


def test_an_argument_that_torch_does_not_take_is_the_scripts_error(tmp_path: Path) -> None:
    """It was taken for broken communication, and the step was tried for minutes."""
    run = run_habit(tmp_path, SCRIPT, "ddp", "an argument alone")
    assert run.code == 1
    assert "RuntimeError: Invalid scalar type" in run.output
    assert not run.recoveries
    assert not run.events("CommunicationFailed")
    failed = run.events("ScriptFailed")
    assert {one["cause"] for one in failed} == {Cause.SCRIPT}
    assert {place.partition(":")[0] for one in failed for place in one["evidence"]} >= {"catches.py"}


def test_an_error_of_the_script_ends_the_job(tmp_path: Path) -> None:
    run = run_habit(tmp_path, SCRIPT, "ddp", "its own error")
    assert run.code == 1
    assert "swift-run: worker 0: StepFailedError: a fault of the script" in run.output
