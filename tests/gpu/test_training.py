"""Real clusters of workers on GPUs: one is killed, the weights are an undisturbed run's (§3)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.cluster import ClusterRun, assert_clean, assert_identical, run_cluster, training

SCRIPTS = Path(__file__).parent / "scripts"

Undisturbed = Callable[..., ClusterRun]


def run(folder: Path, script: str, machines: int, *args: str, inject: str = "") -> ClusterRun:
    return run_cluster(
        folder, *args, inject=inject, machines=machines, script=training(folder, SCRIPTS / script)
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """Undisturbed runs, made when first asked for."""
    made: dict[tuple[object, ...], ClusterRun] = {}

    def reference(script: str, machines: int, *args: str) -> ClusterRun:
        what = (script, machines, *args)
        if what not in made:
            made[what] = run(tmp_path_factory.mktemp("undisturbed"), script, machines, *args)
            assert made[what].code == 0, made[what].output[-6000:]
            assert not made[what].recoveries
        return made[what]

    return reference


PIPELINE = "train_pipeline_on_gpu.py"
DDP = "train_ddp_on_gpu.py"
KILLS = {
    "in a forward": "machine=1 iteration=5 point=forward microbatch=4",
    "in a backward": "machine=1 iteration=5 point=backward microbatch=3",
    "in the optimizer": "machine=0 iteration=5 point=optimizer",
}


@pytest.mark.parametrize("kill", KILLS)
def test_a_pipeline_that_shares_a_gpu(kill: str, tmp_path: Path, undisturbed: Undisturbed) -> None:
    """Over gloo, with messages in host memory."""
    ended = run(tmp_path, PIPELINE, 3, inject=f"kill {KILLS[kill]}")
    assert_identical(ended, undisturbed(PIPELINE, 3))
    assert_clean(ended)
    (recovery,) = ended.recoveries
    assert recovery["mode"] == "replay"


@pytest.mark.parametrize("point", ["point=forward microbatch=4", "point=backward microbatch=3"])
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each worker: fewer than 2")
def test_a_pipeline_with_a_gpu_per_worker(point: str, tmp_path: Path, undisturbed: Undisturbed) -> None:
    """Over NCCL, with CUDA messages from GPU to GPU."""
    machines = min(4, torch.cuda.device_count())
    ended = run(
        tmp_path, PIPELINE, machines, "--messages", "device", inject=f"kill machine=1 iteration=5 {point}"
    )
    assert_identical(ended, undisturbed(PIPELINE, machines, "--messages", "device"))
    assert_clean(ended)
    (recovery,) = ended.recoveries
    assert recovery["mode"] == "replay"


@pytest.mark.parametrize("point", ["point=reducing bucket=3", "point=optimizer", "point=between"])
def test_replicas_that_share_a_gpu(point: str, tmp_path: Path, undisturbed: Undisturbed) -> None:
    """Over gloo, which averages CUDA gradients through the host; the state comes from a replica."""
    ended = run(tmp_path, DDP, 2, inject=f"kill machine=1 iteration=5 {point}")
    assert_identical(ended, undisturbed(DDP, 2))
    assert_clean(ended)
    (recovery,) = ended.recoveries
    assert recovery["mode"] == "replica"


@pytest.mark.parametrize("point", ["point=reducing bucket=3", "point=between"])
def test_replicas_that_normalise_together(point: str, tmp_path: Path, undisturbed: Undisturbed) -> None:
    """SyncBatchNorm communicates in forward and backward passes, on the group of the generation."""
    ended = run(tmp_path, DDP, 2, "--sync-batch-norm", inject=f"kill machine=1 iteration=5 {point}")
    assert_identical(ended, undisturbed(DDP, 2, "--sync-batch-norm"))
    (recovery,) = ended.recoveries
    assert recovery["mode"] == "replica"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each worker: fewer than 2")
def test_replicas_with_a_gpu_each(tmp_path: Path, undisturbed: Undisturbed) -> None:
    ended = run(tmp_path, DDP, 2, "--backend", "nccl", inject="kill machine=1 iteration=5 point=reducing")
    assert_identical(ended, undisturbed(DDP, 2, "--backend", "nccl"))
    (recovery,) = ended.recoveries
    assert recovery["mode"] == "replica"
