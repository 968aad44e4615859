"""No machine comes for a lost one, on a GPU: fewer workers take the survivors' state over."""

from __future__ import annotations

from pathlib import Path

from tests.gpu.on_one_gpu import OnOneGpu
from tests.support.cluster import assert_same_layers
from tests.support.worlds import given_up, worlds_of

ALONE = ["--spares", "0", "--no-replacement", "--elastic-wait", "0.2"]


def test_pipelines_go_on_with_fewer_workers(tmp_path: Path, gpu: OnOneGpu) -> None:
    """All layers of the lost stage are in the other pipeline."""
    pipelines = ("train_elastic --pipelines=2", "--iterations=16")
    fault = "kill machine=1 iteration=5 point=forward microbatch=1"
    run = gpu.run(tmp_path, *pipelines, inject=fault, flags=[*ALONE, "--on-loss", "shrink"])
    assert run.code == 0, run.output[-3000:]
    (world,) = worlds_of(run)
    assert world.world_size == 2
    assert not given_up(run)
    assert_same_layers(run, gpu.undisturbed(*pipelines))
