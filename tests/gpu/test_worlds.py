"""A job on a GPU, over NCCL, changes to another world, and ends with the bits of an undisturbed run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.on_one_gpu import LONG, OnOneGpu
from tests.support.cluster import assert_clean, assert_same_layers


@pytest.mark.parametrize(
    ("example", "slots", "fault", "modes"),
    [
        ("train_ddp", [1, 0], "", []),
        ("train_elastic", [0, 2], "", []),
        ("train_ddp", [1, 0], "kill worker=0 iteration=any point=take", []),
        ("train_swift", [2, 1, 0], "kill machine=1 iteration=32 point=forward", ["replay"]),
    ],
)
def test_a_change(
    example: str, slots: list[int], fault: str, modes: list[str], tmp_path: Path, gpu: OnOneGpu
) -> None:
    """Workers of both worlds share the GPU for a while. One that dies before the change delays it."""
    flags = ["--max-restarts=0"] if "point=take" in fault else []
    run = gpu.changed(tmp_path, example, slots, inject=fault, flags=flags)
    reference = gpu.undisturbed(example, f"--iterations={LONG}")
    assert_same_layers(run, reference)
    assert_clean(run)
    assert len(run.events("FaultInjected")) == bool(fault)
    assert [recovery["mode"] for recovery in run.recoveries] == modes, run.output[-3000:]
