"""Other layouts on a GPU, over NCCL: after a kill the bits are those of an undisturbed run on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.test_experts_and_context import DEATH_AT, TRAININGS, WITH_DROPOUT, train
from tests.gpu.on_one_gpu import OnOneGpu
from tests.support.integrations import assert_same_files


@pytest.mark.parametrize(
    ("example", "at"),
    [
        ("train_tensor_parallel", "machine=1 iteration=5 point=forward microbatch=4"),
        ("train_tensor_parallel", "machine=2 iteration=5 point=optimizer"),
        ("train_moe", "machine=1 iteration=5 point=optimizer"),
        ("train_context_parallel", "machine=3 iteration=4 point=between"),
    ],
)
def test_a_kill(example: str, at: str, tmp_path: Path, gpu: OnOneGpu) -> None:
    gpu.check_kill(tmp_path, example, at)


def test_a_size_that_an_abort_has_left(tmp_path: Path, gpu: OnOneGpu) -> None:
    """Survivors read on the host how many tokens come to an expert, and ask for memory of that size."""
    experts, args = TRAININGS["experts in two replicas"], (*WITH_DROPOUT, "--device", gpu.device)
    undisturbed = train(tmp_path / "undisturbed", experts, *args)
    death = {"rank": 1, "iteration": DEATH_AT, "point": "before all_to_all 1"}
    killed = train(tmp_path / "killed", experts, *args, death=death)
    assert killed.code == 0, killed.output[-6000:]
    assert [recovery["mode"] for recovery in killed.recoveries] == [experts.way], killed.output[-3000:]
    assert_same_files(killed, undisturbed)
