"""What a replay of each worker would find in a store, by its logs and its workers' records."""

from __future__ import annotations

from pathlib import Path

import pytest

from swift_ft.checkpoint.worker_record import record_path, write_record
from swift_ft.offline.run_store import open_run_store
from swift_ft.offline.verification import Verification, verify_store
from swift_ft.storage.store import Store
from tests.support.stored_run import make_run, pipeline_record


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Four workers with a stage each, a checkpoint of iteration 6, and logs up to 8."""
    return make_run(tmp_path / "store", tmp_path / "script.py")


def verified(store: Store) -> Verification:
    run = open_run_store(store.url)
    return verify_store(run, {path: facts.size for path, facts in run.store.find("").items()})


def together(found: Verification) -> list[tuple[int, ...]]:
    return [worker.together for worker in found.workers]


def test_each_worker_alone(store: Store) -> None:
    found = verified(store)
    assert together(found) == [()] * 4
    assert [(worker.begin, worker.until, worker.remark) for worker in found.workers] == [(6, 8, "")] * 4


def test_workers_that_a_plan_rebuilds_together(store: Store) -> None:
    """By their group, or by what their scripts communicate, which no log has."""
    for rank in (1, 2):
        write_record(store, rank, pipeline_record(rank, group=7))
    for rank in (0, 3):
        write_record(store, rank, pipeline_record(rank, together=(0, 3)))
    assert together(verified(store)) == [(3,), (2,), (1,), (0,)]


@pytest.mark.parametrize("content", [b"", b"[]", b"{}"])
def test_a_record_that_is_damaged_stops_nothing(store: Store, content: bytes) -> None:
    for rank in (1, 2):
        write_record(store, rank, pipeline_record(rank, group=7))
    assert together(verified(store))[1] == (2,)
    Path(store.url.removeprefix("file://"), record_path(1)).write_bytes(content)
    assert together(verified(store)) == [()] * 4
