"""The keys of an S3 store are replaced while a run goes on, as rotations do: the run takes the new ones."""

from __future__ import annotations

import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import s3fs
import torch
from torch import nn

from benchmarks.lib.seaweed import ACCESS_KEY, BUCKET, SECRET_KEY, SeaweedServer
from swift_ft.checkpoint.checkpointer import Checkpointer
from swift_ft.checkpoint.folder import CheckpointFolder
from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.storage.retry import retry
from swift_ft.storage.store import Store
from swift_ft.torch_adapters.dcp.writer import write_part
from tests.support.waiting import wait_until

DEADLINE_S = 60.0
NEW = ("replaced-key", "replaced-secret")


class Machine:
    """What this machine knows of keys, in the file in which people have them."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.write(ACCESS_KEY, SECRET_KEY)

    def write(self, key: str, secret: str) -> None:
        self._file.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n")


@pytest.fixture
def machine(own_seaweed: SeaweedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    s3fs.S3FileSystem.clear_instance_cache()
    return Machine(tmp_path / "credentials")


def test_the_new_keys_are_taken(
    own_seaweed: SeaweedServer, machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(f"s3://{BUCKET}/{uuid.uuid4().hex}")
    store.write_json("a.json", {"by": "the old keys"})
    own_seaweed.replace_keys(*NEW)
    with pytest.raises(PermissionError):  # nobody has given this machine the new ones
        store.read_json("a.json")
    assert not caplog.records
    machine.write(*NEW)
    assert store.read_json("a.json") == {"by": "the old keys"}
    (said,) = caplog.records
    assert said.__dict__["event"] == "store_keys_replaced"
    assert NEW[1] not in caplog.text
    store.write_json("b.json", {"by": "the new ones"})
    assert store.list("") == ["a.json", "b.json"]
    assert len(caplog.records) == 1


def test_all_who_use_the_store_at_that_moment_go_on(own_seaweed: SeaweedServer, machine: Machine) -> None:
    """Threads with stores of their own, and what torch writes by itself through fsspec."""
    url = f"s3://{BUCKET}/{uuid.uuid4().hex}"
    stores = [Store(url) for _ in range(8)]
    for store in stores:
        store.write_json("a.json", {})
    own_seaweed.replace_keys(*NEW)
    machine.write(*NEW)
    with ThreadPoolExecutor(len(stores) + 1) as threads:
        part = threads.submit(
            lambda: retry(
                lambda: write_part(stores[0], "part", {"w": torch.arange(3)}), 60.0, stores[0].may_pass
            )
        )
        found = [*threads.map(lambda store: store.read_json("a.json"), stores)]
    assert found == [{}] * len(stores)
    assert part.result()


def test_a_call_that_was_under_way_for_long_is_made_again(
    own_seaweed: SeaweedServer, machine: Machine
) -> None:
    """It went out with the old keys, however long ago another thread met the new ones."""
    store = Store(f"s3://{BUCKET}/{uuid.uuid4().hex}")
    store.write_json("a.json", {})
    own_seaweed.replace_keys(*NEW)
    with pytest.raises(PermissionError) as refused:
        store.at_once().read_json("a.json")
    machine.write(*NEW)
    store._fs.connect(refresh=True)  # as s3fs does by itself
    assert store.may_pass(refused.value)
    time.sleep(1.2)
    assert not store.may_pass(refused.value), "the second call of this thread began with the new keys"
    with ThreadPoolExecutor(1) as another:
        assert another.submit(lambda: store.may_pass(refused.value)).result()
    assert store.read_json("a.json") == {}


def test_a_part_is_written_with_keys_that_come_after_it_was_refused(
    own_seaweed: SeaweedServer, machine: Machine
) -> None:
    """The keys of a store and of a machine are seldom replaced at one moment."""
    store = Store(f"s3://{BUCKET}/{uuid.uuid4().hex}")
    folder = CheckpointFolder(store)
    checkpointer = Checkpointer(folder, TrainingState({"model": nn.Linear(2, 2)}))
    durable: list[str] = []

    def save(iteration: int) -> None:
        checkpointer.save(iteration, folder.part(iteration, 0, 1), durable.append)

    save(10)
    assert checkpointer.wait(DEADLINE_S)
    assert len(durable) == 1
    clients = len(s3fs.S3FileSystem._cache)
    own_seaweed.replace_keys(*NEW)
    save(20)
    wait_until(lambda: checkpointer._failure, "the part to be refused", DEADLINE_S)
    machine.write(*NEW)
    assert checkpointer.wait(DEADLINE_S)
    save(30)
    assert checkpointer.wait(DEADLINE_S)
    assert len(durable) == 3
    assert len(s3fs.S3FileSystem._cache) == clients
