"""Samples in files: indexed once, copied to the disk, and never anything else than what was indexed."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import IO, Any

import pytest

from swift_ft.data import FileSamples, GlobalBatches, write_index
from swift_ft.data.file_cache import Peers
from swift_ft.data.file_index import INDEX, DataFile
from swift_ft.data.order import SampleOrder
from swift_ft.errors import UsageError

SIZES = [5, 1, 12, 7]


def line_of(number: int) -> str:
    return json.dumps({"number": number, "text": "x" * (number % 5)})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Files of 5, 1, 12 and 7 lines, the last of which has no end; in a folder of its own."""
    found, number = tmp_path / "data", 0
    for name, size in zip(["a.jsonl", "b.jsonl", "c/a.jsonl", "d.jsonl"], SIZES, strict=True):
        (found / name).parent.mkdir(parents=True, exist_ok=True)
        lines = "\n".join(line_of(number + n) for n in range(size))
        (found / name).write_text(lines if name == "d.jsonl" else lines + "\n")
        number += size
    (found / "_notes.txt").write_text("no samples")
    return found


@pytest.fixture
def samples(folder: Path, tmp_path: Path) -> FileSamples:
    write_index(str(folder))
    return FileSamples(str(folder), tmp_path / "cache", decode=json.loads)


def numbers(samples: list[dict[str, Any]]) -> list[int]:
    return [sample["number"] for sample in samples]


def test_lines(samples: FileSamples) -> None:
    assert samples.shard_sizes == SIZES
    assert numbers([samples[index] for index in range(25)]) == list(range(25))
    assert samples[7] == json.loads(line_of(7))
    for index in (25, -1):
        with pytest.raises(IndexError, match="0 to 24"):
            samples[index]


def test_samples_of_one_size(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "tokens").write_bytes(bytes(range(12)))
    (tmp_path / "data" / "more").write_bytes(bytes(range(100, 104)))
    write_index(str(tmp_path / "data"), sample_bytes=4)
    samples = FileSamples(str(tmp_path / "data"), tmp_path / "cache")
    assert [samples[index][0] for index in range(4)] == [100, 0, 4, 8]
    with pytest.raises(UsageError, match="4 bytes, which is no whole number of samples of 3"):
        write_index(str(tmp_path / "data"), sample_bytes=3)


def test_files_are_shards_of_global_batches(samples: FileSamples) -> None:
    batches = GlobalBatches(samples, 5, shuffle=True, collate_fn=numbers)
    found = [number for index in range(5) for number in batches[index]]
    assert found == SampleOrder(SIZES, shuffle=True, seed=0).at(0, 25)
    assert batches.state_dict()["identity"] == samples.identity


@pytest.mark.parametrize("num_workers", [0, 2])
def test_files_that_come_next_are_fetched(folder: Path, tmp_path: Path, num_workers: int) -> None:
    write_index(str(folder))
    samples = FileSamples(str(folder), tmp_path / "cache", decode=json.loads)
    batches = GlobalBatches(samples, 1, collate_fn=numbers, num_workers=num_workers)
    assert batches[0] == [0]
    samples.copies.close()  # waits for what has begun
    copies = [path for path in (tmp_path / "cache").iterdir() if path.suffix != ".lock"]
    assert len(copies) == 3
    assert [batches[index] for index in range(25)] == [[number] for number in range(25)]
    batches.close()


def test_shards_that_come_next() -> None:
    order = SampleOrder(SIZES, shuffle=False, seed=0)
    assert order.shards_from(0, 3) == [0, 1, 2]
    assert order.shards_from(4, 3) == [0, 1, 2]
    assert order.shards_from(20, 3) == [3, 0, 1]
    assert order.shards_from(20, 9) == [3, 0, 1, 2]


