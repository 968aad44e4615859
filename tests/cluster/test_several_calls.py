"""A step may call its schedule several times: a replay, or a stage that is ahead, has all of it (§5)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cluster import ClusterRun, assert_identical, run_cluster, training

SCRIPT = Path(__file__).parent / "scripts" / "several_calls.py"
LITTLE = ["--layers=4", "--microbatches=4"]


def run_calls(folder: Path, kind: str, inject: str = "") -> ClusterRun:
    """Microbatches are counted on: those of the second call are 4 to 7."""
    flags = ["--helpers", "2"]
    return run_cluster(
        folder, *LITTLE, "--kind", kind, inject=inject, flags=flags, script=training(folder, SCRIPT)
    )


@pytest.fixture(scope="module")
def accumulated(tmp_path_factory: pytest.TempPathFactory) -> ClusterRun:
    return run_calls(tmp_path_factory.mktemp("undisturbed"), "accumulate")


@pytest.mark.parametrize(
    ("fault", "ahead"),
    [
        ("machine=2 iteration=5 point=forward microbatch=5", []),
        ("machine=1 iteration=5 point=backward microbatch=7", [2, 3]),
    ],
)
def test_gradients_of_several_calls(
    fault: str, ahead: list[int], tmp_path: Path, accumulated: ClusterRun
) -> None:
    run = run_calls(tmp_path, "accumulate", f"kill {fault}")
    assert_identical(run, accumulated)
    (recovery,) = run.recoveries
    assert (recovery["mode"], recovery["ahead"]) == ("replay", ahead), run.output[-3000:]
    assert recovery["helpers"] == []


def test_an_update_after_each_call(tmp_path: Path) -> None:
    undisturbed = run_calls(tmp_path / "undisturbed", "updates")
    fault = "kill machine=1 iteration=5 point=forward microbatch=6"
    run = run_calls(tmp_path / "killed", "updates", fault)
    assert_identical(run, undisturbed)
    assert [recovery["mode"] for recovery in run.recoveries] == ["replay"], run.output[-3000:]
