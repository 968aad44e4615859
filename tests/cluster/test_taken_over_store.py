"""Another run claims the store of one that trains: the first one ends, and changes nothing there any more."""

from __future__ import annotations

from pathlib import Path

from swift_ft.checkpoint.folder import CheckpointFolder
from swift_ft.checkpoint.run_record import read_record
from swift_ft.storage.store import Store
from tests.support.cluster import CHECKPOINT_EVERY, one_line, run_cluster, training

SCRIPT = Path(__file__).parent / "scripts" / "loses_its_claim.py"


def test_the_first_run_ends_before_its_next_commit(tmp_path: Path) -> None:
    run = run_cluster(
        tmp_path, "--layers=4", "--microbatches=4", machines=2, script=training(tmp_path, SCRIPT)
    )
    assert run.code == 1
    assert "run another has taken over file://" in one_line(run)
    (closed,) = run.events("JobClosed")
    assert closed["cause"] == "store"
    store = Store(str(run.store))
    record = read_record(store)
    assert record is not None
    assert record["run_id"] == "another"
    committed = CheckpointFolder(store).committed()
    assert committed
    assert committed[-1] <= 5 < committed[-1] + CHECKPOINT_EVERY, committed
