"""What a loader counts in objects of the script goes with its place; what the script sets in them travels."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.habits import assert_put_back

SCRIPT = Path(__file__).parent / "scripts" / "counts_samples.py"
COUNTED = ["a stream", "a buffer", "a sampler", "a function for batches"]
SET = [
    "a level",
    "a level by index",
    "a level by index, by processes",
    "a level globally, by processes",
    "a level by processes, from an epoch on",
    "a level by processes, within an epoch",
]


@pytest.mark.parametrize("habit", [*COUNTED, *SET])
def test_replicas(habit: str, tmp_path: Path) -> None:
    """In the first epoch of six batches, and in the second one."""
    faults = "kill machine=1 iteration=4 point=reduce committed=3; kill machine=0 iteration=8 point=reduce"
    assert_put_back(tmp_path, SCRIPT, habit, inject=faults)


@pytest.mark.parametrize("habit", [*COUNTED, *SET])
def test_a_pipeline(habit: str, tmp_path: Path) -> None:
    faults = "kill machine=1 iteration=5 point=backward microbatch=1 committed=3"
    run = assert_put_back(tmp_path, SCRIPT, habit, "pipeline", inject=faults)
    assert [recovery["mode"] for recovery in run.recoveries] == ["replay"]


def test_the_first_step(tmp_path: Path) -> None:
    """It is noted before the loader has counted anything."""
    assert_put_back(tmp_path, SCRIPT, "a stream", inject="kill machine=1 iteration=0 point=reduce")
