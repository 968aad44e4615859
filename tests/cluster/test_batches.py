"""A repeated iteration gets the batch that it had, or the run ends with a line that says so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.cluster import ClusterRun, assert_identical, one_line, run_cluster, training

INDEXED = Path(__file__).parent / "scripts" / "train_indexed.py"
BY_ITERATOR = Path(__file__).parent / "scripts" / "by_iterator.py"


def run_by_iterator(
    folder: Path, kind: str, fault: str, check: str = "check", *habit: str, machines: int = 2
) -> ClusterRun:
    script = [str(BY_ITERATOR), kind, str(folder / "store"), check, *habit]
    return run_cluster(folder, inject=fault and f"kill {fault}", machines=machines, script=script)


@pytest.mark.parametrize("habit", ["", "reads"])
@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        pytest.param("pipeline", "machine=1 iteration=5 point=forward", id="a survivor gives the next one"),
        pytest.param("pipeline", "machine=0 iteration=4 point=between", id="a replay begins anew"),
        pytest.param("ddp", "machine=1 iteration=5 point=reduce", id="a replica gives the next one"),
        pytest.param("ddp", "machine=0 iteration=4 point=between", id="a new replica begins anew"),
    ],
)
def test_batches_of_an_iterator(kind: str, fault: str, habit: str, tmp_path: Path) -> None:
    """Also where the script reads the index for something else."""
    run = run_by_iterator(tmp_path, kind, fault, "check", habit)
    assert run.code == 2, run.output[-3000:]
    assert "from an iterator (data)" in run.output  # in the first steps
    lines = [line for line in run.output.splitlines() if line.startswith("swift-run: ")]
    assert lines
    assert all("Look batches up by step.index" in line for line in lines)


@pytest.mark.parametrize(
    ("kind", "habit", "name"),
    [
        ("pipeline", "prefetches", "prefetcher.next_input"),
        ("pipeline", "trainer", "trainer.prefetcher.next_input"),
        ("ddp", "prefetches", "prefetcher.next_input"),
    ],
)
def test_a_batch_that_is_kept_beside_its_iterator(kind: str, habit: str, name: str, tmp_path: Path) -> None:
    """Only one of them would go back with a step: it is refused in the first steps."""
    run = run_by_iterator(tmp_path, kind, "", "check", habit, machines=3)
    assert run.code == 2, run.output[-3000:]
    assert f"{name} holds a batch that came from the iterator beside it" in one_line(run)


def test_batches_that_may_differ(tmp_path: Path) -> None:
    run = run_by_iterator(tmp_path, "ddp", "machine=1 iteration=5 point=reduce", check="off")
    assert run.code == 0, run.output[-3000:]
    assert len(run.recoveries) == 1


@pytest.mark.parametrize(
    ("example", "fault"),
    [
        pytest.param("train_swift", "machine=0 iteration=5 point=backward microbatch=3", id="a pipeline"),
        pytest.param("train_ddp", "machine=1 iteration=5 point=reduced bucket=0", id="replicas"),
    ],
)
def test_batches_by_index(example: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shuffled, in several epochs, with random numbers in them, and loaded by workers."""
    monkeypatch.setenv("EXAMPLE", example)
    runs = []
    for name, inject in (("undisturbed", ""), ("killed", f"kill {fault}")):
        folder = tmp_path / name
        runs.append(run_cluster(folder, inject=inject, machines=2, script=training(folder, INDEXED)))
    undisturbed, killed = runs
    assert undisturbed.code == 0, undisturbed.output[-3000:]
    assert_identical(killed, undisturbed)
    assert [recovery["mode"] for recovery in killed.recoveries] != []


@pytest.mark.thorough
def test_a_loader_that_stands_still(tmp_path: Path) -> None:
    """Only the worker speaks that all others wait for, and names the line."""
    script = training(tmp_path, Path(__file__).parent / "scripts" / "slow_batch.py")
    run = run_cluster(tmp_path, machines=2, script=script)
    assert run.code == 0, run.output[-3000:]
    (line,) = (line for line in run.output.splitlines() if "has been in iteration" in line)
    assert re.search(r"worker 0 has been in iteration 3 for 1\d\.\d s; the longest before took", line)
    assert re.search(r"Its script is at slow_batch\.py:\d+ \(stand_still\)$", line)
