"""A running job changes to another world, from memory to memory, and trains on as if nothing had happened."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.cluster import (
    EXAMPLES,
    ClusterRun,
    assert_clean,
    assert_identical,
    assert_same_layers,
    assert_undisturbed,
    once,
    run_cluster,
    training,
)
from tests.support.worlds import (
    CHANGES_WORLD,
    Change,
    given_up,
    run_changed,
    saved_state,
    taken_state,
    worlds_of,
)

ITERATIONS = 60


@pytest.fixture
def changed(tmp_path: Path) -> Callable[..., ClusterRun]:
    """Runs an example whose worker 0 plans changes."""

    def run(
        example: str,
        *changes: Change,
        machines: int,
        spares: int = 0,
        inject: str = "",
        flags: Sequence[str] = (),
        every: int = 20,
    ) -> ClusterRun:
        _, *args = training(tmp_path, CHANGES_WORLD, iterations=ITERATIONS)
        return run_changed(
            tmp_path,
            example,
            changes,
            [*args, f"--checkpoint-every={every}"],
            machines=machines,
            inject=inject,
            flags=["--spares", str(spares), *flags],
        )

    return run


def undisturbed(folder: Path, example: str, machines: int, *, workers: int = 1) -> ClusterRun:
    script = [*training(folder, EXAMPLES / f"{example}.py", iterations=ITERATIONS), "--checkpoint-every=20"]
    run = run_cluster(folder, machines=machines, script=script, flags=["--nproc-per-node", str(workers)])
    return assert_undisturbed(run)


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Undisturbed runs, by example, machines and workers of each."""
    return once(tmp_path_factory, undisturbed)


def test_replicas_change_places(changed: Any, references: Any) -> None:
    run = changed("train_ddp", (3, [1, 0], []), machines=2)
    assert_identical(run, references("train_ddp", 2))
    (world,) = worlds_of(run)
    assert not given_up(run)
    assert world.worlds.present.since >= 3
    assert_clean(run)


def test_each_rank_goes_on_with_its_own_variables(changed: Any) -> None:
    """Two workers on each of two machines, which change places: a rank's variables are on the other one."""
    run = changed("counts_by_rank", (20, [1, 0], ["--seed=0"]), machines=2, flags=["--nproc-per-node", "2"])
    assert len(worlds_of(run)) == 1
    seen = {name: int(value) for name, value in run.weights().items() if name.endswith("seen")}
    assert seen == {f"rank{rank}.seen": ITERATIONS * (rank + 1) for rank in range(4)}


def test_layers_are_dealt_to_other_numbers_of_machines(changed: Any, references: Any) -> None:
    """Fewer, then more: the spare of the beginning is in use at the end."""
    changes: list[Change] = [(2, [0, 2], []), (20, [1, 0, 3, 2], [])]
    run = changed("train_elastic", *changes, machines=3, spares=1)
    few, many = worlds_of(run)
    assert (few.world_size, many.world_size) == (2, 4)
    assert not given_up(run)
    assert_identical(run, references("train_elastic", 4))
    assert_clean(run)


def test_layers_in_wrappers_are_dealt_anew(changed: Any, references: Any) -> None:
    """Their parameters are trained by the optimizers of the next world, too."""
    run = changed("wrapped_layers", (2, [0, 2], []), machines=3)
    assert [world.world_size for world in worlds_of(run)] == [2]
    assert_identical(run, references("train_elastic", 2))
    assert_clean(run)
    assert not (run.store / "log/rank-00002").exists(), "nobody has this rank any more"


@pytest.mark.thorough
def test_a_stage_moves_to_a_spare(changed: Any, references: Any) -> None:
    """No message is replayed."""
    run = changed("train_swift", (3, [0, 3, 2], []), machines=3, spares=1)
    assert len(worlds_of(run)) == 1
    assert_identical(run, references("train_swift", 3))


@pytest.mark.parametrize(
    "fault",
    [
        "kill machine=1 iteration=any point=prepared",
        pytest.param("kill worker=1 iteration=any point=prepared", marks=pytest.mark.thorough),
        pytest.param("kill machine=0 iteration=any point=offer", marks=pytest.mark.thorough),
        pytest.param("kill worker=1 iteration=any point=offer", marks=pytest.mark.thorough),
        pytest.param("kill machine=1 iteration=any point=take", marks=pytest.mark.thorough),
        "kill worker=0 iteration=any point=take",
        pytest.param("raise worker=1 iteration=any point=prepared", marks=pytest.mark.thorough),
    ],
)
def test_a_loss_before_the_next_world_takes_over(changed: Any, references: Any, fault: str) -> None:
    """The present world trains on, and recovers if it has lost somebody. The change is planned again."""
    run = changed(
        "train_ddp",
        (3, [1, 0], []),
        machines=2,
        spares=1,
        inject=fault,
        flags=("--max-restarts=0",),
    )
    assert len(given_up(run)) == 1
    assert len(worlds_of(run)) == 1
    assert_identical(run, references("train_ddp", 2))


