"""``swift-recover inspect`` with segments that the log's own writer wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swift_ft.cli.recover.main import main
from swift_ft.logging.format.encoding import SegmentIdentity
from swift_ft.logging.format.record import Direction, MessageKey, Record, RecordKind, checksum_of
from swift_ft.logging.format.segment import SegmentWriter
from swift_ft.storage.store import Store
from tests.support.damage import flip


@pytest.fixture
def segment(tmp_path: Path) -> Path:
    """Two messages and a receipt of two iterations, by worker 1."""
    writer = SegmentWriter(Store(tmp_path), "log/rank-00001", SegmentIdentity("run.1", 1, 2), 0)
    for iteration in (4, 5):
        payload = bytes([iteration]) * 400
        key = MessageKey(iteration, 0, Direction.FORWARD, 1, 2, 0)
        record = Record(RecordKind.MESSAGE, key, "float32", (100,), checksum_of(payload), memoryview(payload))
        writer.append(record)
    receipt = MessageKey(5, 0, Direction.BACKWARD, 2, 1, 0)
    writer.append(Record(RecordKind.RECEIPT, receipt, "float32", (100,), 7, None))
    return tmp_path / writer.commit()


def test_a_segment_for_people_and_for_programs(segment: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(segment)]) == 0
    shown = capsys.readouterr().out
    assert "worker 1 of run run.1, generation 2" in shown
    assert "iterations 4 to 5" in shown
    assert main(["inspect", str(segment), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["run_id"], summary["rank"], summary["iterations"]) == ("run.1", 1, [4, 5])
    forward, backward = summary["boundaries"]
    assert (forward["messages"], forward["tensor_bytes"], forward["receipts"]) == (2, 800, 0)
    assert (backward["messages"], backward["receipts"], backward["direction"]) == (0, 1, "backward")


def test_a_flipped_bit_is_named(segment: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(segment, segment.read_bytes().index(b"\5" * 400) + 100)
    assert main(["inspect", str(segment)]) == 1
    assert "damaged: the payload of iteration 5, microbatch 0, forward" in capsys.readouterr().out


def test_a_torn_segment(segment: Path, capsys: pytest.CaptureFixture[str]) -> None:
    segment.write_bytes(segment.read_bytes()[:-100])
    assert main(["inspect", str(segment), "--json"]) == 1
    (damage,) = json.loads(capsys.readouterr().out)["damage"]
    assert "has no footer" in damage


@pytest.mark.parametrize("content", [b"", b"just text\n", b"\xff\xff\xff\xff\x00\x00\x00\x00"])
def test_what_is_no_segment_is_no_damaged_one(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "notes.txt"
    file.write_bytes(content)
    assert main(["inspect", str(file)]) == 2
    out, err = capsys.readouterr()
    assert not out
    (line,) = err.splitlines()
    assert line.startswith(f"swift-recover: {file} is no log segment: give the path")


def test_a_segment_is_one_under_any_name_and_an_empty_one_under_its_own(
    segment: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = segment.with_name("copy.arrow")
    copy.write_bytes(segment.read_bytes())
    assert main(["inspect", str(copy)]) == 0
    assert "all checksums match" in capsys.readouterr().out
    segment.write_bytes(b"")
    assert main(["inspect", str(segment)]) == 1
    assert "damaged: " in capsys.readouterr().out


@pytest.mark.parametrize("arguments", ["inspect /nowhere/segment.arrow", "inspect", "repair x", ""])
def test_bad_input_gets_one_line(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("swift-recover: ")
