"""First and last stage share a parameter, and stay equal whichever is lost."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.cluster import ClusterRun, assert_identical, assert_undisturbed, run_cluster, training

SCRIPT = Path(__file__).parent / "scripts" / "train_tied.py"
SHARED = ("rank0.embedding.token.weight", "rank3.head.logits.weight")


def run_tied(folder: Path, inject: str = "", helpers: int = 0) -> ClusterRun:
    return run_cluster(
        folder, inject=inject, flags=["--helpers", str(helpers)], script=training(folder, SCRIPT)
    )


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> ClusterRun:
    run = assert_undisturbed(run_tied(tmp_path_factory.mktemp("undisturbed")))
    one, other = (run.weights()[name] for name in SHARED)
    assert torch.equal(one, other)
    return run


@pytest.mark.parametrize(
    ("inject", "helpers"),
    [
        ("kill machine=0 iteration=5 point=forward microbatch=3", 0),
        ("kill machine=3 iteration=5 point=backward microbatch=3", 9),
        ("kill machine=3 iteration=4 point=optimizer", 0),
        ("kill machine=1 iteration=5 point=optimizer", 0),
        ("kill machine=0 iteration=5 point=optimizer; kill machine=3 iteration=any point=join", 0),
    ],
)
def test_a_loss(inject: str, helpers: int, tmp_path: Path, reference: ClusterRun) -> None:
    run = run_tied(tmp_path, inject, helpers)
    assert_identical(run, reference)
    one, other = (run.weights()[name] for name in SHARED)
    assert torch.equal(one, other)
    assert {recovery["mode"] for recovery in run.recoveries} == {"replay"}, run.output[-3000:]


@pytest.mark.thorough
def test_both_at_once(tmp_path: Path, reference: ClusterRun) -> None:
    """The messages of each were lost with it, so they replay jointly."""
    inject = "; ".join(f"kill machine={slot} iteration=5 point=forward microbatch=3" for slot in (0, 3))
    run = run_tied(tmp_path, inject)
    assert_identical(run, reference)
    assert {recovery["mode"] for recovery in run.recoveries} == {"replay"}, run.output[-3000:]
