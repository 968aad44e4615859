"""A replica is killed anywhere in an iteration; the weights are an undisturbed run's (paper §2.3, §4)."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from swift_ft.checkpoint.folder import CheckpointFolder
from swift_ft.offline.checkpoint_check import verify_checkpoint
from swift_ft.storage.store import Store
from tests.support.cluster import (
    CHECKPOINT_EVERY,
    EXAMPLES,
    ITERATIONS,
    ClusterRun,
    assert_clean,
    assert_identical,
    assert_reported_once,
    at_once,
    in_turn,
    once,
    run_cluster,
    training,
)

BUCKETS = ["--layers=4", "--bucket-mb=0.01"]
"""Nearly every parameter has its own bucket."""

Reference = Callable[..., ClusterRun]


def run_replicas(folder: Path, machines: int, *args: str, inject: str = "", script: str = "") -> ClusterRun:
    path = Path(__file__).parent / "scripts" / script if script else EXAMPLES / "train_ddp.py"
    return run_cluster(
        folder, *BUCKETS, *args, inject=inject, machines=machines, script=training(folder, path)
    )


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Undisturbed runs by number of replicas and arguments."""
    return once(tmp_path_factory, run_replicas)


def assert_restored(run: ClusterRun, reference: ClusterRun, *slots: int) -> None:
    """By replicas alone: no worker loaded a checkpoint or lost a completed iteration."""
    assert_identical(run, reference)
    assert_clean(run)
    assert [recovery["mode"] for recovery in run.recoveries] == ["replica"] * len(run.recoveries)
    assert {slot for recovery in run.recoveries for slot in recovery["slots"]} == set(slots)
    assert not any(lost for recovery in run.recoveries for lost in recovery["iterations_lost"].values())


def losses_of(run: ClusterRun) -> dict[int, float]:
    """The survivor's, by iteration; of a repeated one the last."""
    lines = re.findall(r"\[machine 0\] iteration (\d+): loss ([\d.]+)", run.output)
    return {int(iteration): float(loss) for iteration, loss in lines}


POINTS = {
    "before an all-reduce": "point=reduce bucket=0",
    "during an all-reduce": "point=reducing bucket=3",
    "after an all-reduce": "point=reduced bucket=9",
    "before the last all-reduce": "point=reduce bucket=13",
    "inside the optimizer": "point=optimizer",
    "between iterations": "point=between",
}


@pytest.mark.parametrize("point", POINTS)
def test_two_replicas(point: str, tmp_path: Path, undisturbed: Reference) -> None:
    run = run_replicas(tmp_path, 2, inject=f"kill machine=1 iteration=5 {POINTS[point]}")
    assert_restored(run, undisturbed(2), 1)


@pytest.mark.parametrize("point", POINTS)
def test_four_replicas(point: str, tmp_path: Path, undisturbed: Reference) -> None:
    """The sum of four depends on its order, so the replacement keeps the order. The first rank dies, too."""
    run = run_replicas(tmp_path, 4, inject=f"kill machine=0 iteration=5 {POINTS[point]}")
    assert_restored(run, undisturbed(4), 0)


@pytest.mark.parametrize("point", ["reduce", "reducing", "reduced"])
def test_each_bucket(point: str, tmp_path: Path, undisturbed: Reference) -> None:
    """One bucket after the other, in as many iterations of one run, on both replicas in turn."""
    faults = [f"kill machine={n % 2} iteration={n + 2} point={point} bucket={n}" for n in range(14)]
    run = run_replicas(tmp_path, 2, "--iterations=18", inject="; ".join(faults))
    assert len(run.events("FaultInjected")) == len(faults)
    assert_restored(run, undisturbed(2, "--iterations=18"), 0, 1)


@pytest.mark.parametrize("iteration", [0, 1])
def test_before_the_buckets_are_settled(iteration: int, tmp_path: Path, undisturbed: Reference) -> None:
    """DDP rebuilds its buckets after the first backward."""
    run = run_replicas(tmp_path, 3, inject=f"kill machine=1 iteration={iteration} point=reduced bucket=0")
    assert_restored(run, undisturbed(3), 1)


@pytest.mark.parametrize("bucket", [0, 7, 13])
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_wait_free_and_exact(bucket: int, optimizer: str, tmp_path: Path, undisturbed: Reference) -> None:
    """Killed between two parameters' updates: exactly the tagged ones are undone, to the bit."""
    flags = ["--optimizer", optimizer]
    fault = f"kill machine=1 iteration=5 point=update bucket={bucket}"
    run = run_replicas(tmp_path, 2, *flags, "--wait-free", "--exact", inject=fault)
    assert_restored(run, undisturbed(2, *flags), 1)
    assert [str(rank) for rank in run.recoveries[0]["undone_exactly"]] == [*run.recoveries[0]["undone"]]


def test_wait_free_without_residuals(tmp_path: Path, undisturbed: Reference) -> None:
    """An undo by algebra alone adds only a rounding error: the loss curves coincide."""
    run = run_replicas(tmp_path, 2, "--wait-free", inject="kill machine=1 iteration=5 point=update bucket=7")
    ours, theirs = run.weights(), undisturbed(2).weights()
    assert run.recoveries[0]["mode"] == "replica"
    assert run.recoveries[0]["undone"]
    assert not run.recoveries[0]["undone_exactly"]
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-4, atol=1e-5)
    curve, expected = losses_of(run), losses_of(undisturbed(2))
    assert curve.keys() == expected.keys() == set(range(ITERATIONS))
    assert all(abs(curve[at] - loss) <= 0.001 for at, loss in expected.items())  # the last printed digit


