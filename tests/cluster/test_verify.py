"""``swift-recover verify`` on the store of a real run that lost a machine, and on damaged copies of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from swift_ft.cli.recover.main import main
from swift_ft.logging.format.segment import open_segment
from swift_ft.storage.store import Store
from tests.cluster.conftest import LENGTH, NEWEST, OLDER
from tests.support.damage import flip
from tests.support.stored_run import change_record

BACK = f"all would go back to the checkpoint of iteration {NEWEST}"


def verified(store: Path | str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What the command prints for programs; its exit code is that of what it found."""
    code = main(["verify", str(store), "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert code == (1 if found["findings"] else 0)
    return found


def only_finding(store: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    (finding,) = verified(store, capsys)["findings"]
    assert finding["path"]
    return dict(finding)


def until(found: dict[str, Any]) -> dict[int, int | None]:
    """By worker, the iterations that it would have completed after a replay."""
    return {worker["rank"]: worker["until"] for worker in found["workers"]}


def segments(store: Path, rank: int) -> list[Path]:
    return sorted((store / f"log/rank-{rank:05d}").glob("*.arrow"))


def needed_message(store: Path, rank: int, destination: int) -> tuple[Path, int, int]:
    """The newest segment of a worker, its last message to a stage: the place of a byte, and the iteration."""
    file = segments(store, rank)[-1]
    run_id = json.loads((store / "run.json").read_text())["run_id"]
    _, records = open_segment(Store(store), str(file.relative_to(store)), run_id)
    message = [r for r in records if r.payload and r.key.destination_stage == destination][-1]
    assert message.payload is not None
    return file, file.read_bytes().index(bytes(message.payload)) + 50, message.key.iteration


def test_an_intact_store(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*")}
    found = verified(finished, capsys)
    assert found["findings"] == []
    assert found["notes"] == {}
    assert [(c["iteration"], c["parts"], c["intact"]) for c in found["checkpoints"]] == [
        (OLDER, 4, True),
        (NEWEST, 4, True),
    ]
    assert found["newest"] == LENGTH
    for worker in found["workers"]:
        assert (worker["stages"], worker["begin"], worker["until"]) == ([worker["rank"]], NEWEST, LENGTH)
    assert found["segments"] == sum(len(segments(finished, rank)) for rank in range(4))
    assert found["messages"] >= 5 * 6 * 8  # iterations, directions of three boundaries, microbatches
    assert {path: path.stat().st_mtime_ns for path in finished.rglob("*")} == before  # read only
    assert main(["verify", str(finished)]) == 0
    assert "nothing is damaged" in capsys.readouterr().out


def test_a_flipped_bit_in_a_payload(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only the worker that would read the message is concerned."""
    file, at, iteration = needed_message(store, rank=2, destination=3)
    flip(file, at)
    found = verified(store, capsys)
    (finding,) = found["findings"]
    assert finding["path"] == str(file.relative_to(store))
    assert f"the payload of iteration {iteration}, microbatch" in finding["what"]
    assert "does not match its checksum" in finding["what"]
    assert finding["consequence"] == f"worker 3 could not be replayed beyond iteration {iteration}: {BACK}"
    assert until(found) == {0: LENGTH, 1: LENGTH, 2: LENGTH, 3: iteration}


def test_a_flipped_bit_of_which_a_newer_copy_exists(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Worker 1 sent iteration 12 in its first life, and again in its replay."""
    file = segments(store, 1)[0]
    assert file.name.startswith("g00001")
    run_id = json.loads((store / "run.json").read_text())["run_id"]
    _, records = open_segment(Store(store), str(file.relative_to(store)), run_id)
    payload = next(r.payload for r in records if r.payload and r.key.iteration == NEWEST)
    flip(file, file.read_bytes().index(bytes(payload)) + 50)
    finding = only_finding(store, capsys)
    assert finding["consequence"].startswith("nothing now: no replay needs what is lost, or a newer copy")


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda file: flip(file, -200), "is damaged after"),
        (lambda file: file.write_bytes(file.read_bytes()[:-100]), "has no footer"),
        (lambda file: file.rename(file.with_name("moved.arrow")), "was renamed"),
    ],
    ids=["a bit of the footer", "cut short", "renamed"],
)
def test_a_segment_that_cannot_be_read(
    damage: Callable[[Path], None], what: str, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both neighbours would read it."""
    file = segments(store, 2)[-1]
    first = int(file.name.split("-i")[1].split("-")[0])
    damage(file)
    found = verified(store, capsys)
    finding = found["findings"][0]
    assert what in finding["what"]
    assert finding["path"].startswith("log/rank-00002/")
    beyond = NEWEST if what == "was renamed" else first
    assert finding["consequence"] == f"workers 1, 3 could not be replayed beyond iteration {beyond}: {BACK}"
    assert until(found) == {0: LENGTH, 1: beyond, 2: LENGTH, 3: beyond}


def test_a_segment_is_missing_in_the_middle(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, gone, after = segments(store, 2)[-3:]
    gone.unlink()
    found = verified(store, capsys)
    (finding,) = found["findings"]
    assert finding["what"] == f"the segment before {after.name} is missing"
    since = int(before.stem.rsplit("-", 1)[1])
    assert finding["consequence"] == f"workers 1, 3 could not be replayed beyond iteration {since}: {BACK}"
    assert until(found) == {0: LENGTH, 1: since, 2: LENGTH, 3: since}


def test_the_last_segment_is_gone(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing after it shows that. The receipts of the receivers do."""
    gone = segments(store, 1)[-1]
    gone.unlink()
    finding = only_finding(store, capsys)
    assert finding["path"] == "log/rank-00001"
    assert f"messages of iteration {LENGTH - 1} are missing" in finding["what"]
    assert (
        finding["consequence"] == f"workers 0, 2 could not be replayed beyond iteration {LENGTH - 1}: {BACK}"
    )


def test_a_whole_log_is_gone(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(store / "log/rank-00003")
    finding = only_finding(store, capsys)
    assert finding["path"] == "log/(of stage 3)"
    assert f"40 messages of iterations {NEWEST} to {LENGTH - 1} are missing" in finding["what"]
    assert finding["consequence"] == f"worker 2 could not be replayed beyond iteration {NEWEST}: {BACK}"


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "digests.json"])
@pytest.mark.parametrize("gone", [False, True], ids=["flipped", "gone"])
def test_a_damaged_part_of_the_newest_checkpoint(
    name: str, gone: bool, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file,) = (store / f"checkpoints/{NEWEST:08d}").glob(f"rank-00002*/{name}")
    file.unlink() if gone else flip(file, 0.5)
    found = verified(store, capsys)
    (finding,) = found["findings"]
    assert finding["path"] == str(file.parent.relative_to(store))
    assert f"the file {name}" in finding["what"]
    back = f"all would go back to the checkpoint of iteration {OLDER}"
    assert finding["consequence"] == f"worker 2 could not be replayed: {back}"
    assert until(found) == {0: LENGTH, 1: LENGTH, 2: None, 3: LENGTH}


def test_damaged_parts_of_all_checkpoints(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for iteration, rank in ((OLDER, 0), (NEWEST, 1)):
        (file,) = (store / f"checkpoints/{iteration:08d}").glob(f"rank-{rank:05d}*/__0_0.distcp")
        flip(file, 0.7)
    older, newest = verified(store, capsys)["findings"]
    assert older["consequence"] == "no intact checkpoint is left to go back to"
    assert (
        newest["consequence"] == "worker 1 could not be replayed: no intact checkpoint is left to go back to"
    )


def test_an_older_checkpoint_does_not_matter_now(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (file,) = (store / f"checkpoints/{OLDER:08d}").glob("rank-00000*/__0_0.distcp")
    file.write_bytes(file.read_bytes()[:-1])
    finding = only_finding(store, capsys)
    assert "bytes instead of" in finding["what"]
    newer = f"the checkpoint of iteration {NEWEST} is newer and intact"
    assert finding["consequence"] == f"nothing now: {newer}"


def test_a_flipped_bit_in_the_marker(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(store / f"checkpoints/{NEWEST:08d}/committed.json", 0.5)
    found = verified(store, capsys)
    (finding,) = found["findings"]
    assert "committed.json does not match its digest" in finding["what"]
    back = f"all would go back to the checkpoint of iteration {OLDER}"
    assert finding["consequence"] == f"no worker could be replayed: {back}"
    assert set(until(found).values()) == {None}


def test_a_damaged_journal_is_named_and_stops_no_recovery(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file, *_) = sorted((store / "runs").rglob("journal/*.json"))
    flip(file, file.read_bytes().index(b'"by"') + 1)  # the last digit of a time may mean the same number
    found = verified(store, capsys)
    assert found["findings"][0]["path"] == str(file.parent.relative_to(store))
    assert all(finding["consequence"].startswith("no recovery needs it") for finding in found["findings"])
    assert until(found) == dict.fromkeys(range(4), LENGTH)


def test_what_is_no_damage(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is named as what it is: what killed workers left, an unfinished checkpoint, an earlier run's log."""
    record = json.loads((store / "run.json").read_text())
    whole = segments(store, 3)[-1]
    unfinished = store / f"checkpoints/{LENGTH + 1:08d}"
    (part,) = (store / f"checkpoints/{NEWEST:08d}").glob("rank-00000*")
    shutil.copytree(part, unfinished / part.name)
    (store / "probe.0123.tmp").write_bytes(b"x")
    whole.rename(whole.with_name("g00002-s000001.0123456789ab.tmp"))  # as if it were still open
    found = verified(store, capsys)
    assert found["findings"] == []
    assert until(found)[2] == LENGTH - 1
    assert found["workers"][2]["remark"] == "the log of worker 3 in the store ends there"
    assert sorted(found["notes"]) == sorted(
        [
            str(unfinished.relative_to(store)),
            "log/rank-00003/g00002-s000001.0123456789ab.tmp",
            "probe.0123.tmp",
        ]
    )
    record = change_record(store, earlier=[record["run_id"]], run_id="run.2")
    found = verified(store, capsys)
    assert found["findings"] == []
    path = str(segments(store, 0)[0].relative_to(store))
    assert found["notes"][path] == f"of run {record['earlier'][0]}, which this one continued"
    assert found["segments"] == 0


def test_a_log_of_a_stranger(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change_record(store, run_id="run.2")
    findings = verified(store, capsys)["findings"]
    assert len(findings) == sum(len(segments(store, rank)) for rank in range(4))
    assert all("which this one did not continue" in finding["what"] for finding in findings)


@pytest.mark.parametrize("place", ["nowhere", "foreign"])
def test_bad_input_gets_one_line(place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if place == "foreign":
        (tmp_path / place).mkdir()
        (tmp_path / place / "data.bin").write_bytes(b"x")
    assert main(["verify", str(tmp_path / place)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("swift-recover: ")
    assert not (tmp_path / "nowhere").exists()
