"""All replicas of a stage are lost at once: they replay jointly. Other stages have living replicas."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cluster import (
    EXAMPLES,
    ClusterRun,
    assert_clean,
    assert_identical,
    assert_undisturbed,
    run_cluster,
    training,
)

SCRIPTS = Path(__file__).parent / "scripts"
TOGETHER = SCRIPTS / "replicas_together.py"


def run_replicas(
    folder: Path,
    machines: int,
    *,
    workers: int = 8,
    inject: str = "",
    script: Path = EXAMPLES / "train_hybrid.py",
) -> ClusterRun:
    """Two replicas of a pipeline.

    With fewer microbatches, as many as stages, torch's own warm-up confuses DDP's buckets.
    """
    return run_cluster(
        folder,
        "--layers=4",
        inject=inject,
        machines=machines,
        flags=["--nproc-per-node", str(workers // machines), "--spares", "3"],
        script=training(folder, script),
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> ClusterRun:
    """Ranks 0 to 3 are the first pipeline's stages, 4 to 7 the second's."""
    return assert_undisturbed(run_replicas(tmp_path_factory.mktemp("undisturbed"), 4))


def assert_replayed(run: ClusterRun, ranks: set[int], *, restored: list[int], lost: set[int]) -> None:
    """One recovery: some ranks were restored from a replica, some replayed, the rest kept their state."""
    assert_clean(run)
    (recovery,) = run.recoveries
    assert recovery["mode"] == "replay", recovery["reason"]
    assert {int(rank) for rank in recovery["replayed_iterations"]} == ranks
    assert recovery["restored"] == restored
    assert {int(rank) for rank, count in recovery["iterations_lost"].items() if count} == lost


@pytest.mark.parametrize(
    ("machines", "victims", "replayed", "restored", "lost"),
    [
        pytest.param(4, "0,1,4,5", {0, 1, 4, 5}, [], set(), id="two neighbouring stages"),
        pytest.param(8, "1,3,5", {1, 5}, [3], set(), id="another stage has a replica"),
        pytest.param(8, "1,2,5", {1, 2, 5, 6}, [], {6}, id="a neighbour has a replica, but no log"),
    ],
)
def test_machines_that_die_together(
    machines: int,
    victims: str,
    replayed: set[int],
    restored: list[int],
    lost: set[int],
    tmp_path: Path,
    undisturbed: ClusterRun,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Replication first (§3). A stage without a living replica is replayed in the same recovery."""
    monkeypatch.setenv("SWIFT_TEST_VICTIMS", victims)
    monkeypatch.setenv("SWIFT_TEST_LOSSES", str(8 * 5 + 3))  # in iteration 5
    run = run_replicas(tmp_path, machines, script=SCRIPTS / "die_together.py")
    assert_identical(run, undisturbed)
    assert_replayed(run, replayed, restored=restored, lost=lost)


@pytest.mark.thorough
def test_replicas_on_one_machine(tmp_path: Path) -> None:
    """They do not count (figure 2)."""
    undisturbed = run_replicas(tmp_path / "undisturbed", 2, workers=4, script=TOGETHER)
    fault = "kill machine=1 iteration=5 point=forward microbatch=2"
    run = run_replicas(tmp_path, 2, workers=4, inject=fault, script=TOGETHER)
    assert_identical(run, undisturbed)
    assert_replayed(run, {2, 3}, restored=[], lost=set())
