"""How long a recovery would take: every part says where its seconds come from."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from swift_ft.checkpoint.worker_files import PROFILE, WorkerFiles, of_rank
from swift_ft.checkpoint.worker_profile import read_profiles
from swift_ft.costs.job import Measured, Worker
from swift_ft.offline.archive import ArchivedJournal
from swift_ft.offline.loss import LossPlan, LossPlanner
from swift_ft.recovery import events as ev
from swift_ft.storage.store import Store
from tests.support.journals import RUN, checkpoint, entries_of, machine, opening

MEASURED = {
    rank: Worker(
        (f"stage {rank}",),
        (rank,),
        0,
        Measured(
            iteration_s=2.0,
            compute_s=0.5 + rank / 10,
            bubble_s=1.0,
            sent={rank + 1: 50},
            state_bytes=1000 + rank,
            save_bytes_per_s=100.0,
            link_bytes_per_s=500.0,
        ),
    )
    for rank in range(3)
}


def plan(*after: ev.Event, iteration: int = 14, profiles: dict[int, Worker] = MEASURED) -> LossPlan:
    saved = [*checkpoint(3, 0), *checkpoint(3, 10)]
    journal = ArchivedJournal(RUN, entries_of([*opening(3, spares=2), *saved, *after]))
    return LossPlanner(journal, profiles).plan([2], iteration=iteration)


def seconds(plan: LossPlan) -> dict[str, float | None]:
    assert plan.estimate is not None
    return {part.what: part.seconds for part in plan.estimate.parts}


REPLACING = "replacing the machine, and leaving the old groups"


def test_a_replay_takes_what_was_measured() -> None:
    found = plan()
    assert seconds(found) == {
        "finding the loss": 0.0,
        REPLACING: None,
        "loading the checkpoint": pytest.approx(10.02),  # its own state, at the speed of writing
        "replaying 4 iterations": pytest.approx(4 * 0.7),  # it waits for nobody
    }
    assert found.estimate is not None
    assert found.estimate.seconds == pytest.approx(12.82)
    assert not found.estimate.complete
    sources = {part.what: part.source for part in found.estimate.parts}
    assert sources["finding the loss"].startswith("assumed: ")
    assert sources[REPLACING].startswith("unknown: ")
    assert sources["loading the checkpoint"].endswith("assumed: reading is as fast")
    assert sources["replaying 4 iterations"] == "measured: computing in its first iterations"


def test_a_recovery_shows_how_long_a_replacement_takes() -> None:
    """Events are a second apart: the loss, three reports."""
    reports = [
        ev.StatusReported(
            rank=rank,
            generation=2,
            iteration=None if rank == 1 else 12,
            live=rank != 1,
            stages=(rank,),
            pipeline_known=True,
            holds=(f"stage {rank}",),
            group=rank,
        )
        for rank in range(3)
    ]
    lost = ev.MachineLost(machine=machine(1), reason="a test")
    found = plan(lost, *reports, ev.WorkerReady(rank=1, generation=2, replayed=2))
    assert seconds(found)[REPLACING] == pytest.approx(3.0)
    assert found.estimate is not None
    assert found.estimate.complete
    assert found.estimate.seconds == pytest.approx(3.0 + 10.02 + 4 * 0.7)


def test_without_profiles_the_journal_has_to_do() -> None:
    found = plan(profiles={})
    assert seconds(found)["loading the checkpoint"] is None
    assert seconds(found)["replaying 4 iterations"] == pytest.approx(4 * 0.4)  # four events in ten iterations


def test_profiles_are_read_back(tmp_path: Path) -> None:
    files = WorkerFiles(Store(tmp_path), "run/1")
    for rank, worker in MEASURED.items():
        files.write(of_rank(rank, PROFILE), asdict(worker))
    assert read_profiles(files, 4) == MEASURED
    assert read_profiles(WorkerFiles(Store(tmp_path), "run/2"), 4) == {}
    damaged = tmp_path / "runs/run_1/workers/rank-00001.profile.json"
    damaged.write_text(damaged.read_text().replace("1001", "1002"))
    assert read_profiles(files, 4).keys() == {0, 2}
    damaged.write_text("{")
    assert read_profiles(files, 4).keys() == {0, 2}
