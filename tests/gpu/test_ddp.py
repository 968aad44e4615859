"""DDP on a GPU, over NCCL: a machine is killed, and the bits are those of an undisturbed run on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.on_one_gpu import OnOneGpu


@pytest.mark.parametrize(
    "at",
    [
        "machine=1 iteration=5 point=reducing bucket=0",
        "machine=0 iteration=5 point=optimizer",
        "machine=1 iteration=4 point=between",
    ],
)
def test_a_kill(at: str, tmp_path: Path, gpu: OnOneGpu) -> None:
    gpu.check_kill(tmp_path, "train_ddp", at)
