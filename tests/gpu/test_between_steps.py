"""A machine is lost in a function between two steps on a GPU, over NCCL: survivors read what is left."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.on_one_gpu import OnOneGpu
from tests.support.cluster import ClusterRun, assert_identical, assert_undisturbed, run_cluster, training

SCRIPT = Path(__file__).parents[1] / "cluster" / "scripts" / "between_steps.py"
MACHINES = 3
"""Two survivors: each reads a number of its own."""


def run_between(folder: Path, gpu: OnOneGpu, *args: str) -> ClusterRun:
    script = training(folder, SCRIPT)
    return run_cluster(folder, "--device", gpu.device, *args, machines=MACHINES, script=script)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, gpu: OnOneGpu) -> ClusterRun:
    return assert_undisturbed(run_between(tmp_path_factory.mktemp("undisturbed"), gpu))


@pytest.mark.parametrize("die", ["validate:4:1", "log:5:1"])
def test_a_loss_between_two_steps(die: str, tmp_path: Path, gpu: OnOneGpu, reference: ClusterRun) -> None:
    run = run_between(tmp_path, gpu, "--die", die)
    assert_identical(run, reference)
    assert (tmp_path / "died").exists()
    (recovery,) = run.recoveries
    assert (recovery["mode"], recovery["slots"]) == ("replay", [1]), run.output[-3000:]
