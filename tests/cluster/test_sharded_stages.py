"""FSDP2 inside the stages of a pipeline: the shards of a lost stage are rebuilt, and replay together (§5)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cluster import (
    KILLS_OTHERS,
    ClusterRun,
    assert_clean,
    assert_identical,
    assert_undisturbed,
    at_once,
    run_cluster,
    training,
)

SCRIPT = Path(__file__).parent / "scripts" / "sharded_stages.py"
LITTLE = ["--layers=2", "--microbatches=4"]


def run_stages(
    folder: Path, *args: str, inject: str = "", machines: int = 2, script: Path = SCRIPT
) -> ClusterRun:
    """Two stages of two shards each: the ranks 0 and 1 have the first one."""
    workers = 8 if "--replicas=2" in args else 4
    flags = ["--nproc-per-node", str(workers // machines)]
    return run_cluster(
        folder,
        *LITTLE,
        *args,
        inject=inject,
        machines=machines,
        flags=flags,
        script=training(folder, script),
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> ClusterRun:
    return assert_undisturbed(run_stages(tmp_path_factory.mktemp("undisturbed")))


LOSSES = {
    "the first stage, in a backward pass": "kill machine=0 iteration=5 point=backward microbatch=1",
    "the last stage, in a forward pass": "kill machine=1 iteration=5 point=forward microbatch=2",
    "the last stage, in the optimizer": "kill machine=1 iteration=5 point=optimizer",
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.thorough
def test_a_stage_on_one_machine(loss: str, tmp_path: Path, undisturbed: ClusterRun) -> None:
    run = run_stages(tmp_path, inject=LOSSES[loss])
    assert_identical(run, undisturbed)
    assert_clean(run)
    (recovery,) = run.recoveries
    assert recovery["mode"] == "replay", run.output[-3000:]
    slot = 0 if "machine=0" in LOSSES[loss] else 1
    assert set(recovery["replayed_iterations"]) == {str(2 * slot), str(2 * slot + 1)}


def test_a_stage_across_machines(tmp_path: Path, undisturbed: ClusterRun) -> None:
    """The worker of the other shard loses its state, too, although its machine lives."""
    run = run_stages(
        tmp_path, "--reshard=no", inject="kill machine=3 iteration=5 point=backward microbatch=1", machines=4
    )
    assert_identical(run, undisturbed)
    assert_clean(run)
    (recovery,) = run.recoveries
    assert recovery["mode"] == "replay", run.output[-3000:]
    assert set(recovery["replayed_iterations"]) == {"2", "3"}


@pytest.fixture(scope="module")
def replicated(tmp_path_factory: pytest.TempPathFactory) -> ClusterRun:
    return assert_undisturbed(run_stages(tmp_path_factory.mktemp("undisturbed"), "--replicas=2", machines=4))


REPLICATED = {
    "the first stage, in its last backward pass": "kill machine=1 iteration=5 point=backward microbatch=3",
    "the last stage, in the optimizer": "kill machine=2 iteration=5 point=optimizer",
}


@pytest.mark.parametrize("loss", REPLICATED)
def test_a_replica_of_a_sharded_stage(loss: str, tmp_path: Path, replicated: ClusterRun) -> None:
    """HSDP in stages: a lost machine's shards come from the one that holds the same, and nothing replays."""
    run = run_stages(tmp_path, "--replicas=2", inject=REPLICATED[loss], machines=4)
    assert_identical(run, replicated)
    (recovery,) = run.recoveries
    assert recovery["mode"] == "replica", run.output[-3000:]
    assert recovery["restored"] == ([2, 3] if "machine=1" in REPLICATED[loss] else [4, 5])


@pytest.mark.thorough
def test_all_replicas_of_a_sharded_stage(
    tmp_path: Path, replicated: ClusterRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All its workers replay together, in both dimensions of their mesh."""
    monkeypatch.setenv("KILLS", at_once(4, 6, by=0, example="sharded_stages"))
    run = run_stages(tmp_path, "--replicas=2", machines=4, script=KILLS_OTHERS)
    assert_identical(run, replicated)
    (recovery,) = run.recoveries
    assert recovery["mode"] == "replay", run.output[-3000:]
    assert set(recovery["replayed_iterations"]) == {"4", "5", "6", "7"}
