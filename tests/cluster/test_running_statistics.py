"""BatchNorm's running statistics after a kill are an undisturbed run's, bit for bit.

The kernel changes them without counting a version, so an interrupted batch was once counted twice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.cluster import ClusterRun, assert_identical, once, run_cluster, training

SCRIPT = Path(__file__).parent / "scripts" / "running_statistics.py"
BUCKETS = ["--layers=4", "--bucket-mb=0.01"]
ARGUMENTS = {
    "ddp": BUCKETS,
    "own": BUCKETS,
    "pipeline": ["--layers=4", "--microbatches=4"],
    "hybrid": ["--layers=4", "--microbatches=4"],
}

Run = Callable[..., ClusterRun]


def train(folder: Path, what: str, machines: int, inject: str = "") -> ClusterRun:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STATISTICS", what)
        return run_cluster(
            folder, *ARGUMENTS[what], inject=inject, machines=machines, script=training(folder, SCRIPT)
        )


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return functools.partial(train, tmp_path)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return once(tmp_path_factory, train)


def killed(*faults: str) -> str:
    return "; ".join(f"kill {fault}" for fault in faults)


@pytest.mark.parametrize("machine", [0, 1])
def test_replicas(machine: int, run: Run, undisturbed: Run) -> None:
    """One loss after the other: before, while and after gradients travel, and after the update.

    Once the others have completed an iteration, only they have the first replica's statistics of it.
    """
    points = ["reduce bucket=0", "reducing bucket=3", "reducing bucket=13", "optimizer", "between"]
    faults = [f"machine={machine} iteration={at + 1} point={point}" for at, point in enumerate(points)]
    done = run("ddp", 2, killed(*faults))
    assert len(done.events("FaultInjected")) == len(faults)
    assert_identical(done, undisturbed("ddp", 2))
    assert not any(recovery["statistics_from"] for recovery in done.recoveries)


def test_replicas_with_statistics_of_their_own(run: Run, undisturbed: Run) -> None:
    """The survivor keeps its own. The lost worker's are gone: the report says so, and the log."""
    done = run("own", 2, killed("machine=0 iteration=5 point=reducing bucket=3"))
    assert done.code == 0, done.output[-6000:]
    (recovery,) = done.recoveries
    assert recovery["statistics_from"] == {"0": 1}
    assert "Worker 0 loses its own running statistics" in done.output
    ours, theirs = done.weights(), undisturbed("own", 2).weights()
    own = [name for name in theirs if name.startswith("rank1.")]
    assert all(ours[name].equal(theirs[name]) for name in own)


@pytest.mark.parametrize(
    "fault",
    [
        "machine=1 iteration=5 point=forward microbatch=2",
        "machine=1 iteration=1 point=backward microbatch=3",  # replayed from the first checkpoint
    ],
)
def test_pipeline(fault: str, run: Run, undisturbed: Run) -> None:
    """A replay gives the same statistics, and a survivor counts no microbatch twice."""
    done = run("pipeline", 2, killed(fault))
    assert_identical(done, undisturbed("pipeline", 2))
    assert {recovery["mode"] for recovery in done.recoveries} == {"replay"}


def test_replicated_pipelines(run: Run, undisturbed: Run) -> None:
    """Each replica has its own. Survivors keep theirs, and DDP does not synchronise them after a recovery."""
    done = run("hybrid", 4, killed("machine=2 iteration=5 point=backward microbatch=3"))
    assert done.code == 0, done.output[-6000:]
    (recovery,) = done.recoveries
    assert recovery["statistics_from"] == {"2": 0}
    ours, theirs = done.weights(), undisturbed("hybrid", 4).weights()
    kept = [name for name in theirs if not name.startswith("rank2.")]
    assert kept
    assert not [name for name in kept if not ours[name].equal(theirs[name])]
