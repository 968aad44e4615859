"""A store that is full or gone for a while: survivors keep their state, and nothing is silently lost."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import ClusterRun, assert_clean, assert_identical, run_cluster, training
from tests.support.disks import mounted_disk

SCRIPT = Path(__file__).parent / "scripts" / "store_outages.py"
ITERATIONS = 16
LOSS = "kill machine=1 iteration={} point=forward microbatch=3"


@pytest.fixture(scope="module")
def reference(references: Any) -> ClusterRun:
    found: ClusterRun = references("--iterations", str(ITERATIONS), machines=2)
    return found


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 MiB, on which the store is."""
    with mounted_disk(tmp_path, "64m") as disk:
        yield disk


def run_with(
    folder: Path, monkeypatch: pytest.MonkeyPatch, store: Path, lost_in: int, **outage: Any
) -> ClusterRun:
    monkeypatch.setenv("OUTAGE", json.dumps(outage))
    script = [*training(folder, SCRIPT, iterations=ITERATIONS), "--store", str(store)]
    return run_cluster(folder, machines=2, script=script, inject=LOSS.format(lost_in))


def test_a_machine_dies_while_the_disk_is_full(
    tmp_path: Path, small_disk: Path, reference: ClusterRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replacement waits as the survivor does, and says what would help."""
    outage = {"how": "full", "place": str(small_disk), "begin": 5, "until": "waits"}
    run = run_with(tmp_path, monkeypatch, small_disk / "store", 5, **outage)
    assert_identical(run, reference)
    assert [recovery["mode"] for recovery in run.recoveries] == ["replay"]
    assert "cannot be used (OSError: [Errno 28] No space left on device" in run.output
    assert ": make room there." in run.output


def test_a_machine_dies_while_the_folder_is_gone(
    tmp_path: Path, reference: ClusterRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a lost mount. Nobody writes in its place."""
    place = tmp_path / "disk"
    place.mkdir()
    outage = {"how": "gone", "place": str(place), "begin": 5, "until": "waits"}
    run = run_with(tmp_path, monkeypatch, place / "store", 5, **outage)
    assert_identical(run, reference)
    assert [recovery["mode"] for recovery in run.recoveries] == ["replay"]
    assert "run.json is missing" in run.output
    assert ": mount it again." in run.output


FULL = pytest.mark.parametrize("of_log", [False, pytest.param(True, id="the log's own disk")])
"""The disk with the store, or that on which a worker's log waits for its way there."""


@FULL
def test_training_goes_on_without_a_log_and_is_protected_again(
    of_log: bool, tmp_path: Path, small_disk: Path, reference: ClusterRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log is gone from iteration 4 to 8. A loss after the next checkpoint is replayed."""
    outage = {"how": "full", "place": str(small_disk), "begin": 4, "until": 8, "committed_by": 13}
    store = (tmp_path if of_log else small_disk) / "store"
    run = run_with(tmp_path, monkeypatch, store, 13, hasty=True, of_log=of_log, **outage)
    assert_identical(run, reference)
    assert [recovery["mode"] for recovery in run.recoveries] == ["replay"]
    for rank in range(2):
        assert f"Worker {rank} trains on without a log" in run.output
        assert f"The log of worker {rank} is written again" in run.output
    assert "the gap in the log of worker 0: it is protected again" in run.output  # 1 dies before it knows
    assert_clean(run)


@FULL
def test_a_loss_while_there_is_no_log_leads_to_the_checkpoint(
    of_log: bool, tmp_path: Path, small_disk: Path, reference: ClusterRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never to a replay with a hole: the plan names the log that has one."""
    outage = {"how": "full", "place": str(small_disk), "begin": 4, "until": 8}
    store = (tmp_path if of_log else small_disk) / "store"
    run = run_with(tmp_path, monkeypatch, store, 8, hasty=True, of_log=of_log, **outage)
    assert_identical(run, reference)
    (recovery,) = run.recoveries
    assert recovery["mode"] == "fallback"
    assert "the log of worker 0 has a gap: OSError: [Errno 28] No space left" in recovery["reason"]
    assert recovery["resume"] in (3, 6)
