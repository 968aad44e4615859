"""No machine comes for a lost one: fewer workers take the survivors' state over, and no guest comes.

Whatever fails before it has that state, guests come as ever. No run ends with other weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.cluster import (
    EXAMPLES,
    SMALL,
    ClusterRun,
    assert_identical,
    assert_same_layers,
    run_cluster,
)
from tests.support.integrations import assert_same_files
from tests.support.worlds import given_up, worlds_of

SHRINK = ["--spares", "0", "--no-replacement", "--elastic-wait", "0.2", "--on-loss", "shrink"]
ITERATIONS = 16
LAYERS = ("train_elastic", "--pipelines=2", "--exact")
HSDP = ("train_hsdp", "--layers=2")
FSDP = ("train_fsdp", "--layers=2", "--snapshot-every=3")
REPLICAS = "integrations/any_replicas"


def arguments(folder: Path, example: str, *args: str, iterations: int) -> list[str]:
    """Of an example whose store and files are in a folder."""
    out, kind = ("--out", "out") if example == REPLICAS else ("--weights-out", "weights")
    places = [f"--store={folder / 'store'}", f"{out}={folder / kind}", f"--iterations={iterations}"]
    return [*([] if example == REPLICAS else SMALL), *places, *args]


def train(
    folder: Path,
    example: str,
    *args: str,
    machines: int,
    inject: str = "",
    iterations: int = ITERATIONS,
    flags: Sequence[str] = (),
) -> ClusterRun:
    """A run of an example to its end, in which a loss leads to fewer workers where it can."""
    script = [str(EXAMPLES / f"{example}.py"), *arguments(folder, example, *args, iterations=iterations)]
    run = run_cluster(folder, machines=machines, script=script, inject=inject, flags=[*SHRINK, *flags])
    assert run.code == 0, run.output[-3000:]
    assert len(run.events("FaultInjected")) == inject.count("kill"), "a fault did not strike"
    return run


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> ClusterRun:
    """Two pipelines of two stages that nothing disturbs."""
    return train(tmp_path_factory.mktemp("undisturbed"), *LAYERS, machines=4)


def guests_of(run: ClusterRun) -> int:
    return sum(bool(joined["host"]) for joined in run.events("MachineJoined"))


def without_guest(run: ClusterRun, *, copies: int | None = None) -> int:
    """Checks that a smaller world has followed the loss at once. Returns the iteration it began with.

    Args:
        copies: iterations that survivors had completed, where it begins with copies of an earlier one.
    """
    (world,) = worlds_of(run)
    (planned,) = run.events("ChangePlanned")
    assert planned["asked_by"] == "--on-loss shrink"
    assert not given_up(run)
    assert not guests_of(run)
    (recovery,) = run.recoveries
    assert recovery["mode"] == "continue"
    since = world.worlds.present.since
    assert max(recovery["iterations_lost"].values()) == (0 if copies is None else copies - since)
    return since


def like_a_resumed_run(
    run: ClusterRun, folder: Path, *example: str, before: int, after: int, copies: int | None = None
) -> None:
    """All files are those of a run that stopped at that iteration, and went on with fewer workers."""
    since, every = without_guest(run, copies=copies), "--checkpoint-every"
    train(folder, *example, f"{every}={since}", machines=before, iterations=since)
    for left in [*folder.glob("out/*"), *folder.glob("weights/*")]:
        left.unlink()
    resumed = train(folder, *example, machines=after, flags=["--resume"])
    if example[0] == REPLICAS:
        assert_same_files(run, resumed)
    else:
        assert_identical(run, resumed)


def test_pipelines_go_on_with_fewer_workers(tmp_path: Path, layers: ClusterRun) -> None:
    """All layers of the lost stage are in the other pipeline. All bits are those of a run without a loss.

    The worker that has lost its neighbour is a pipeline of its own.
    """
    run = train(tmp_path, *LAYERS, machines=4, inject="kill machine=1 iteration=5 point=forward microbatch=1")
    assert without_guest(run) == 5
    assert worlds_of(run)[0].world_size == 3
    assert_same_layers(run, layers)


def test_replicas_go_on_without_the_first_of_them(tmp_path: Path) -> None:
    """Global batches are dealt anew, to two workers."""
    run = train(tmp_path / "run", REPLICAS, machines=3, inject="kill machine=0 iteration=5 point=reduced")
    like_a_resumed_run(run, tmp_path / "resumed", REPLICAS, before=3, after=2)


@pytest.mark.thorough
@pytest.mark.parametrize("point", ["optimizer", "between"])
def test_shards_are_cut_for_fewer_workers(point: str, tmp_path: Path) -> None:
    """A machine dies after the last communication of an iteration, or between two of them."""
    fault = f"kill machine=1 iteration=5 point={point}"
    run = train(tmp_path / "run", *HSDP, machines=4, inject=fault)
    like_a_resumed_run(run, tmp_path / "resumed", *HSDP, before=4, after=2)


@pytest.mark.parametrize("point", ["optimizer", pytest.param("between", marks=pytest.mark.thorough)])
def test_shards_without_replicas_come_from_copies_in_memory(point: str, tmp_path: Path) -> None:
    """The lost worker's shards are in another one's memory, of an earlier iteration. All go back to it."""
    run = train(tmp_path / "run", *FSDP, machines=3, inject=f"kill machine=1 iteration=8 point={point}")
    assert {offered["holder"] for offered in run.events("StateOffered")} == {0, 2}
    assert {offered["rank"] for offered in run.events("StateOffered")} == {0, 1, 2}
    like_a_resumed_run(run, tmp_path / "resumed", *FSDP, before=3, after=2, copies=9)


@pytest.mark.parametrize(
    "second",
    [
        "kill machine=2 iteration=any point=offer",  # the holder of the copy
        pytest.param("kill machine=0 iteration=any point=offer", marks=pytest.mark.thorough),
        pytest.param("kill worker=1 iteration=any point=prepared", marks=pytest.mark.thorough),
        pytest.param("kill worker=1 iteration=any point=take", marks=pytest.mark.thorough),
    ],
)
def test_a_second_loss_leads_shards_to_guests(second: str, tmp_path: Path) -> None:
    """What is left in memory counts then, or else the checkpoint. The weights are those of no loss."""
    first = "kill machine=1 iteration=8 point=optimizer"
    run = train(tmp_path / "run", *FSDP, machines=3, inject=f"{first}; {second}")
    assert not worlds_of(run)
    assert given_up(run)
    assert guests_of(run)
    assert_identical(run, train(tmp_path / "undisturbed", *FSDP, machines=3))


@pytest.mark.parametrize(
    "second",
    [
        "kill machine=2 iteration=any point=offer",
        pytest.param("kill machine=0 iteration=any point=offer", marks=pytest.mark.thorough),
        pytest.param("kill worker=3 iteration=any point=offer", marks=pytest.mark.thorough),
        pytest.param("kill machine=1 iteration=any point=prepared", marks=pytest.mark.thorough),
        pytest.param("kill worker=0 iteration=any point=prepared", marks=pytest.mark.thorough),
        pytest.param("kill machine=1 iteration=any point=take", marks=pytest.mark.thorough),
        pytest.param("kill worker=1 iteration=any point=take", marks=pytest.mark.thorough),
    ],
)
def test_a_second_loss_leads_to_guests(second: str, tmp_path: Path, layers: ClusterRun) -> None:
    """A source or a worker of the next world dies before it takes over: all goes on as without the option."""
    first = "kill machine=1 iteration=5 point=forward microbatch=1"
    run = train(tmp_path, *LAYERS, machines=4, inject=f"{first}; {second}")
    assert not worlds_of(run)
    assert given_up(run)
    assert guests_of(run)
    assert_same_layers(run, layers)


def test_a_script_that_needs_its_workers_gets_a_guest(tmp_path: Path) -> None:
    """Its batches do not follow the number of replicas: the next workers refuse, with one line."""
    fault = "kill machine=1 iteration=5 point=reduced"
    run = train(tmp_path / "run", "train_ddp", "--layers=2", machines=2, inject=fault)
    (reason,) = given_up(run)
    assert "The job's state cannot be dealt anew for another topology" in reason
    assert guests_of(run) == 1
    assert_identical(run, train(tmp_path / "undisturbed", "train_ddp", "--layers=2", machines=2))


@pytest.mark.thorough
def test_a_stage_that_nobody_else_holds_gets_a_guest(tmp_path: Path) -> None:
    fault = "kill machine=1 iteration=5 point=forward"
    run = train(tmp_path / "run", "train_swift", machines=3, inject=fault)
    assert not run.events("ChangePlanned")
    assert guests_of(run) == 1
    assert "no smaller world can follow the loss" in run.output
    assert_identical(run, train(tmp_path / "undisturbed", "train_swift", machines=3))
