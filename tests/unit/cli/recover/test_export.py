"""``swift-recover export``: what is in the bundle, and what is not."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest

from swift_ft.cli.recover.main import main
from swift_ft.recovery import events as ev
from swift_ft.recovery.entries import entry_from_dict
from tests.support.journals import RUN, checkpoint, entries_of, opening, store_with, work_of_recovered

EVENTS = [*opening(3), *checkpoint(3, 0), *checkpoint(3, 10)]
SEGMENT = "g00001-s000000-i00000000-00000009.arrow"


def unpacked(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as archive:
        found = {member.name: archive.extractfile(member) for member in archive.getmembers()}
        return {name: file.read() for name, file in found.items() if file is not None}


def test_a_bundle(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_SECRET_OF_MINE", "swordfish")
    folder, out = tmp_path / "store", tmp_path / "report.tar.gz"
    store = store_with(str(folder), EVENTS, machines=3, segments={1: [SEGMENT]})
    part = folder / "checkpoints" / "00000010" / "rank-00000.g00001"
    part.mkdir()
    (part / "tensors.distcp").write_bytes(b"tensor" * 100)
    work_of_recovered(store)
    before = store.find("")
    assert main(["export", str(folder), "--run", RUN, "--out", str(out)]) == 0
    assert store.find("") == before
    assert f"{len(EVENTS)} entries of the journal" in capsys.readouterr().out
    found = unpacked(out)
    lines = found[f"{RUN}/journal.jsonl"].splitlines()
    assert tuple(entry_from_dict(json.loads(line)) for line in lines) == entries_of(EVENTS)
    assert json.loads(found[f"{RUN}/run.json"])["run_id"] == RUN
    assert json.loads(found[f"{RUN}/recoveries.json"]) == []
    histories = {name.rpartition("/")[2] for name in found if "/workers/" in name}
    assert histories == {"rank-00000.g0001.json", "rank-00001.g0001.json", "rank-00001.g0002.json"}
    assert (
        found[f"{RUN}/checkpoints/00000010/committed.json"]
        == (folder / "checkpoints" / "00000010" / "committed.json").read_bytes()
    )
    sizes = {name: file["size"] for name, file in json.loads(found[f"{RUN}/files.json"]).items()}
    assert sizes[f"log/rank-00001/{SEGMENT}"] == 1000
    assert sizes["checkpoints/00000010/rank-00000.g00001/tensors.distcp"] == 600
    versions = json.loads(found[f"{RUN}/versions.json"])
    assert versions["torch"]
    for secret in (b"tensortensor", b"swordfish", b"xxxx"):
        assert not any(secret in content for content in found.values())


def test_what_a_script_has_said_of_its_secrets_is_left_out(tmp_path: Path) -> None:
    """The journal has its words as they were."""
    said = ("http://me:hunter2@proxy refused", "token=hunter2", "x?X-Amz-Signature=hunter2")
    failed = ev.ScriptFailed(machine="host-1", started_in=1, reason=said[0], evidence=said[1:])
    store_with(str(tmp_path / "store"), [*EVENTS, failed], machines=3)
    assert main(["export", str(tmp_path / "store"), "--out", str(tmp_path / "report.tar.gz")]) == 0
    found = unpacked(tmp_path / "report.tar.gz")
    assert not any(b"hunter2" in content for content in found.values())
    last = json.loads(found[f"{RUN}/journal.jsonl"].splitlines()[-1])
    assert "http://***@proxy refused" in json.dumps(last)


def test_a_damaged_journal_is_exported_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store_with(str(tmp_path / "store"), EVENTS, machines=3)
    (journal,) = (tmp_path / "store" / "runs" / RUN / "journal").iterdir()
    journal.write_text(journal.read_text().replace("host-1", "host-7"))
    out = tmp_path / "report.tar.gz"
    assert main(["export", str(tmp_path / "store"), "--out", str(out), "--json"]) == 1
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert "does not match its digest" in problem
    assert unpacked(out)[f"{RUN}/problems.txt"].decode().strip() == problem


def test_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = tmp_path / "store", tmp_path / "report.tar.gz"
    store_with(str(folder), EVENTS, machines=3)
    out.write_text("mine")
    for arguments, words in (
        ([str(folder), "--out", str(out)], "exists"),
        ([str(folder), "--run", "other.1", "--out", str(tmp_path / "a")], f"it has job.0-ffffffff, {RUN}"),
        ([str(folder), "--out", str(tmp_path / "nowhere" / "a")], "cannot be written"),
        ([str(tmp_path / "nothing"), "--out", str(tmp_path / "a")], "does not exist"),
        ([str(folder)], "--out"),
    ):
        assert main(["export", *arguments]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert words in line
    assert out.read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.tar.gz", "store"]
