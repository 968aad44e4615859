"""Trainings on a GPU with a kill: the weights are those of an undisturbed run on it, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.gpu.on_one_gpu import KINDS, OnOneGpu
from tests.support.cluster import assert_clean, assert_identical


def kills(example: str, *faults: str) -> list[Any]:
    """Cases; those of one example go to one process of the tests, which keeps the undisturbed run."""
    return [pytest.param(example, at, marks=pytest.mark.xdist_group(example)) for at in faults]


CASES = [
    *kills(
        "train_ddp",
        "machine=1 iteration=5 point=reducing bucket=0",
        "machine=0 iteration=5 point=optimizer",
        "machine=1 iteration=4 point=between",
    ),
    *kills(
        "train_swift",
        "machine=1 iteration=5 point=forward microbatch=4",
        "machine=1 iteration=5 point=backward microbatch=7",  # a stage is ahead, and repeats
        "machine=2 iteration=5 point=optimizer",
    ),
    *kills(
        "train_hybrid",
        "machine=2 iteration=5 point=backward microbatch=3",
        "machine=3 iteration=5 point=reducing",
        "machine=1 iteration=5 point=optimizer",
    ),
    *kills(
        "train_hsdp",
        "machine=1 iteration=4 point=between",
        "machine=3 iteration=5 point=optimizer",
    ),
]


@pytest.mark.parametrize(("example", "at"), CASES)
def test_a_kill(example: str, at: str, tmp_path: Path, gpu: OnOneGpu) -> None:
    """Over NCCL."""
    killed = gpu.run(tmp_path, example, inject=f"kill {at}")
    assert_identical(killed, gpu.undisturbed(example))
    assert_clean(killed)
    assert len(killed.events("FaultInjected")) == 1
    (recovery,) = killed.recoveries
    assert recovery["mode"] == KINDS[example].mode


@pytest.mark.xdist_group("train_swift")
def test_a_survivor_runs_a_lost_stage(tmp_path: Path, gpu: OnOneGpu) -> None:
    """Two processes of one machine use the GPU then."""
    fault = "kill machine=1 iteration=4 point=forward microbatch=3"
    alone = ["--spares", "0", "--no-replacement", "--elastic-wait", "0.2"]
    killed = gpu.run(tmp_path, "train_swift", inject=fault, flags=alone)
    assert_identical(killed, gpu.undisturbed("train_swift"))
    assert [recovery["mode"] for recovery in killed.recoveries] == ["replay"], killed.output[-3000:]
    assert "machine 0 runs the workers of machine 1, too" in killed.output


@pytest.mark.xdist_group("train_ddp")
@pytest.mark.parametrize("point", ["point=reducing bucket=0", "point=optimizer"])
def test_replicas_over_gloo(
    point: str, tmp_path: Path, gpu: OnOneGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It averages gradients of a GPU through the host."""
    monkeypatch.delenv("SWIFT_TEST_BACKEND", raising=False)
    killed = gpu.run(tmp_path, "train_ddp", "--backend", "gloo", inject=f"kill machine=1 iteration=5 {point}")
    assert_identical(killed, gpu.undisturbed("train_ddp", "--backend", "gloo"))
    (recovery,) = killed.recoveries
    assert recovery["mode"] == "replica"
