"""Replicated pipelines on a GPU, over NCCL: bits of an undisturbed run after a kill."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.on_one_gpu import OnOneGpu


@pytest.mark.parametrize(
    "at",
    [
        "machine=2 iteration=5 point=backward microbatch=3",
        "machine=3 iteration=5 point=reducing",
        "machine=1 iteration=5 point=optimizer",
    ],
)
def test_a_kill(at: str, tmp_path: Path, gpu: OnOneGpu) -> None:
    gpu.check_kill(tmp_path, "train_hybrid", at)
