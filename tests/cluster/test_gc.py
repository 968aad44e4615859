"""``swift-recover gc`` on copies of a real run's store: what it deletes, and what it must not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from swift_ft.cli.recover.main import main
from swift_ft.logging.format.record import Record
from swift_ft.logging.format.segment import SegmentIdentity, SegmentWriter, open_segment
from swift_ft.storage.store import Store
from tests.cluster.conftest import LENGTH, NEWEST, OLDER
from tests.support.stored_run import change_record


def collected(store: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    assert main(["gc", str(store), "--json", *flags]) == 0
    return dict(json.loads(capsys.readouterr().out))


def contents(store: Path) -> dict[str, bytes]:
    return {str(path.relative_to(store)): path.read_bytes() for path in store.rglob("*") if path.is_file()}


def segments(store: Path, rank: int) -> list[Path]:
    return sorted((store / f"log/rank-{rank:05d}").glob("*.arrow"))


def write_segment(store: Path, run_id: str, generation: int, iteration: int, sequence: int) -> str:
    """A segment of worker 0 with a real message, as if it were of another run or iteration."""
    source = segments(store, 0)[0]
    own = json.loads((store / "run.json").read_text())["run_id"]
    _, records = open_segment(Store(store), str(source.relative_to(store)), own)
    first = next(record for record in records if record.payload)
    key = type(first.key)(iteration, *(getattr(first.key, name) for name in list(first.key.__slots__)[1:]))
    writer = SegmentWriter(Store(store), "log/rank-00000", SegmentIdentity(run_id, 0, generation), sequence)
    writer.append(
        Record(first.kind, key, first.dtype, first.shape, first.checksum, first.payload, first.codec)
    )
    return writer.commit()


@pytest.fixture
def littered(store: Path) -> tuple[Path, dict[str, str]]:
    """A store with all kinds of leftovers; and by path, a part of why they are garbage."""
    record = change_record(store, earlier=["run.0"])
    (part,) = (store / f"checkpoints/{NEWEST:08d}").glob("rank-00000*")
    unfinished = store / f"checkpoints/{LENGTH + 1:08d}"
    shutil.copytree(part, unfinished / part.name)
    orphan = part.with_name("rank-00000.g00099")
    shutil.copytree(part, orphan)
    files = {
        "probe.0123456789ab.tmp": "worker that was killed",
        f"checkpoints/{OLDER:08d}/committed.json.0123456789ab.tmp": "failed",
        "log/rank-00002/g00002-s000009.0123456789ab.tmp": "writer was killed",
    }
    for name in files:
        (store / name).write_bytes(b"x" * 100)
    return store, {
        **files,
        str(unfinished.relative_to(store)): "never committed",
        str(orphan.relative_to(store)): "failed",
        write_segment(store, record["run_id"], 1, OLDER - 1, 0): "older than the checkpoint of iteration 6",
        write_segment(store, "run.0", 9, LENGTH, 0): "the log of run run.0",
    }


def test_a_dry_run_names_everything_and_deletes_nothing(
    littered: tuple[Path, dict[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    store, expected = littered
    before = contents(store)
    found = collected(store, capsys, "--dry-run")
    assert {one["path"] for one in found["garbage"]} == set(expected)
    for one in found["garbage"]:
        assert expected[one["path"]] in one["why"]
        below = [data for path, data in before.items() if f"{path}/".startswith(f"{one['path']}/")]
        assert one["size"] == sum(map(len, below)) > 0
    assert found["total_bytes"] == sum(one["size"] for one in found["garbage"])
    assert found["store_bytes"] == sum(map(len, before.values()))
    assert found["deleted"] is False
    assert contents(store) == before


def test_it_deletes_garbage_and_nothing_else(
    littered: tuple[Path, dict[str, str]], finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run has ended, as its journal says. What is left is what was there before, byte by byte."""
    store, _ = littered
    found = collected(store, capsys)
    assert (found["may_be_alive"], found["deleted"]) == ("", True)
    left, whole = contents(store), contents(finished)
    assert left.pop("run.json") != whole.pop("run.json")  # the fixture changed it
    assert left == whole
    assert collected(store, capsys)["garbage"] == []
    assert main(["verify", str(store), "--json"]) == 0
    verified = json.loads(capsys.readouterr().out)
    assert verified["notes"] == {}
    assert {worker["until"] for worker in verified["workers"]} == {LENGTH}


def test_it_refuses_while_the_run_may_be_alive(
    littered: tuple[Path, dict[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    store, expected = littered
    shutil.rmtree(store / "runs")
    before = contents(store)
    assert main(["gc", str(store)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "may be alive (no journal is archived, and its newest file is" in line
    assert "--yes" in line
    assert contents(store) == before
    assert len(collected(store, capsys, "--yes")["garbage"]) == len(expected)
    assert collected(store, capsys, "--dry-run")["garbage"] == []


def test_what_nobody_can_know_is_left_alone(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A damaged marker names no parts, a torn segment no run, and a stranger's log is not ours to delete."""
    marker = store / f"checkpoints/{NEWEST:08d}/committed.json"
    marker.write_text(marker.read_text().replace('"iteration": 12', '"iteration": 13'))
    (segments(store, 1)[-1]).write_bytes(b"torn")
    write_segment(store, "run.of-somebody", 9, LENGTH, 0)
    before = contents(store)
    assert collected(store, capsys)["garbage"] == []
    assert contents(store) == before
