"""What ``swift-recover replay`` refuses, in one line, with nothing written; and stores that are damaged."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest

from swift_ft.checkpoint.worker_record import write_record
from swift_ft.cli.recover.main import main
from swift_ft.coordination.archive import JournalArchive
from swift_ft.recovery import events as ev
from swift_ft.recovery.entries import Entry
from swift_ft.storage.store import Store
from tests.support.damage import flip
from tests.support.stored_run import (
    RUN,
    change_record,
    make_run,
    pipeline_record,
    save_checkpoint,
    write_log,
)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text("raise SystemExit('this script must not run')\n")
    return path


@pytest.fixture
def store(tmp_path: Path, script: Path) -> Store:
    return make_run(tmp_path / "store", script)


def contents(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: str, *, code: int = 2) -> str:
    """The one line; the store is as it was, and there is no output."""
    before, out = contents(tmp_path), tmp_path / "out"
    command = ["replay", str(tmp_path / "store"), "--out", str(out)]
    machine = [] if "--machine" in flags else ["--machine", "1"]
    script = [] if " -- " in flags else ["--", str(tmp_path / "train.py")]
    assert main([*command, *machine, *flags.split(), *script]) == code
    assert contents(tmp_path) == before
    assert not out.exists()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("swift-recover: ")
    return line


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--machine 4", "the run has the machines 0 to 3"),
        ("--machine x", "invalid int value: 'x'"),
        ("--to-iteration 2", "--to-iteration 2 is before the oldest checkpoint"),
        ("--to-iteration 9", "can go to iteration 8, where the log ends. Give at most 8"),
        ("--from-checkpoint 4", "has the checkpoints of iteration 3, 6"),
        ("--from-checkpoint 6 --to-iteration 5", "--to-iteration 5 is before --from-checkpoint 6"),
        ("--check-against /nowhere/at/all", "holds no saved state: give STORE/checkpoints/ITERATION"),
    ],
)
def test_what_was_asked_for(
    flags: str, says: str, store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in refused(tmp_path, capsys, flags)


@pytest.mark.parametrize("part", ["", "/rank-00001.g00001"])
def test_a_state_of_another_iteration(
    part: str, store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nearly all of it would differ."""
    against = f"{tmp_path}/store/checkpoints/00000003{part}"
    line = refused(tmp_path, capsys, f"--to-iteration 6 --check-against {against}")
    assert f"{against} is of iteration 3, and this replay goes to iteration 6" in line


def test_a_folder_that_holds_something(
    store: Store, tmp_path: Path, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("important")
    command = ["replay", str(tmp_path / "store"), "--out", str(tmp_path / "out"), "--machine", "1"]
    assert main([*command, "--", str(script)]) == 2
    assert "is not an empty folder" in capsys.readouterr().err
    assert (tmp_path / "out" / "mine").read_text() == "important"


def test_a_script_that_changed(
    store: Store, tmp_path: Path, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script.write_text("another one")
    line = refused(tmp_path, capsys, "")
    assert "the script is train.py (" in line
    assert "was train.py (" in line


def test_no_script(store: Store, tmp_path: Path, script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.unlink()
    assert "there is no script" in refused(tmp_path, capsys, "")


def test_no_store(tmp_path: Path, script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "does not exist or is empty" in refused(tmp_path, capsys, "")


def test_a_data_parallel_run_has_no_log(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change_record(tmp_path / "store", topology={"machines": 4, "workers": 1, "stages": 1})
    store.delete("workers", recursive=True)
    line = refused(tmp_path, capsys, "")
    assert "machine 1 is a data-parallel replica" in line
    assert "that of the checkpoint of iteration 6" in line


def test_a_run_without_records(store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store.delete("workers/rank-00002.json")
    assert "does not say which stages worker 2 had" in refused(tmp_path, capsys, "")


def test_all_machines_in_one_group(store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(4):
        write_record(store, rank, pipeline_record(rank, group=0))
    assert "machines 0, 1, 2 and 3 recover together" in refused(tmp_path, capsys, "")


def test_a_log_that_ends_in_an_iteration(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Worker 2 has logged one of two microbatches of iteration 7: up to there the replay can go."""
    store.delete("log/rank-00002", recursive=True)
    write_log(store, 2, 3, 7)
    write_log(store, 0, 3, 8)
    assert "can go to iteration 7, where the log ends" in refused(tmp_path, capsys, "--to-iteration 8")


def test_a_log_that_was_dropped(store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run keeps the log since its newest checkpoint: from an older one nothing can be replayed."""
    for iteration, sequence in ((3, 0), (4, 1), (5, 2)):
        store.delete(f"log/rank-00002/g00001-s{sequence:06d}-i{iteration:08d}-{iteration:08d}.arrow")
    line = refused(tmp_path, capsys, "--from-checkpoint 3 --to-iteration 6")
    assert "begins with the checkpoint of iteration 3 and can go to iteration 3" in line


def test_a_gap_in_the_log(store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store.delete("log/rank-00002/g00001-s000003-i00000006-00000006.arrow")
    store.delete("log/rank-00000/g00001-s000002-i00000005-00000005.arrow")
    line = refused(tmp_path, capsys, "--from-checkpoint 3 --to-iteration 6", code=1)
    assert "segments are missing" in line


def test_a_damaged_segment(store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "store/log/rank-00002/g00001-s000004-i00000007-00000007.arrow"
    path.write_bytes(path.read_bytes()[:-40])
    assert path.name in refused(tmp_path, capsys, "", code=1)


def test_a_damaged_checkpoint(store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By default an older one is used; one that was asked for is an error; and so are damaged ones only."""
    spoil(tmp_path, 6)
    assert "checkpoint of iteration 6 is damaged" in refused(tmp_path, capsys, "--from-checkpoint 6", code=1)
    assert "can go to iteration 8" in refused(tmp_path, capsys, "--to-iteration 9")
    spoil(tmp_path, 3)
    assert "no checkpoint is intact" in refused(tmp_path, capsys, "", code=1)


def spoil(tmp_path: Path, iteration: int) -> None:
    (path,) = (tmp_path / f"store/checkpoints/{iteration:08d}/rank-00001.g00001").glob("*.distcp")
    flip(path)


def test_no_checkpoint(store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(tmp_path / "store" / "checkpoints")
    assert "has no committed checkpoint" in refused(tmp_path, capsys, "")
    save_checkpoint(store, 8)
    assert "is before the oldest checkpoint" in refused(tmp_path, capsys, "--to-iteration 7")


def test_a_script_that_fails(
    store: Store, tmp_path: Path, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The script runs, and never makes a session: its output stays, so that one can see why."""
    out = tmp_path / "out"
    command = ["replay", str(tmp_path / "store"), "--out", str(out), "--machine", "1", "--", str(script)]
    assert main(command) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "worker 1: the script exited with code 1: this script must not run" in line
    assert str(out) in line
    assert [path.name for path in out.iterdir()] == ["rank-00001.log"]


def test_a_gap_in_the_journal_may_hide_a_return_to_a_checkpoint(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    later = ev.CommunicationFailed(rank=0, generation=5, reason="?")
    JournalArchive(store, RUN).write([Entry(9, later, 2.0, "machine 0")])
    line = refused(tmp_path, capsys, "")
    assert "the entries 1 to 8 of the journal are missing" in line
    assert "nothing shows which logs belong to this history. No replay is safe" in line
