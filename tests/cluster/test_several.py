"""A step may have several updates, optimizers, backward passes and models."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cluster import ClusterRun, assert_identical, one_line, run_cluster

SCRIPT = Path(__file__).parent / "scripts" / "several.py"


def run_several(folder: Path, kind: str, die: str = "") -> ClusterRun:
    places = ["--store", str(folder / "store"), "--weights-out", str(folder / "weights")]
    return run_cluster(folder, machines=2, script=[str(SCRIPT), *places, "--kind", kind, "--die", die])


@pytest.mark.parametrize(
    ("kind", "die", "mode"),
    [
        ("accumulate", "middle:5:1", "replica"),
        ("two optimizers", "middle:5:0", "replica"),
        ("two updates", "middle:5:1", "replica"),
        ("two updates", "end:5:1", "restart"),  # only the last update can be undone
        ("gan", "middle:5:1", "replica"),
        ("teacher", "before:5:0", "replica"),
        ("reduced late", "end:5:1", "replica"),
    ],
)
def test_a_loss(kind: str, die: str, mode: str, tmp_path: Path) -> None:
    reference = run_several(tmp_path / "undisturbed", kind)
    run = run_several(tmp_path / "killed", kind, die)
    assert_identical(run, reference)
    assert [recovery["mode"] for recovery in run.recoveries] == [mode], run.output[-3000:]


def test_two_ddp_models_are_refused(tmp_path: Path) -> None:
    run = run_several(tmp_path, "two models")
    assert run.code == 2
    assert "put all of them into one module, and DDP around that" in one_line(run)
