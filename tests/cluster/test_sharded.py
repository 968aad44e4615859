"""HSDP: a worker is killed anywhere in an iteration; its shards come from a replica, to the bit (§4)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.cluster import (
    EXAMPLES,
    ClusterRun,
    assert_clean,
    assert_identical,
    once,
    one_line,
    run_cluster,
    training,
)

SCRIPT = Path(__file__).parent / "scripts" / "sharded.py"
SMALLER = ["--layers=2", "--iterations=6"]
ITERATION = 4

Reference = Callable[..., ClusterRun]


def run_sharded(
    folder: Path,
    *args: str,
    machines: int = 4,
    ranks: tuple[int, ...] = (),
    point: str = "",
    after: tuple[int, ...] = (),
) -> ClusterRun:
    """Four workers, two replicas of two shards. Some die at a point, after the updates of others."""
    flags = ["--nproc-per-node", str(4 // machines)]
    script = [*training(folder, SCRIPT), *SMALLER]
    with pytest.MonkeyPatch.context() as environment:
        death = {"ranks": ranks, "point": point, "iteration": ITERATION, "after": after}
        environment.setenv("SWIFT_TEST_DEATH", json.dumps(death))
        return run_cluster(folder, *args, machines=machines, flags=flags, script=script)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Undisturbed runs by their arguments. The layout on machines makes no difference."""
    return once(tmp_path_factory, lambda folder, *args: run_sharded(folder, *args, machines=2))


def assert_restored(run: ClusterRun, reference: ClusterRun) -> None:
    """By replicas alone: no worker loaded a checkpoint."""
    assert_identical(run, reference)
    assert_clean(run)
    assert [recovery["mode"] for recovery in run.recoveries] == ["replica"], run.output[-3000:]


POINTS = [
    "forward 0",
    "forward 1",
    "between the passes",
    "backward 1",
    "backward 0",
    "before reduce_scatter_single 1",
    "after reduce_scatter_single 3",
    "after all_reduce 2",
    "before step",
    "after step",
]


@pytest.mark.parametrize("point", POINTS)
def test_one_of_four_machines(point: str, tmp_path: Path, undisturbed: Reference) -> None:
    run = run_sharded(tmp_path, ranks=(3,), point=point)
    assert_restored(run, undisturbed())


@pytest.mark.parametrize("ranks", [(2,), (1,)], ids=["the second replica", "the first replica"])
def test_a_machine_with_a_whole_replica(
    ranks: tuple[int, ...], tmp_path: Path, undisturbed: Reference
) -> None:
    """Both of its shards come from the other replica, each from the worker that has it."""
    run = run_sharded(tmp_path, machines=2, ranks=ranks, point="after all_reduce 2")
    assert_restored(run, undisturbed())
    slot = ranks[0] // 2
    assert {t.source // 2 for t in run.last_plan().transfers} == {1 - slot}
    assert [(t.source - 2 * (1 - slot), t.targets[0] - 2 * slot) for t in run.last_plan().transfers] == [
        (0, 0),
        (1, 1),
    ]


VARIANTS = {
    "bf16, and all blocks stay gathered": (["--bf16", "--reshard=no"], "before all_gather_single 2"),
    "parameters on the host, SGD": (["--offload", "--optimizer=SGD"], "before reduce_scatter_single 2"),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(variant: str, tmp_path: Path, undisturbed: Reference) -> None:
    args, point = VARIANTS[variant]
    run = run_sharded(tmp_path, *args, ranks=(0,), point=point)
    assert_restored(run, undisturbed(*args))


AHEAD = "before all_reduce 3"
"""Workers 0 and 2 have all that they need to complete the iteration; worker 1 waits for worker 3."""


@pytest.mark.parametrize("size", ["", "--large"], ids=["by copies", "by the inverse"])
def test_workers_with_another_shard_undo_the_step_that_the_others_miss(
    size: str, tmp_path: Path, undisturbed: Reference
) -> None:
    args = ["--no-clip", *([size] if size else [])]
    run = run_sharded(tmp_path, *args, ranks=(3,), point=AHEAD, after=(0, 2))
    assert_restored(run, undisturbed("--no-clip"))
    plan = run.last_plan()
    assert plan.resume == ITERATION
    assert {rank for rank, task in plan.tasks.items() if task.undo} == {0, 2}


def test_workers_that_cannot_undo_that_step_go_back_to_the_checkpoint(
    tmp_path: Path, undisturbed: Reference
) -> None:
    run = run_sharded(tmp_path, "--no-clip", "--plain-optimizer", ranks=(3,), point=AHEAD, after=(0, 2))
    assert_identical(run, undisturbed("--no-clip"))
    assert [recovery["mode"] for recovery in run.recoveries] == ["fallback"]
    assert "cannot undo it: that takes optimizers which swift_ft.wrap_optimizer() has wrapped" in run.output


def test_shards_without_a_replica_are_refused(tmp_path: Path) -> None:
    run = run_sharded(tmp_path, "--replicas=1", machines=2)
    assert run.code == 2, run.output[-3000:]
    assert "no other one holds what a lost one held: shard it within replicas (HSDP)" in one_line(run)


def test_the_example(tmp_path: Path) -> None:
    def run(name: str, inject: str = "") -> ClusterRun:
        script = [*training(tmp_path / name, EXAMPLES / "train_hsdp.py"), *SMALLER]
        return run_cluster(tmp_path / name, inject=inject, script=script)

    killed = run("killed", f"kill machine=1 iteration={ITERATION} point=between")
    assert_restored(killed, run("undisturbed"))
