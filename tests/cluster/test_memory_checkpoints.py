"""Any script: after a loss all return, in their processes, to a copy in the memory of the living."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import (
    EXAMPLES,
    ITERATIONS,
    KILLS_IN_TURN,
    KILLS_OTHERS,
    ClusterRun,
    assert_identical,
    assert_reported_once,
    assert_undisturbed,
    at_once,
    in_turn,
    one_line,
    recover,
    run_cluster,
    training,
)

SCRIPT = Path(__file__).parent / "scripts" / "by_hand.py"
COPIES = Path(__file__).parent / "scripts" / "with_copies.py"


def run_by_hand(
    folder: Path,
    *args: str,
    inject: str = "",
    machines: int = 2,
    flags: list[str] | None = None,
    script: Path = SCRIPT,
) -> ClusterRun:
    places = ["--store", str(folder / "store"), "--weights-out", str(folder / "weights")]
    command = [str(script), *places, *args]
    return run_cluster(folder, inject=inject, machines=machines, flags=flags, script=command)


def ways(run: ClusterRun) -> list[tuple[str, int]]:
    """How each recovery went back, and to where."""
    return [(recovery["mode"], recovery["resume"]) for recovery in run.recoveries]


def replaced(run: ClusterRun) -> set[int]:
    """Workers whose process is not the one that began, by what the journal says of their machines."""
    return {slot for recovery in run.recoveries for slot in recovery["slots"]}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> ClusterRun:
    return assert_undisturbed(run_by_hand(tmp_path_factory.mktemp("undisturbed")))


@pytest.fixture(scope="module")
def of_three(tmp_path_factory: pytest.TempPathFactory) -> ClusterRun:
    return assert_undisturbed(run_by_hand(tmp_path_factory.mktemp("undisturbed"), "--settle", machines=3))


@pytest.fixture(scope="module")
def of_four(tmp_path_factory: pytest.TempPathFactory) -> ClusterRun:
    return assert_undisturbed(run_by_hand(tmp_path_factory.mktemp("undisturbed"), machines=4))


@pytest.mark.parametrize(
    ("fault", "resume"),
    [
        ("kill machine=1 iteration=12 point=forward", 10),
        ("kill machine=0 iteration=12 point=reduce", 10),
        ("kill machine=1 iteration=12 point=optimizer", 10),
        ("kill machine=1 iteration=10 point=between", 10),
        ("kill machine=0 iteration=3 point=backward", 0),
    ],
)
def test_the_lost_state_comes_from_another_machine(
    fault: str, resume: int, tmp_path: Path, reference: ClusterRun
) -> None:
    run = run_by_hand(tmp_path, "--settle", inject=fault)
    assert_identical(run, reference)
    assert ways(run) == [("memory", resume)], run.output[-3000:]
    survivor = 0 if "machine=1" in fault else 1
    kept = [fact for fact in run.report["events"] if fact["event"] == "MachineLost"]
    assert len(kept) == 1
    assert replaced(run) == {1 - survivor}


def test_a_loss_while_a_copy_is_sent(tmp_path: Path, reference: ClusterRun) -> None:
    """The copy before it is complete, and all still have that one."""
    run = run_by_hand(tmp_path, "--settle", inject="kill machine=1 iteration=10 point=copy")
    assert_identical(run, reference)
    assert ways(run) == [("memory", 5)], run.output[-3000:]


def test_one_loss_after_the_other(tmp_path: Path, of_three: ClusterRun) -> None:
    """The second one strikes the worker that has just given back a copy, and is its own copy's owner."""
    faults = "kill machine=1 iteration=7 point=forward; kill machine=2 iteration=12 point=optimizer"
    run = run_by_hand(tmp_path, "--settle", inject=faults, machines=3)
    assert_identical(run, of_three)
    assert ways(run) == [("memory", 5), ("memory", 10)], run.output[-3000:]


def test_a_loss_while_all_return(tmp_path: Path, of_three: ClusterRun) -> None:
    faults = "kill machine=0 iteration=12 point=forward; kill machine=0 iteration=10 point=load"
    run = run_by_hand(tmp_path, "--settle", inject=faults, machines=3)
    assert_identical(run, of_three)
    assert ways(run) == [("memory", 10)], run.output[-3000:]


