"""A verified step changes nothing twice, and is not computed twice where it would."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.cluster import ClusterRun, assert_undisturbed, once
from tests.support.habits import run_habit
from tests.support.integrations import assert_same_files

SCRIPT = Path(__file__).parent / "scripts" / "verified.py"
VERIFY = ["--verify", "replay", "--verify-every", "2"]
LATE = 7

Reference = Callable[[str], ClusterRun]


@pytest.fixture(scope="module")
def unverified(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Runs in which nothing is computed twice."""
    return once(tmp_path_factory, lambda folder, habit: run_habit(folder, SCRIPT, habit))


def test_what_an_update_changes_goes_back(tmp_path: Path, unverified: Reference) -> None:
    run = assert_undisturbed(run_habit(tmp_path, SCRIPT, "kept", flags=VERIFY))
    assert run.events("StepDiffered") == []
    assert "is not verified" not in run.output
    assert_same_files(run, unverified("kept"))


@pytest.mark.thorough
@pytest.mark.parametrize("inject", ["", f"kill machine=0 iteration={LATE + 1} point=forward microbatch=2"])
def test_what_cannot_go_back_is_not_repeated(inject: str, tmp_path: Path, unverified: Reference) -> None:
    """Its messages are in no log, so that a loss just after it leads to a checkpoint."""
    run = run_habit(tmp_path, SCRIPT, "late", flags=VERIFY, inject=inject)
    assert run.code == 0, run.output[-6000:]
    assert f"Iteration {LATE} is not verified: it has changed ndarray of 2.10 MB" in run.output
    assert run.events("StepDiffered") == []
    assert_same_files(run, unverified("late"))
