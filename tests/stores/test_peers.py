"""A replay from the disks of the workers that wrote the log, also when these workers or the store fail.

A machine of the same training is killed each time, and the weights are those of an undisturbed run.
"""

from __future__ import annotations

import threading
import uuid
from pathlib import Path

import pytest

from benchmarks.lib.seaweed import BUCKET, SeaweedServer
from tests.support.cluster import (
    KILLS_IN_TURN,
    ClusterRun,
    assert_identical,
    assert_reported_once,
    in_turn,
    run_cluster,
    training,
)

SCRIPT = Path(__file__).parent / "scripts" / "failing_peers.py"


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> ClusterRun:
    return run_cluster(tmp_path_factory.mktemp("undisturbed"))


def run_with(how: str, folder: Path, monkeypatch: pytest.MonkeyPatch, spares: int = 1) -> ClusterRun:
    """Machine 1 is killed; the checkpoint is one of iteration 3."""
    monkeypatch.setenv("PEERS", how)
    return run_cluster(
        folder,
        *("--store", f"s3://{BUCKET}/{uuid.uuid4().hex}"),
        inject="kill machine=1 iteration=5 point=forward microbatch=3",
        flags=["--spares", str(spares)],
        script=training(folder, SCRIPT),
    )


@pytest.mark.thorough
def test_peers_that_cannot_be_reached_or_give_other_bytes(
    seaweed: SeaweedServer, reference: ClusterRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store has the segments that they cannot send."""
    run = run_with("unusable", tmp_path, monkeypatch)
    assert_identical(run, reference)
    (recovery,) = run.recoveries
    assert recovery["mode"] == "replay"
    assert recovery["from_store"]["1"] > 0
    assert "log/rank-00000 is read from s3://" in run.output
    assert "log/rank-00002 is read from s3://" in run.output


def test_a_peer_dies_before_its_log_is_in_the_store(
    seaweed: SeaweedServer, reference: ClusterRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log of the dead worker is not needed: it sends again, in a joint replay (Appendix B)."""
    run = run_with("dies", tmp_path, monkeypatch, spares=2)
    assert_identical(run, reference)
    assert {recovery["mode"] for recovery in run.recoveries} == {"replay"}
    assert {slot for recovery in run.recoveries for slot in recovery["slots"]} == {1, 2}
    assert {r for recovery in run.recoveries for r in recovery["replayed_iterations"]} <= {"1", "2"}


def test_a_machine_is_lost_after_others_have_offered_their_logs(
    seaweed: SeaweedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They do so once: what they offered in one generation is read in the next one."""
    monkeypatch.setenv("KILLS", in_turn(1, 3))
    store = ("--store", f"s3://{BUCKET}/{uuid.uuid4().hex}")
    folder = tmp_path / "run"
    run = run_cluster(
        folder, *store, machines=5, flags=["--spares", "2"], script=training(folder, KILLS_IN_TURN)
    )
    assert_identical(run, run_cluster(tmp_path / "undisturbed", machines=5))
    (recovery,) = run.recoveries
    assert recovery["mode"] == "replay"
    assert_reported_once(run, 0, 2, 4)
    for rank in ("1", "3"):
        assert recovery["from_peers"][rank] > 0
        assert recovery["from_store"][rank] == 0


def test_the_store_is_away_during_the_replay(
    own_seaweed: SeaweedServer, reference: ClusterRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From its first iteration until training continues. Before it the store had no log (`ship`)."""
    ended = threading.Event()

    def appears(name: str) -> bool:
        while not ended.wait(0.02):
            if (tmp_path / name).exists():
                return True
        return False

    def outage() -> None:
        if appears("asks"):
            own_seaweed.kill()
            (tmp_path / "down").touch()
        if appears("over"):
            own_seaweed.start()

    saboteur = threading.Thread(target=outage)
    saboteur.start()
    try:
        run = run_with("offline", tmp_path, monkeypatch)
    finally:
        ended.set()
        saboteur.join()
    assert_identical(run, reference)
    (recovery,) = run.recoveries
    assert recovery["mode"] == "replay"
    for rank in ("1", "2"):  # a group, which rolls back together
        assert recovery["from_peers"][rank] > 0
        assert recovery["from_store"][rank] == 0
    assert (tmp_path / "over").exists()