def test_a_copy_is_used_without_the_original(samples: FileSamples, folder: Path) -> None:
    assert samples[0]["number"] == 0
    for path in folder.rglob("*.jsonl"):
        path.unlink()
    again: FileSamples = pickle.loads(pickle.dumps(samples))
    assert again[4]["number"] == 4
    with pytest.raises(FileNotFoundError):
        again[5]


def test_room(folder: Path, tmp_path: Path) -> None:
    write_index(str(folder))
    sizes = sorted(path.stat().st_size for path in folder.rglob("*.jsonl"))
    with pytest.raises(UsageError, match="less than the two largest files"):
        FileSamples(str(folder), tmp_path / "cache", cache_bytes=sizes[-1] + sizes[-2] - 1)
    limit = sizes[-1] + sizes[-2]
    samples = FileSamples(str(folder), tmp_path / "cache", decode=json.loads, cache_bytes=limit)
    for index in (0, 6, 20, 5, 0, 24, 12):
        assert samples[index]["number"] == index
        copies = [path.stat().st_size for path in (tmp_path / "cache").iterdir() if path.suffix != ".lock"]
        assert sum(copies) <= limit


class Other(Peers):
    """Another machine, whose copies may be damaged."""

    any = True

    def __init__(self, folder: Path, damage: bytes = b"") -> None:
        self._folder, self._damage = folder, damage
        self.offered: list[str] = []

    def open(self, file: DataFile) -> IO[bytes]:
        copy = self._folder / file.path
        if self._damage:
            copy = self._folder / f"_{copy.name}"
            copy.write_bytes((self._folder / file.path).read_bytes()[:-1] + self._damage)
        return copy.open("rb")

    def offer(self, file: DataFile, place: Path) -> None:
        self.offered.append(file.path)


def test_another_machine_is_asked_first(samples: FileSamples, folder: Path) -> None:
    samples.copies.peers = other = Other(folder)
    assert samples[3]["number"] == 3
    size = (folder / "a.jsonl").stat().st_size
    assert (samples.copies.fetched.peers, samples.copies.fetched.store) == (size, 0)
    samples.copies.peers = Other(folder, damage=b"?")
    assert samples[20]["number"] == 20
    assert samples.copies.fetched.store == (folder / "d.jsonl").stat().st_size
    samples.copies.close()
    assert other.offered == ["a.jsonl"]


def test_another_machine_that_fails(samples: FileSamples, folder: Path) -> None:
    samples.copies.peers = Other(folder / "gone")
    assert samples[20]["number"] == 20
    assert samples.copies.fetched.peers == 0


def test_a_file_that_has_changed(samples: FileSamples, folder: Path) -> None:
    path = folder / "d.jsonl"
    path.write_text(path.read_text().replace("x", "y"))
    with pytest.raises(UsageError, match=r"d\.jsonl in .* is not the file that was indexed"):
        samples[20]
    assert samples[0]["number"] == 0


def test_another_index_is_another_data_set(samples: FileSamples, folder: Path, tmp_path: Path) -> None:
    state = GlobalBatches(samples, 5).state_dict()
    path = folder / "d.jsonl"
    path.write_text(path.read_text().replace("24", "99"))
    write_index(str(folder))
    other = FileSamples(str(folder), tmp_path / "cache", decode=json.loads)
    assert other[24]["number"] == 99
    with pytest.raises(UsageError, match="identity was"):
        GlobalBatches(other, 5).load_state_dict(state)


def test_folders_without_an_index(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="write_index"):
        FileSamples(str(folder), tmp_path / "cache")
    write_index(str(folder))
    index = folder / INDEX
    index.write_text(index.read_text().replace('"samples": 5', '"samples": 6'))
    with pytest.raises(UsageError, match="damaged"):
        FileSamples(str(folder), tmp_path / "cache")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="no file of samples"):
        write_index(str(tmp_path / "empty"))
    (tmp_path / "empty" / "a").touch()
    with pytest.raises(UsageError, match="has no sample"):
        write_index(str(tmp_path / "empty"))
