"""Memory checkpoints of a state on a GPU, and what recoveries leave behind in its memory: nothing."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import pytest

from tests.gpu.on_one_gpu import OnOneGpu
from tests.support.cluster import ClusterRun, assert_identical, run_cluster

SCRIPTS = Path(__file__).parents[1] / "cluster" / "scripts"
BY_HAND = SCRIPTS / "by_hand.py"
COUNTS = SCRIPTS / "counts_what_it_holds.py"
RECOVERIES = 50
WARM_UP = 10
"""Recoveries after which all is there that is kept for the next one: workspaces, page-locked memory."""


def run_by_hand(folder: Path, gpu: OnOneGpu, *args: str, inject: str = "") -> ClusterRun:
    places = ["--store", str(folder / "store"), "--weights-out", str(folder / "weights")]
    script = [str(BY_HAND), *places, "--settle", "--device", gpu.device, *args]
    return run_cluster(folder, inject=inject, machines=2, script=script)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, gpu: OnOneGpu) -> ClusterRun:
    run = run_by_hand(tmp_path_factory.mktemp("undisturbed"), gpu)
    assert run.code == 0, run.output[-6000:]
    return run


@pytest.mark.xdist_group("memory")
@pytest.mark.parametrize("point", ["forward", "optimizer"])
def test_the_lost_state_comes_from_a_copy_in_memory(
    point: str, tmp_path: Path, gpu: OnOneGpu, reference: ClusterRun
) -> None:
    run = run_by_hand(tmp_path, gpu, inject=f"kill machine=1 iteration=12 point={point}")
    assert_identical(run, reference)
    assert len(run.events("FaultInjected")) == 1
    assert [(one["mode"], one["resume"]) for one in run.recoveries] == [("memory", 10)], run.output[-3000:]


@pytest.mark.xdist_group("memory")
@pytest.mark.parametrize("point", ["forward", "backward"])
def test_replicas_that_normalise_together(point: str, tmp_path: Path, gpu: OnOneGpu) -> None:
    """SyncBatchNorm communicates in forward and backward passes, and knows GPUs only."""
    if gpu.device != "cuda":
        pytest.skip("SyncBatchNorm needs a GPU")
    together = ("--ddp", "--sync-batch-norm")
    undisturbed = run_by_hand(tmp_path / "undisturbed", gpu, *together)
    run = run_by_hand(
        tmp_path / "killed", gpu, *together, inject=f"kill machine=1 iteration=12 point={point}"
    )
    assert_identical(run, undisturbed)
    assert [recovery["mode"] for recovery in run.recoveries] == ["replica"], run.output[-3000:]


def test_memory_of_the_device_does_not_grow(tmp_path: Path, gpu: OnOneGpu) -> None:
    """Connections break in each second iteration, and both processes live through all recoveries."""
    numbers = range(1, RECOVERIES + 1)
    breaks = "; ".join(f"break worker=1 iteration={2 * n} point=reduce" for n in numbers)
    length = ["--iterations", str(2 * RECOVERIES + 2), "--device", gpu.device]
    script = [str(COUNTS), "--store", str(tmp_path / "store"), *length]
    run = run_cluster(tmp_path, inject=breaks, machines=2, script=script, flags=["--spares", "0"])
    assert run.code == 0, run.output[-6000:]
    assert len(run.events("FaultInjected")) == len(run.recoveries) == RECOVERIES
    for rank in range(2):
        lines = (tmp_path / f"held-{rank}.jsonl").read_text().splitlines()
        held = [json.loads(line)["on the device"] for line in lines][WARM_UP:]
        assert len(held) == RECOVERIES + 1 - WARM_UP
        assert ("torch" in held[0]) == (gpu.device == "cuda")
        for what in held[0]:
            counts = [noted[what] for noted in held]
            assert median(counts[-5:]) <= max(counts[:5]), f"worker {rank}, {what}: {counts}"
