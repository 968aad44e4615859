"""What many recoveries leave behind in the processes that live through all of them: nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import pytest

from tests.support.cluster import run_cluster

SCRIPT = Path(__file__).parent / "scripts" / "counts_what_it_holds.py"
FEW, MANY = 14, 200
WARM_UP = 4
"""Recoveries after which most of what a recovery needs once is there: threads, and their connections."""
MEMORY_KIB = 50
"""More memory that a recovery may take. 25 were measured: 4 of objects of Python, nearly all of them events
that are kept until a checkpoint is committed; and each of a recovery's groups leaves 2 to 3 in torch, also
where nothing but groups is made and dropped.
"""


@pytest.mark.parametrize("recoveries", [FEW, pytest.param(MANY, marks=pytest.mark.thorough)])
def test_what_is_held_does_not_grow_with_recoveries(recoveries: int, tmp_path: Path) -> None:
    """Descriptors, threads and connections to the store are the same after each recovery."""
    breaks = "; ".join(f"break worker=1 iteration={2 * n} point=reduce" for n in range(1, recoveries + 1))
    length = 2 * recoveries + 2
    script = [str(SCRIPT), "--store", str(tmp_path / "store"), "--iterations", str(length)]
    run = run_cluster(tmp_path, inject=breaks, machines=2, script=script, flags=["--spares", "0"])
    assert run.code == 0, run.output[-6000:]
    assert len(run.events("FaultInjected")) == len(run.recoveries) == recoveries
    for rank in range(2):
        lines = (tmp_path / f"held-{rank}.jsonl").read_text().splitlines()
        held = [json.loads(line) for line in lines][WARM_UP:]
        assert len(held) == recoveries + 1 - WARM_UP
        for what in ("descriptors", "threads", "of the agent", "at the store"):
            counts = [noted[what] for noted in held]
            assert _growth(counts) == 0, f"worker {rank}, {what}: {counts}"
        if recoveries == MANY:
            assert _growth([noted["KiB"] for noted in held]) < MEMORY_KIB


def _growth(counts: Sequence[int]) -> float:
    """By how much a count grows in each recovery, but for what a thread opens when it first needs it."""
    stride = max(2, len(counts) // 20)
    return median(after - before for before, after in zip(counts, counts[stride:], strict=False)) / stride
