"""The example in epochs: what it ends with and what it wrote, whichever step a machine is lost in."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.cluster import EXAMPLES, ClusterRun, run_cluster
from tests.support.integrations import assert_same_files

STEPS, EPOCHS = 6, 4


def run_epochs(folder: Path, inject: str = "") -> ClusterRun:
    script = [
        str(EXAMPLES / "train_epochs.py"),
        "--store",
        str(folder / "store"),
        "--out",
        str(folder / "out"),
    ]
    run = run_cluster(folder, "--epochs", str(EPOCHS), machines=2, inject=inject, script=script)
    assert run.code == 0, run.output[-6000:]
    return run


def losses_of(run: ClusterRun) -> set[str]:
    """What the workers have said of their epochs: a repeated step may say it twice."""
    return set(re.findall(r"\[worker \d\] epoch \d: loss [\d.]+, next rate [\d.]+", run.output))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> ClusterRun:
    return run_epochs(tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.parametrize(
    "at",
    [
        "machine=1 iteration=8 point=reduce",
        pytest.param("machine=0 iteration=11 point=optimizer", marks=pytest.mark.thorough),
        pytest.param("machine=1 iteration=11 point=between", marks=pytest.mark.thorough),
        "machine=0 iteration=12 point=reduce",
    ],
)
def test_the_example(at: str, tmp_path: Path, undisturbed: ClusterRun) -> None:
    run = run_epochs(tmp_path, f"kill {at}")
    assert [recovery["mode"] for recovery in run.recoveries] == ["replica"], run.output[-3000:]
    assert {path.name for path in (run.folder / "out").iterdir()} >= {f"epoch{e}.pt" for e in range(EPOCHS)}
    assert_same_files(run, undisturbed)
    for epoch in range(EPOCHS):
        assert f"epoch {epoch}: " in run.output
    assert losses_of(run) <= losses_of(undisturbed)
    # A machine's last line may die with it, in the pipe to its agent.
    missing = losses_of(undisturbed) - losses_of(run)
    assert len(missing) <= 1
    assert all(f"[worker {at[8]}]" in line for line in missing)
