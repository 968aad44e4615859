"""What recoveries leave behind in the memory of a GPU: nothing."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

from tests.gpu.on_one_gpu import OnOneGpu
from tests.support.cluster import run_cluster

COUNTS = Path(__file__).parents[1] / "cluster" / "scripts" / "counts_what_it_holds.py"
RECOVERIES = 30
WARM_UP = 10
"""Recoveries after which all is there that is kept for the next one: workspaces, page-locked memory."""


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