def test_wait_free_is_the_ordinary_update(tmp_path: Path, undisturbed: Reference) -> None:
    assert_identical(undisturbed(2, "--wait-free"), undisturbed(2))


@pytest.mark.parametrize(
    "second",
    [
        pytest.param("kill machine=2 iteration=5 point=reduce bucket=2", id="another one"),
        pytest.param("kill machine=1 iteration=5 point=transfer", id="the source of the transfer"),
        pytest.param("kill machine=0 iteration=0 point=transfer", id="the replacement"),
        pytest.param("kill machine=3 iteration=6 point=reduced bucket=1", id="one iteration later"),
    ],
)
def test_two_failures(second: str, tmp_path: Path, undisturbed: Reference) -> None:
    # When it has the sum of a bucket, all others are in that iteration: the first of them is the source.
    run = run_replicas(tmp_path, 4, inject=f"kill machine=0 iteration=5 point=reduced bucket=1; {second}")
    assert len(run.events("FaultInjected")) == 2
    assert_restored(run, undisturbed(4), 0, int(second.split("machine=")[1][0]))


@pytest.mark.parametrize("target", ["machine", "worker"])
@pytest.mark.thorough
def test_a_silent_replica(target: str, tmp_path: Path, undisturbed: Reference) -> None:
    run = run_replicas(tmp_path, 3, inject=f"stop {target}=1 iteration=5 point=reduce bucket=4")
    assert_restored(run, undisturbed(3), 1)


@pytest.mark.thorough
def test_broken_network(tmp_path: Path, undisturbed: Reference) -> None:
    run = run_replicas(tmp_path, 3, inject="break worker=1 iteration=5 point=reduce bucket=4")
    assert_identical(run, undisturbed(3))
    assert {recovery["mode"] for recovery in run.recoveries} <= {"continue", "replica"}


def test_replicas_are_lost_in_turn(
    tmp_path: Path, undisturbed: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each when the survivors have reported how far they are, which they do once."""
    monkeypatch.setenv("KILLS", in_turn(1, 3, example="train_ddp"))
    run = run_replicas(tmp_path, 4, script="kills_in_turn.py")
    assert_restored(run, undisturbed(4), 1, 3)
    assert_reported_once(run, 0, 2)


def test_all_replicas_are_lost(
    tmp_path: Path, undisturbed: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KILLS", at_once(1, 0, by=0, example="train_ddp"))
    run = run_replicas(tmp_path, 2, script="kills_others.py")
    assert_identical(run, undisturbed(2))
    (recovery,) = run.recoveries
    before = [e["iteration"] for e in run.events("CheckpointCommitted") if e["at"] < recovery["detected"]]
    # All start again where a replacement's script failed because the other machine died meanwhile.
    assert recovery["mode"] in ("start", "restart")
    assert recovery["resume"] == max(before)


@pytest.mark.parametrize("slot", [0, 1])
def test_the_last_checkpoint_is_complete_although_its_writer_died(
    slot: int, tmp_path: Path, undisturbed: Reference
) -> None:
    """The replacement gets the final state from a replica: it never completes the iteration that is saved."""
    iterations = 2 * CHECKPOINT_EVERY
    fault = f"kill machine={slot} iteration={iterations - 1} point=between"
    run = run_replicas(tmp_path, 2, f"--iterations={iterations}", inject=fault)
    assert_restored(run, undisturbed(2, f"--iterations={iterations}"), slot)
    committed = [event["iteration"] for event in run.events("CheckpointCommitted")]
    assert committed[-1] == iterations
    checked = verify_checkpoint(CheckpointFolder(Store(run.store)), committed[-1])
    assert checked.intact


GONE = f"vanish worker=0 iteration={2 * CHECKPOINT_EVERY - 1} point=optimizer seconds={{}}"
"""The store goes away before the last checkpoint is saved."""


def test_the_last_checkpoint_waits_for_a_store_that_is_gone(tmp_path: Path, undisturbed: Reference) -> None:
    iterations = 2 * CHECKPOINT_EVERY
    run = run_replicas(tmp_path, 2, f"--iterations={iterations}", inject=GONE.format(4))
    assert_identical(run, undisturbed(2, f"--iterations={iterations}"))
    assert not run.recoveries
    assert "is not committed" not in run.output
    assert run.events("CheckpointCommitted")[-1]["iteration"] == iterations


def test_a_run_without_its_last_checkpoint_has_failed(tmp_path: Path) -> None:
    """The store is away for longer than it is waited for. What the script does after the loop is done."""
    iterations = 2 * CHECKPOINT_EVERY
    run = run_cluster(
        tmp_path,
        *(*BUCKETS, f"--iterations={iterations}"),
        machines=2,
        flags=["--checkpoint-timeout", "1"],
        script=training(tmp_path, EXAMPLES / "train_ddp.py"),
        inject=GONE.format(30),
    )
    assert run.code == 1, run.output[-6000:]
    assert f"The last checkpoint, of iteration {iterations}, is not committed." in run.output
    assert f"its last checkpoint, of iteration {iterations}, is not in the store" in run.output
    assert run.events("CheckpointCommitted")[-1]["iteration"] == CHECKPOINT_EVERY
    goes_on = f"from the checkpoint at iteration {CHECKPOINT_EVERY}, trains the last {CHECKPOINT_EVERY} of"
    assert goes_on in run.output
    assert [*tmp_path.glob("weights*")]
    (incident,) = run.report["incidents"]
    assert (incident["cause"], incident["way"]) == ("store", "the run ended")
    assert goes_on in incident["reason"]
    assert "incident 1 (cause: store): training is complete" in run.output
    assert "To do: look at the store's disk or server" in run.output
