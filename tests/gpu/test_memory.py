"""A plain loop on a GPU, over NCCL: memory checkpoints of its state, and layers that communicate."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.on_one_gpu import OnOneGpu
from tests.support.cluster import ClusterRun, assert_identical, assert_undisturbed, run_cluster

BY_HAND = Path(__file__).parents[1] / "cluster" / "scripts" / "by_hand.py"


def run_by_hand(folder: Path, gpu: OnOneGpu, *args: str, inject: str = "") -> ClusterRun:
    places = ["--store", str(folder / "store"), "--weights-out", str(folder / "weights")]
    script = [str(BY_HAND), *places, "--settle", "--device", gpu.device, *args]
    return run_cluster(folder, inject=inject, machines=2, script=script)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, gpu: OnOneGpu) -> ClusterRun:
    return assert_undisturbed(run_by_hand(tmp_path_factory.mktemp("undisturbed"), gpu))


@pytest.mark.parametrize("point", ["forward", "optimizer"])
def test_the_lost_state_comes_from_a_copy_in_memory(
    point: str, tmp_path: Path, gpu: OnOneGpu, reference: ClusterRun
) -> None:
    run = run_by_hand(tmp_path, gpu, inject=f"kill machine=1 iteration=12 point={point}")
    assert_identical(run, reference)
    assert len(run.events("FaultInjected")) == 1
    assert [(one["mode"], one["resume"]) for one in run.recoveries] == [("memory", 10)], run.output[-3000:]


@pytest.mark.parametrize("point", ["forward", "backward"])
def test_replicas_that_normalise_together(point: str, tmp_path: Path, gpu: OnOneGpu) -> None:
    """SyncBatchNorm communicates in forward and backward passes, and knows GPUs only."""
    if gpu.device != "cuda":
        pytest.skip("SyncBatchNorm needs a GPU")
    together = ("--ddp", "--sync-batch-norm")
    undisturbed = run_by_hand(tmp_path / "undisturbed", gpu, *together)
    run = run_by_hand(
        tmp_path / "killed", gpu, *together, inject=f"kill machine=1 iteration=12 point={point}"
    )
    assert_identical(run, undisturbed)
    assert [recovery["mode"] for recovery in run.recoveries] == ["replica"], run.output[-3000:]