@pytest.mark.parametrize(
    ("example", "point"),
    [
        ("train_swift", "forward"),
        *(
            pytest.param(example, point, marks=pytest.mark.thorough)
            for example in ("train_ddp", "train_elastic", "train_swift")
            for point in ("forward", "optimizer", "between")
            if (example, point) != ("train_swift", "forward")
        ),
    ],
)
def test_a_loss_after_the_next_world_has_taken_over(
    changed: Any, references: Any, example: str, point: str
) -> None:
    machines = 2 if example == "train_ddp" else 3
    point = "reduce" if (example, point) == ("train_ddp", "forward") else point
    fault = f"kill machine=1 iteration=45 point={point}"
    run = changed(
        example,
        (3, [*range(machines)][::-1], []),
        machines=machines,
        spares=1,
        inject=fault,
    )
    assert len(worlds_of(run)) == 1
    assert [recovery["mode"] for recovery in run.recoveries] == [
        "replica" if example == "train_ddp" else "replay"
    ]
    assert_identical(run, references(example, machines))


def test_a_loss_for_which_none_comes_after_the_next_world_has_taken_over(
    changed: Any, references: Any
) -> None:
    """A machine of the next world forks a guest, whose start and end its standby reports to it."""
    flags = ("--no-replacement", "--elastic-wait=0")
    fault = "kill machine=1 iteration=45 point=forward"
    run = changed("train_elastic", (3, [2, 1, 0], []), machines=3, inject=fault, flags=flags)
    assert len(worlds_of(run)) == 1
    assert [joined["host"] for joined in run.events("MachineJoined") if joined["host"]], "no guest has come"
    assert_same_layers(run, references("train_elastic", 3))


@pytest.mark.parametrize(
    ("machines", "slots"), [(2, [1, 0, 2]), pytest.param(3, [2, 0], marks=pytest.mark.thorough)]
)
def test_shards_are_cut_anew(changed: Any, tmp_path: Path, machines: int, slots: list[int]) -> None:
    """All goes on as from a checkpoint of that iteration that as many machines load."""
    run = changed("train_fsdp", (3, slots, []), machines=machines, spares=1)
    (world,) = worlds_of(run)
    since, folder = world.worlds.present.since, tmp_path / "from_store"
    example = EXAMPLES / "train_fsdp.py"
    script = [*training(folder, example, iterations=since), f"--checkpoint-every={since}"]
    assert run_cluster(folder, machines=machines, script=script).code == 0
    shutil.rmtree(folder / "weights")
    script = training(folder, example, iterations=ITERATIONS)
    assert_identical(run, run_cluster(folder, machines=len(slots), script=script, flags=["--resume"]))


@pytest.mark.parametrize(
    ("machines", "slots", "arguments"),
    [
        (4, [2, 0], ["pp=1,tp=2"]),
        pytest.param(2, [1, 0], ["--parts", "1"], marks=pytest.mark.thorough),
        pytest.param(4, [0, 1, 2, 3], ["--parts", "4"], marks=pytest.mark.thorough),
        pytest.param(4, [3, 2, 1, 0], ["pp=4,tp=1"], marks=pytest.mark.thorough),
    ],
)
def test_a_pipeline_of_shards_is_cut_otherwise(
    changed: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    machines: int,
    slots: list[int],
    arguments: list[str],
) -> None:
    """Each parameter keeps its values and what the optimizer has of it, in other stages and slices.

    All goes on as from a checkpoint of that iteration that is resumed in that layout.
    """
    example = "train_tensor_parallel"
    monkeypatch.setenv("TAKEN", str(tmp_path / "taken"))
    run = changed(example, (3, slots, arguments), machines=machines, every=10 * ITERATIONS)
    (world,) = worlds_of(run)
    since, folder = world.worlds.present.since, tmp_path / "undisturbed"
    script = [*training(folder, EXAMPLES / f"{example}.py", iterations=since), f"--checkpoint-every={since}"]
    monkeypatch.delenv("TAKEN")
    assert run_cluster(folder, machines=machines, script=script).code == 0
    ours, theirs = taken_state(tmp_path / "taken"), saved_state(folder / "store", since)
    assert ours.keys() == theirs.keys()
    assert any(path[0] == "optimizers" for path in ours)
    assert not [path for path in ours if not torch.equal(ours[path], theirs[path])]
    parts = arguments[-1].rpartition("=")[2]
    shutil.rmtree(folder / "weights")
    script = [*training(folder, EXAMPLES / f"{example}.py", iterations=ITERATIONS), "--parts", parts]
    assert_identical(run, run_cluster(folder, machines=len(slots), script=script, flags=["--resume"]))
    script = [*training(tmp_path, EXAMPLES / f"{example}.py", iterations=ITERATIONS + 2), "--parts", parts]
    resumed = run_cluster(tmp_path, machines=len(slots), script=script, flags=["--resume"])
    assert resumed.code == 0, resumed.output[-3000:]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("starved", "why"),
    [("raises", "OutOfMemoryError: CUDA out of memory"), ("killed", "was killed by SIGKILL")],
)
def test_a_next_world_without_memory_is_given_up(
    starved: str, why: str, changed: Any, references: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it is prepared. The present one trains on, and says why."""
    monkeypatch.setenv("STARVED", starved)
    run = changed("starved_next", (3, [0, 1, 2], []), machines=2, spares=1)
    assert not worlds_of(run)
    assert not run.events("SwitchRequested")
    assert not run.recoveries
    assert all(why in reason for reason in given_up(run))
    assert f"world 1 does not take over: {given_up(run)[0]}" in run.output
    assert_identical(run, references("train_elastic", 2))
