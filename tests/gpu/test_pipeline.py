"""A pipeline on a GPU, over NCCL: a machine is killed, and the bits are those of an undisturbed run on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.on_one_gpu import OnOneGpu
from tests.support.cluster import assert_identical


@pytest.mark.parametrize(
    "at",
    [
        "machine=1 iteration=5 point=forward microbatch=4",
        "machine=1 iteration=5 point=backward microbatch=7",  # a stage is ahead, and repeats
        "machine=2 iteration=5 point=optimizer",
    ],
)
def test_a_kill(at: str, tmp_path: Path, gpu: OnOneGpu) -> None:
    gpu.check_kill(tmp_path, "train_swift", at)


def test_a_survivor_runs_a_lost_stage(tmp_path: Path, gpu: OnOneGpu) -> None:
    """Two processes of one machine use the GPU then."""
    fault = "kill machine=1 iteration=4 point=forward microbatch=3"
    alone = ["--spares", "0", "--no-replacement", "--elastic-wait", "0.2"]
    killed = gpu.run(tmp_path, "train_swift", inject=fault, flags=alone)
    assert_identical(killed, gpu.undisturbed("train_swift"))
    assert [recovery["mode"] for recovery in killed.recoveries] == ["replay"], killed.output[-3000:]
    assert "machine 0 runs the workers of machine 1, too" in killed.output


def test_two_losses_before_a_checkpoint(tmp_path: Path, gpu: OnOneGpu) -> None:
    """The second one leads back to the iteration that the first one has interrupted: it is in two logs."""
    faults = [f"kill machine=1 iteration={number} point=forward microbatch=2" for number in (4, 5)]
    killed = gpu.run(tmp_path, "train_swift", inject="; ".join(faults), flags=["--spares", "2"])
    assert_identical(killed, gpu.undisturbed("train_swift"))
    assert len(killed.events("FaultInjected")) == 2
    modes = [recovery["mode"] for recovery in killed.recoveries]
    assert modes == ["replay", "replay"], killed.output[-3000:]
