"""What a store says of its run outlives damage: each run has a copy of it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch.distributed import HashStore

from swift_ft.checkpoint.folder import CheckpointFolder
from swift_ft.checkpoint.run_record import RECORD, read_record, write_record
from swift_ft.checkpoint.store_claim import claim_store, store_of_run
from swift_ft.cli.recover.main import main
from swift_ft.config.run_config import RunConfig
from swift_ft.config.worker_context import WorkerContext
from swift_ft.errors import UsageError
from swift_ft.storage.digest import sealed
from swift_ft.storage.store import Store
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore

TOPOLOGY = {"machines": 1, "workers": 1, "stages": 1}
FIRST: dict[str, Any] = {"run_id": "job.1/a", "topology": TOPOLOGY, "earlier": [], "settings": {}}
SECOND = {**FIRST, "run_id": "job.2-b", "earlier": ["job.1/a"]}


def cut_off(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])


def empty(file: Path) -> None:
    file.write_bytes(b"")


def flip_a_bit(file: Path) -> None:
    """It is JSON as before, and says three machines."""
    before = file.read_bytes()
    after = before.replace(b'"machines": 1', b'"machines": 3')
    assert before != after
    file.write_bytes(after)


def lose_the_digest(file: Path) -> None:
    """All else is as it was written."""
    content = json.loads(file.read_text())
    del content["digest"]
    file.write_text(json.dumps(content))


def flip_in_the_digest_s_name(file: Path) -> None:
    before = file.read_bytes()
    after = before.replace(b'"digest"', b'"digesu"')
    assert before != after
    file.write_bytes(after)


def no_text(file: Path) -> None:
    file.write_bytes(b"\xff\xfe\x00" * 100)


def vanish(file: Path) -> None:
    file.unlink()


damaged = pytest.mark.parametrize(
    "damage", [cut_off, empty, flip_a_bit, flip_in_the_digest_s_name, lose_the_digest, no_text, vanish]
)
Damage = Callable[[Path], None]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Of two runs, the second of which went on with the first one's checkpoint."""
    store = Store(tmp_path / "store")
    write_record(store, FIRST)
    folder = CheckpointFolder(store)
    store.write_json(f"{folder.part(20, 0, 1)}/data.json", {})
    folder.commit(20, {0: folder.part(20, 0, 1)}, "job.1/a", {})
    write_record(store, SECOND)
    return store


def place(store: Store, name: str = RECORD) -> Path:
    path = store.local_path(name)
    assert path is not None
    return path


@damaged
def test_the_newest_copy_mends_it(store: Store, damage: Damage, caplog: pytest.LogCaptureFixture) -> None:
    whole = read_record(store)
    assert whole == {"format": 1, **SECOND}
    assert not caplog.records
    damage(place(store))
    assert read_record(store) == whole
    (said,) = caplog.records
    assert said.levelno == logging.WARNING
    assert "run.json is" in said.getMessage()
    assert "job.2-b" in said.getMessage()


@damaged
def test_a_damaged_copy_mends_nothing(store: Store, damage: Damage) -> None:
    damage(place(store))
    damage(place(store, f"runs/job.2-b/{RECORD}"))
    record = read_record(store)
    assert record is not None
    assert record["run_id"] == "job.1/a"  # older, and true


@damaged
def test_a_run_resumes_beside_it(store: Store, damage: Damage) -> None:
    damage(place(store))
    context = SimpleNamespace(rank=0, run_id="job.3-c", config=RunConfig(resume=True))
    found = claim_store(store, cast(WorkerContext, context), RendezvousStore(HashStore), TOPOLOGY, 1.0)
    assert found == (20,)
    third = {**SECOND, "run_id": "job.3-c", "earlier": ["job.1/a", "job.2-b"]}
    assert store.read_json(RECORD) == sealed({"format": 1, **third})


def test_what_a_run_was_writing_that_was_lost_as_a_whole_is_swept(store: Store) -> None:
    run = place(store, f"runs/job.2-b/{RECORD}").parent
    (run / "workers").mkdir()
    begun = [run / "layers.json.12ab.tmp", run / "workers" / "rank-00000.gradients.json.12ab.tmp"]
    for path in begun:
        path.write_text("half of it")
    context = SimpleNamespace(rank=0, run_id="job.3-c", config=RunConfig(resume=True))
    claim_store(store, cast(WorkerContext, context), RendezvousStore(HashStore), TOPOLOGY, 1.0)
    assert not any(path.exists() for path in begun)
    assert (run / RECORD).exists()


@damaged
def test_without_a_copy_it_says_what_is_left(store: Store, damage: Damage) -> None:
    store.delete("runs", recursive=True)
    damage(place(store))
    before = {path: path.read_bytes() for path in place(store, "").rglob("*") if path.is_file()}
    with pytest.raises(UsageError) as refused:
        read_record(store)
    (line,) = str(refused.value).splitlines()
    for words in (
        "run.json",
        "1 committed checkpoints (the newest of iteration 20, of 1 workers)",
        "from a backup and continue with --resume",
    ):
        assert words in line
    assert "choose another store" not in line
    assert before == {path: path.read_bytes() for path in place(store, "").rglob("*") if path.is_file()}


def test_a_store_that_was_deleted_is_not_mended_for_who_comes_late(store: Store) -> None:
    vanish(place(store))
    assert store_of_run(store.url, "job.2-b", 0.0) is None


def test_the_tools_read_on_and_write_nothing(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    cut_off(place(store))
    before = place(store).read_bytes()
    main(["status", str(place(store, "")), "--json"])
    assert json.loads(capsys.readouterr().out)["run_id"] == "job.2-b"
    assert place(store).read_bytes() == before


def test_a_file_of_another_tool_is_no_damage(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """No copy replaces it, and what wrote it is for the user to say."""
    store.write_json(RECORD, {"run_id": "mine"})
    with pytest.raises(UsageError, match="is something else"):
        read_record(store)
    assert not caplog.records
