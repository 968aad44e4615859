"""Each iteration's record is given once, wherever the worker was lost that writes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cluster import ClusterRun
from tests.support.habits import assert_put_back

SCRIPT = Path(__file__).parent / "scripts" / "records.py"
ITERATIONS = 8


def recorded(run: ClusterRun, rank: int) -> list[int]:
    lines = (run.folder / f"records{rank}.txt").read_text().splitlines()
    return [int(line.split()[0]) for line in lines]


@pytest.mark.parametrize("point", ["optimizer", pytest.param("backward", marks=pytest.mark.thorough)])
def test_a_stage_that_replays(point: str, tmp_path: Path) -> None:
    """Also where the other stage has completed the step in which it was lost."""
    run = assert_put_back(tmp_path, SCRIPT, "pipeline", inject=f"kill machine=1 iteration=5 point={point}")
    assert [recovery["mode"] for recovery in run.recoveries] == ["replay"]
    assert recorded(run, 1) == [*range(ITERATIONS)]


def test_all_processes_start_again_from_a_checkpoint(tmp_path: Path) -> None:
    """One was lost, and the other one stopped where its update cannot be taken back."""
    run = assert_put_back(tmp_path, SCRIPT, "replicas", inject="kill machine=0 iteration=5 point=optimizer")
    assert [recovery["mode"] for recovery in run.recoveries] == ["restart"]
    for rank in range(2):
        assert recorded(run, rank) == [*range(ITERATIONS)]
