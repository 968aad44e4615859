"""Checkpoints that fall due while their store is down, or must not be written."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest
import torch

from benchmarks.lib.hadoop import HdfsCluster
from benchmarks.lib.seaweed import BUCKET, SeaweedServer
from swift_ft.checkpoint.checkpointer import Checkpointer
from swift_ft.checkpoint.folder import CheckpointFolder
from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.logging import parse_segment_name
from swift_ft.storage.store import Store
from tests.support.cluster import CHECKPOINT_EVERY, assert_identical, run_cluster, training

SCRIPT = Path(__file__).parent / "scripts" / "failed_saves.py"
ITERATIONS = 2 * CHECKPOINT_EVERY
MACHINES = 4
DEADLINE_S = 120.0


def when(condition: Callable[[], bool], over: threading.Event) -> bool:
    """Polls until a condition holds; False if the run ends before."""
    while not condition():
        if over.wait(0.02):
            return False
    return True


@pytest.mark.thorough
def test_a_checkpoint_that_falls_due_in_an_outage_is_committed_after_it(
    own_seaweed: SeaweedServer, tmp_path: Path
) -> None:
    """The server is away until every worker has failed to save its part of the only checkpoint."""
    folder = tmp_path / "outage"
    reference = run_cluster(
        tmp_path / "undisturbed", script=training(tmp_path / "undisturbed", iterations=ITERATIONS)
    )
    # Segments that an earlier checkpoint covers are deleted (§5.1).
    names = [parse_segment_name(path.name) for path in (reference.store / "log").rglob("*.arrow")]
    assert all(name is None or name.max_iteration >= CHECKPOINT_EVERY for name in names)
    over = threading.Event()
    first = f"{BUCKET}/run/checkpoints/00000000/committed.json"
    client = own_seaweed.client()

    def is_committed() -> bool:
        client.invalidate_cache()
        return bool(client.exists(first))

    def all_failed() -> bool:
        return len(list(folder.glob(f"failed-{ITERATIONS:08d}-*"))) == MACHINES

    def outage() -> None:
        if when(is_committed, over):
            own_seaweed.kill()
            when(all_failed, over)
            own_seaweed.start()

    saboteur = threading.Thread(target=outage)
    saboteur.start()
    try:
        script = training(folder, SCRIPT, iterations=ITERATIONS)
        script += ["--store", f"s3://{BUCKET}/run", "--checkpoint-every", str(ITERATIONS)]
        run = run_cluster(folder, script=script)
    finally:
        over.set()
        saboteur.join()
    assert_identical(run, reference)
    assert all_failed()
    assert run.recoveries == []
    assert max(event["iteration"] for event in run.events("CheckpointCommitted")) == ITERATIONS
    store = Store(f"s3://{BUCKET}/run")
    assert max(CheckpointFolder(store).committed()) == ITERATIONS


class Durable(threading.Event):
    """The part is there, and this digest proves it."""

    digest = ""

    def note(self, digest: str) -> None:
        self.digest = digest
        self.set()


def saving(store: Store) -> tuple[Checkpointer, torch.nn.Linear, Durable]:
    """A checkpointer, the model whose state it saves, and the event that follows when a part is there."""
    model = torch.nn.Linear(8, 8)
    state = TrainingState({"model": model})
    return Checkpointer(CheckpointFolder(store), state), model, Durable()


def test_a_permission_that_is_lost_for_a_while_costs_no_checkpoint(own_seaweed: SeaweedServer) -> None:
    """The server refuses the save. When it permits writes again, the same save succeeds."""
    store = Store(f"s3://{BUCKET}/{uuid.uuid4().hex}")
    checkpointer, model, durable = saving(store)
    path = checkpointer.folder.part(10, 0, 1)
    saved = model.weight.detach().clone()
    own_seaweed.restart(permitted=False)
    with pytest.raises(PermissionError):
        store.write_json("anything.json", {})
    checkpointer.save(10, path, durable.note)
    with torch.no_grad():
        model.weight.zero_()
    while not checkpointer._waiting:  # the first attempt is over
        assert not durable.wait(0.02)
    own_seaweed.restart(permitted=True)
    assert checkpointer.wait(DEADLINE_S)
    assert durable.is_set()
    checkpointer.folder.commit(10, {0: path}, "run", {path: durable.digest})
    checkpointer.load(10, 0)
    assert torch.equal(model.weight, saved)


@pytest.mark.thorough
def test_a_data_node_is_killed_before_a_save(hdfs: HdfsCluster) -> None:
    """The NameNode still counts on it. The next attempt replaces the incomplete part."""
    store = Store(f"{hdfs.url}/{uuid.uuid4().hex}")
    checkpointer, model, durable = saving(store)
    path = checkpointer.folder.part(10, 0, 1)
    with fsspec.open(f"{store.child_url(path)}/__0_0.distcp", "wb") as half:
        half.write(b"what an attempt that failed has left")
    with hdfs.killed_data_node():
        saved = model.weight.detach().clone()
        checkpointer.save(10, path, durable.note)
        with torch.no_grad():
            model.weight.zero_()
        assert checkpointer.wait(DEADLINE_S)
        assert durable.is_set()
        checkpointer.folder.commit(10, {0: path}, "run", {path: durable.digest})
        checkpointer.load(10, 0)
        assert torch.equal(model.weight, saved)
    assert store.list("checkpoints/00000010") == ["committed.json", path.rpartition("/")[2]]
