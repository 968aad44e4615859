"""What is kept of checkpoints and who decides about the store."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from swift_ft.checkpoint import store_claim as claim
from swift_ft.checkpoint.folder import CheckpointFolder
from swift_ft.checkpoint.run_record import read_record
from swift_ft.config.run_config import RunConfig
from swift_ft.config.worker_context import WorkerContext
from swift_ft.errors import UsageError
from swift_ft.storage.digest import sealed
from swift_ft.storage.store import Store
from swift_ft.storage.store_errors import StoreGoneError

FIRST = sealed({"run_id": "first", "topology": {"machines": 2}, "earlier": [], "settings": {}})
"""The record of an earlier run."""

# --------------------------------------------------------------------------------------------- clean


@pytest.fixture
def folder(tmp_path: object) -> CheckpointFolder:
    return CheckpointFolder(Store(str(tmp_path)))


def save(
    folder: CheckpointFolder, iteration: int, *generations: int, committed: bool = True, run: str = "run"
) -> None:
    """Parts of rank 0, one per generation; the marker names the last one."""
    for generation in generations:
        folder.store.write_json(f"{folder.part(iteration, 0, generation)}/data.json", {})
    if committed:
        folder.commit(iteration, {0: folder.part(iteration, 0, generations[-1])}, run, {})


def left(folder: CheckpointFolder) -> dict[str, list[str]]:
    names = sorted(folder.store.list("checkpoints"))
    return {name: sorted(folder.store.list(f"checkpoints/{name}")) for name in names}


def test_the_newest_that_all_know_of_are_kept(folder: CheckpointFolder) -> None:
    for iteration in (10, 20, 30, 40):
        save(folder, iteration, 1)
    folder.clean((30, 40), 1, "run")
    assert folder.committed() == [30, 40]


def test_a_marker_that_no_event_names_does_not_count(folder: CheckpointFolder) -> None:
    """Its writer died before it could report it: all would return to the one before it, which must stay."""
    save(folder, 20, 1)
    save(folder, 30, 1)
    save(folder, 40, 1)
    folder.clean((30,), 1, "run")
    assert folder.committed() == [30, 40]


def test_parts_that_never_became_a_checkpoint_go(folder: CheckpointFolder) -> None:
    save(folder, 10, 1, committed=False)
    save(folder, 20, 1, 2)  # a fenced writer's part, beside its successor's
    save(folder, 30, 2, committed=False)  # still being written
    folder.clean((20,), 2, "run")
    assert left(folder) == {
        "00000020": ["committed.json", "rank-00000.g00002"],
        "00000030": ["rank-00000.g00002"],
    }


def test_orphans_beside_a_marker_that_no_event_names_stay(folder: CheckpointFolder) -> None:
    save(folder, 20, 1)
    save(folder, 30, 1, 2)
    folder.clean((20,), 2, "run")
    assert left(folder)["00000030"] == ["committed.json", "rank-00000.g00001", "rank-00000.g00002"]


def test_what_is_no_checkpoint_is_left_alone(folder: CheckpointFolder) -> None:
    save(folder, 10, 1)
    save(folder, 20, 1)
    folder.store.write_json("checkpoints/notes/mine.json", {})
    folder.clean((20,), 1, "run")
    assert sorted(left(folder)) == ["00000020", "notes"]


# --------------------------------------------------------------------------------------------- claim


class Rendezvous:
    """The keys of a rendezvous store that a claim needs."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def get(self, key: str) -> bytes:
        return self.values[key].encode()

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        if not self.check(keys):
            raise RuntimeError(f"no {keys} within {timeout}")


def claimed(
    folder: CheckpointFolder, rendezvous: Rendezvous, rank: int, mode: str = "resume"
) -> tuple[int, ...]:
    config = RunConfig(resume=mode == "resume", fresh=mode == "fresh")
    context = SimpleNamespace(rank=rank, started_in=1, run_id="second", config=config)
    return claim.claim_store(
        folder.store, cast(WorkerContext, context), cast(Any, rendezvous), {"machines": 2}, 1.0
    )


def test_worker_0_tells_which_checkpoint_there_is(folder: CheckpointFolder) -> None:
    folder.store.write_json("run.json", FIRST)
    save(folder, 20, 1)
    rendezvous = Rendezvous()
    assert claimed(folder, rendezvous, 0) == (20,)
    assert claimed(folder, rendezvous, 1) == ()
    assert read_record(folder.store) == {
        "format": 1,
        "run_id": "second",
        "topology": {"machines": 2},
        "earlier": ["first"],
        "settings": {},
    }


def test_the_replacement_of_worker_0_finds_what_was_decided(folder: CheckpointFolder) -> None:
    """The first one may have died before its report. Its replacement then reports the same."""
    folder.store.write_json("run.json", FIRST)
    save(folder, 20, 1)
    rendezvous = Rendezvous()
    claimed(folder, rendezvous, 0)
    save(folder, 30, 1)
    assert claimed(folder, rendezvous, 0) == (20,)
    decided = {"checkpoints": [20], "store": folder.store.url, "secret": False}
    assert json.loads(rendezvous.values["claimed"]) == decided


def test_a_store_that_is_lost_while_it_is_claimed_is_no_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lost mount leaves an empty folder behind: training would begin at iteration 0."""
    place = tmp_path / "store"
    folder, sweep = CheckpointFolder(Store(str(place)).at_once()), CheckpointFolder.sweep
    folder.store.write_json("run.json", FIRST)
    save(folder, 20, 1)

    def sweep_elsewhere(self: CheckpointFolder) -> None:
        place.rename(tmp_path / "aside")
        place.mkdir()
        sweep(self)

    monkeypatch.setattr(CheckpointFolder, "sweep", sweep_elsewhere)
    with pytest.raises(StoreGoneError):
        claimed(folder, Rendezvous(), 0)
    assert CheckpointFolder(Store(str(tmp_path / "aside"))).committed() == [20]


def test_an_empty_store_holds_no_checkpoint(folder: CheckpointFolder) -> None:
    rendezvous = Rendezvous()
    assert claimed(folder, rendezvous, 0, mode="") == ()
    assert claimed(folder, rendezvous, 0, mode="") == ()


@pytest.mark.parametrize(("mode", "stays"), [("resume", True), ("fresh", False)])
def test_the_journals_of_earlier_runs(folder: CheckpointFolder, mode: str, stays: bool) -> None:
    """--resume keeps them, without what a killed writer left; --fresh deletes all."""
    folder.store.write_json("run.json", FIRST)
    for name in ("00000000-00000007.json", "00000008-00000009.json.abc.tmp"):
        folder.store.write_json(f"{claim.journal_directory('first')}/{name}", {})
    claimed(folder, Rendezvous(), 0, mode)
    assert folder.store.list("runs/first/journal") == (["00000000-00000007.json"] if stays else [])


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"format": 2, "layout": "unknown"}, "A newer version of swift_ft wrote"),
        ({"name": "of another tool"}, "holds no run of swift_ft"),
        (None, "is damaged"),
    ],
)
def test_a_store_that_is_not_ours_stays_as_it_is(
    folder: CheckpointFolder, record: dict[str, Any] | None, words: str
) -> None:
    folder.store.write_json("run.json", record or {})
    path = folder.store.local_path("run.json")
    assert path is not None
    if record is None:
        path.write_text('{"run_id": "fir')
    before = path.read_bytes()
    for mode in ("resume", "fresh", ""):
        with pytest.raises(UsageError, match=words):
            claimed(folder, Rendezvous(), 0, mode)
    assert path.read_bytes() == before
