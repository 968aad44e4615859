"""Other layouts on a GPU, over NCCL: after a kill the bits are those of an undisturbed run on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.on_one_gpu import OnOneGpu


@pytest.mark.parametrize(
    ("example", "at"),
    [
        ("train_tensor_parallel", "machine=1 iteration=5 point=forward microbatch=4"),
        ("train_tensor_parallel", "machine=2 iteration=5 point=optimizer"),
        ("train_moe", "machine=1 iteration=5 point=optimizer"),
        ("train_moe", "machine=1 iteration=5 point=forward"),  # survivors read how many tokens come: anything
        ("train_context_parallel", "machine=3 iteration=4 point=between"),
    ],
)
def test_a_kill(example: str, at: str, tmp_path: Path, gpu: OnOneGpu) -> None:
    gpu.check_kill(tmp_path, example, at)