def test_a_worker_and_its_holder_are_lost(
    tmp_path: Path, of_three: ClusterRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state of worker 1 is in no memory any more: all load the checkpoint of the store."""
    monkeypatch.setenv("KILLS", at_once(1, 2, by=0, iteration=12, example="by_hand"))
    every = ["--checkpoint-every", "4"]
    run = run_by_hand(tmp_path, "--settle", *every, machines=3, script=KILLS_OTHERS)
    assert_identical(run, of_three)
    assert [mode for mode, _ in ways(run)] == ["fallback"], run.output[-3000:]


def test_one_more_is_lost_before_all_have_reported(
    tmp_path: Path, of_four: ClusterRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copies that survivors reported once are those to which all return."""
    monkeypatch.setenv("KILLS", in_turn(1, 3, iteration=12, example="by_hand"))
    run = run_by_hand(tmp_path, "--settle", machines=4, script=KILLS_IN_TURN)
    assert_identical(run, of_four)
    assert ways(run) == [("memory", 10)], run.output[-3000:]
    assert_reported_once(run, 0, 2)


def test_all_machines_of_a_failure_domain_are_lost(
    tmp_path: Path, of_four: ClusterRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their copies are in the other one. A spare of that one comes: then some copies must stay in it."""
    monkeypatch.setenv("KILLS", at_once(0, 1, by=2, iteration=7, example="by_hand"))
    run = run_by_hand(
        tmp_path,
        "--settle",
        inject="kill machine=1 iteration=12 point=optimizer",
        machines=4,
        flags=["--failure-domain", "a,a,b,b,b"],
        script=KILLS_OTHERS,
    )
    assert_identical(run, of_four)
    assert ways(run) == [("memory", 5), ("memory", 10)], run.output[-3000:]
    assert run.output.count("checkpoints of machines 2, 3 stay in their own failure domain") == 1


@pytest.mark.parametrize(
    ("which", "way", "reason"),
    [
        ("held", ("fallback", 0), "finds that it is not what was sent"),
        ("own", ("memory", 10), "the copy of iteration 10 in memory is not what was copied"),
    ],
)
def test_a_flipped_bit_in_a_copy(
    which: str, way: tuple[str, int], reason: str, tmp_path: Path, of_three: ClusterRun
) -> None:
    """Of worker 2, which is lost, there is no other one: the store is next. Of worker 0 machine 1 has one."""
    fault = "kill machine=2 iteration=12 point=forward"
    run = run_by_hand(tmp_path, "--settle", "--damage", which, inject=fault, machines=3)
    assert_identical(run, of_three)
    assert ways(run) == [way], run.output[-3000:]
    assert reason in run.recoveries[0]["reason"]


@pytest.mark.parametrize(("left", "begins"), [(1_000_000, False), (2_000_000, True)])
def test_too_little_memory_for_copies(left: int, begins: bool, tmp_path: Path) -> None:
    """It is said before the first step or, where only the optimizer's state is too much, after it."""
    run = run_by_hand(tmp_path, "--hidden", "4000", "--memory-left", str(left))
    assert run.code == 2, run.output[-3000:]
    assert "snapshot_every needs" in one_line(run)
    assert "are left: give the machine more memory, or leave snapshot_every out" in one_line(run)
    assert bool(run.events("StatusReported")) == begins
    assert not (tmp_path / "weights").exists()


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> ClusterRun:
    return assert_undisturbed(run_by_hand(tmp_path_factory.mktemp("undisturbed"), "--fully-shard"))


@pytest.mark.parametrize(
    ("fault", "resume"),
    [
        ("kill machine=1 iteration=12 point=forward", 10),
        ("kill machine=0 iteration=12 point=backward", 10),
        ("kill machine=1 iteration=12 point=optimizer", 10),
    ],
)
def test_a_lost_shard(fault: str, resume: int, tmp_path: Path, sharded: ClusterRun) -> None:
    """The survivor is interrupted in FSDP's own collectives, and its process and modules go on."""
    run = run_by_hand(tmp_path, "--settle", "--fully-shard", inject=fault)
    assert_identical(run, sharded)
    assert ways(run) == [("memory", resume)], run.output[-3000:]


def test_a_pipeline_whose_log_is_damaged(
    tmp_path: Path, references: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot replay: what is in memory is nearer than the store's checkpoint, of iteration 3."""
    monkeypatch.setenv("DAMAGE", "flip")
    fault = "kill machine=1 iteration=5 point=forward microbatch=3"
    run = run_cluster(tmp_path, inject=fault, script=training(tmp_path, COPIES))
    assert_identical(run, references())
    assert ways(run) == [("memory", 4)], run.output[-3000:]
    assert "does not match its checksum" in run.recoveries[0]["reason"]


def test_replicas_that_cannot_undo(tmp_path: Path) -> None:
    """No replica is whole: one is lost, the other one has begun to update."""
    reference = run_by_hand(tmp_path / "undisturbed", "--ddp")
    run = run_by_hand(
        tmp_path / "lost", "--ddp", "--settle", inject="kill machine=1 iteration=12 point=optimizer"
    )
    assert_identical(run, reference)
    assert ways(run) == [("memory", 10)], run.output[-3000:]


def test_what_a_plan_says_of_a_loss(of_three: ClusterRun) -> None:
    """The same as what the losses of the tests before lead to."""
    for failed, mode, resume in (("1", "memory", 10), ("1,2", "fallback", 0)):
        done = recover("plan", str(of_three.store), "--fail", failed, "--iteration", "12", "--json")
        plan = json.loads(done.stdout)
        assert (plan["mode"], plan["resume"], plan["in_memory"]) == (mode, resume, 10), done.stderr


def test_the_interval_that_a_job_chooses(tmp_path: Path, reference: ClusterRun) -> None:
    """Whatever the interval, the result is the same."""
    run = run_by_hand(
        tmp_path, "--snapshot-every", "auto", inject="kill machine=0 iteration=12 point=forward"
    )
    assert_identical(run, reference)
    assert [mode for mode, _ in ways(run)] == ["memory"], run.output[-3000:]


def test_the_example(tmp_path: Path) -> None:
    def run(name: str, inject: str = "") -> ClusterRun:
        script = [*training(tmp_path / name, EXAMPLES / "train_fsdp.py")]
        script += ["--snapshot-every", "3", "--checkpoint-every", "100"]
        return run_cluster(tmp_path / name, inject=inject, machines=2, script=script)

    killed = run("killed", f"kill machine=1 iteration={ITERATIONS - 2} point=between")
    assert_identical(killed, run("undisturbed"))
    assert [way for way, _ in ways(killed)] == ["memory"], killed.output[-3000:]
