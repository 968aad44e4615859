"""The conformance suite for a store that is to hold logs and checkpoints.

from swift_ft.testing import StoreConformanceTests

class TestMyStore(StoreConformanceTests):
    @pytest.fixture
    def url(self):
        return "myfs://somewhere/an-empty-directory-for-each-test"
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pytest
import torch

from swift_ft.errors import LogTornError, SwiftError, UsageError
from swift_ft.logging import (
    Direction,
    LogOptions,
    LogReader,
    LogWriter,
    MessageKey,
    SegmentIdentity,
)
from swift_ft.storage.store import Store
from swift_ft.torch_adapters.dcp.reader import PartReader
from swift_ft.torch_adapters.dcp.writer import write_part

_LOG = "log/rank-00000"
_DEADLINE_S = 120.0


class StoreConformanceTests:
    """Inherit from it and add a fixture ``url``: an empty directory in the store, a new one for each test."""

    @pytest.fixture
    def url(self) -> str:
        """An empty directory for one test."""
        raise NotImplementedError(
            "StoreConformanceTests needs a fixture `url` in the class that inherits from it"
        )

    @pytest.fixture
    def store(self, url: str) -> Iterator[Store]:
        """The store at that directory, empty before and after."""
        store = Store(url)
        yield store
        store.delete_all()

    # ------------------------------------------------------------------------------------- small files

    def test_probe_leaves_nothing(self, store: Store) -> None:
        store.probe()
        assert store.list("") == []

    def test_json_round_trip_and_replacement(self, store: Store) -> None:
        assert store.read_json("a/b.json") is None
        store.write_json("a/b.json", {"step": 1})
        store.write_json("a/b.json", {"step": 2, "name": "ü"})
        assert store.read_json("a/b.json") == {"step": 2, "name": "ü"}
        assert store.list("a") == ["b.json"]

    def test_find_sees_all_files_below(self, store: Store) -> None:
        assert store.find("a") == {}
        for path in ("a/b/c.bin", "a/d.bin", "e.bin"):
            with store.open_write(path) as file:
                file.write(b"x" * len(path))
        found = store.find("a")
        assert {path: facts.size for path, facts in found.items()} == {"b/c.bin": 9, "d.bin": 7}
        assert {path: facts.size for path, facts in store.find("").items()} == {
            "a/b/c.bin": 9,
            "a/d.bin": 7,
            "e.bin": 5,
        }
        for facts in found.values():
            assert facts.modified is None or abs(facts.modified - time.time()) < 3600

    @pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff"])
    def test_anything_but_a_json_object_is_a_swift_error(self, store: Store, content: bytes) -> None:
        with store.open_write("x.json") as file:
            file.write(content)
        with pytest.raises(SwiftError, match=r"x\.json"):
            store.read_json("x.json")

    def test_a_replacement_is_never_partly_visible(self, store: Store) -> None:
        """A concurrent reader sees one of the contents, complete."""
        store.write_json("x.json", {"fill": "0" * 5000})
        done = threading.Event()

        def read() -> set[object]:
            seen: set[object] = set()
            while not done.is_set():
                content = store.read_json("x.json")
                seen.add(content and len(set(content["fill"])))
            return seen

        with ThreadPoolExecutor(1) as pool:
            seen = pool.submit(read)
            try:
                for i in range(20):
                    store.write_json("x.json", {"fill": str(i % 10) * (3000 + 100 * i)})
            finally:
                done.set()
            assert seen.result() == {1}

    # ------------------------------------------------------------------------------------- large files

    def test_a_file_does_not_exist_before_its_commit(self, store: Store) -> None:
        file = store.open_write("dir/data.bin")
        file.write(b"abc")
        assert not store.exists("dir/data.bin")
        assert file.tell() == 3
        assert file.commit() == "dir/data.bin"
        assert store.size("dir/data.bin") == 3
        assert store.list("dir") == ["data.bin"]
        assert store.open_read("dir/data.bin").read() == b"abc"

    def test_a_name_may_be_given_at_commit(self, store: Store) -> None:
        file = store.open_write("dir/unnamed")
        file.write(b"abc")
        file.commit("dir/named")
        assert store.list("dir") == ["named"]

    def test_abort_leaves_nothing(self, store: Store) -> None:
        file = store.open_write("dir/data.bin")
        file.write(b"abc")
        file.abort()
        assert store.list("dir") == []

    def test_an_exception_in_the_block_aborts(self, store: Store) -> None:
        def fail() -> None:
            with store.open_write("dir/data.bin") as file:
                file.write(b"abc")
                raise KeyError

        with pytest.raises(KeyError):
            fail()
        assert store.list("dir") == []

    def test_a_local_file_is_uploaded(self, store: Store, tmp_path: Path) -> None:
        """It is large enough for several parts where a store uploads in parts."""
        content = os.urandom(20 << 20)
        (tmp_path / "segment").write_bytes(content)
        store.upload(tmp_path / "segment", "dir/data.bin")
        assert store.list("dir") == ["data.bin"]
        assert store.size("dir/data.bin") == len(content)
        assert store.open_read("dir/data.bin").read() == content

    def test_an_uploaded_file_replaces_another(self, store: Store, tmp_path: Path) -> None:
        for content in (b"old", b"new!"):
            (tmp_path / "file").write_bytes(content)
            store.upload(tmp_path / "file", "data.bin")
        assert store.open_read("data.bin").read() == b"new!"

    def test_an_open_file_can_be_read_after_its_deletion(self, store: Store) -> None:
        with store.open_write("data.bin") as file:
            file.write(b"x" * (2 << 20))
        source = store.open_read("data.bin")
        store.delete("data.bin")
        assert source.read() == b"x" * (2 << 20)

    def test_an_empty_file_is_a_file(self, store: Store) -> None:
        store.open_write("dir/empty").commit()
        assert store.size("dir/empty") == 0
        assert store.open_read("dir/empty").read() == b""

    def test_an_absent_file_cannot_be_opened(self, store: Store) -> None:
        with pytest.raises(FileNotFoundError):
            store.open_read("absent")
        with pytest.raises(FileNotFoundError):
            store.size("absent")
        assert not store.exists("absent")

    def test_child_url_opens_the_same_file(self, store: Store) -> None:
        store.write_json("a/b.json", {"x": 1})
        with fsspec.open(store.child_url("a/b.json")) as file:
            assert b'"x": 1' in file.read()

    # --------------------------------------------------------------------------------------- directories

    def test_lists_are_sorted_and_complete_at_once(self, store: Store) -> None:
        names = [f"{i:03d}.json" for i in range(40)]
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda name: store.write_json(f"dir/{name}", {}), reversed(names)))
        assert store.list("dir") == names
        store.delete("dir/007.json")
        assert store.list("dir") == names[:7] + names[8:]
        store.write_json("dir/sub/deeper/x.json", {})
        assert store.list("dir")[-1] == "sub"
        assert store.list("absent") == []

    def test_all_files_are_found_with_their_sizes(self, store: Store) -> None:
        for path, size in (("a.bin", 3), ("dir/b.bin", 0), ("dir/sub/c.bin", 70_000)):
            with store.open_write(path) as file:
                file.write(bytes(size))
        sizes = {path: facts.size for path, facts in store.find("").items()}
        assert sizes == {"a.bin": 3, "dir/b.bin": 0, "dir/sub/c.bin": 70_000}
        assert {path: facts.size for path, facts in store.find("dir").items()} == {
            "b.bin": 0,
            "sub/c.bin": 70_000,
        }
        store.delete("a.bin")
        assert sorted(store.find("")) == ["dir/b.bin", "dir/sub/c.bin"]
        assert store.find("absent") == {}

    @pytest.mark.parametrize("size", [0, 9, 10, 25])
    def test_a_file_is_read_piece_by_piece(self, size: int, store: Store) -> None:
        with store.open_write("x.bin") as file:
            file.write(bytes(range(size)))
        pieces = [bytes(piece) for piece in store.read_pieces("x.bin", 10)]
        assert b"".join(pieces) == bytes(range(size))
        assert [len(piece) for piece in pieces] == [10] * (size // 10) + [size % 10] * (size % 10 > 0)
        with pytest.raises(FileNotFoundError):
            next(store.read_pieces("absent"))

    def test_sweep_deletes_only_temporary_files(self, store: Store) -> None:
        store.write_json("dir/kept.json", {})
        for _ in range(2):
            file = store.open_write("dir/data.bin")
            file.write(b"abc")
            file.sink.close()  # as if the process had died
        swept = store.sweep("dir")
        assert len(set(swept)) == 2
        assert all(name.startswith("data.bin.") and name.endswith(".tmp") for name in swept)
        assert store.list("dir") == ["kept.json"]
        assert store.sweep("absent") == []

    def test_delete_ignores_what_is_absent(self, store: Store) -> None:
        store.write_json("dir/sub/a.json", {})
        store.delete("absent")
        store.delete("absent", recursive=True)
        store.delete("dir", recursive=True)
        assert not store.exists("dir")
        assert store.list("dir") == []

    def test_delete_all_empties_this_store_only(self, url: str) -> None:
        one, other = Store(f"{url}/a"), Store(f"{url}/b")
        for store in (one, other):
            store.write_json("x/y.json", {})
            store.write_json("z.json", {})
        one.delete_all()
        assert one.list("") == []
        assert other.list("") == ["x", "z.json"]
        other.delete_all()

    @pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../../x"])
    def test_paths_stay_inside(self, store: Store, path: str) -> None:
        with pytest.raises(UsageError, match="leaves the store"):
            store.delete(path)

    # ---------------------------------------------------------------------------- logs and checkpoints

    def test_logged_messages_are_replayed(self, store: Store) -> None:
        tensors = [torch.full((1000, i + 1), float(i), dtype=torch.bfloat16) for i in range(6)]
        writer = _writer(store, segment_bytes=8000)
        for i, tensor in enumerate(tensors):
            writer.append_message(_key(i), tensor)
        writer.close(_DEADLINE_S)
        assert len(store.list(_LOG)) > 1
        reader = _reader(store)
        for i, tensor in enumerate(tensors):
            buffer = torch.empty_like(tensor)
            reader.read_into(_key(i), buffer)
            assert torch.equal(buffer, tensor)

    def test_a_log_is_dropped_before_a_checkpoint_and_continues(self, store: Store) -> None:
        """Paper §5.1: a log is deleted once a checkpoint covers it, never before."""
        writer = _writer(store)
        for i in range(4):
            writer.append_message(_key(i), torch.zeros(10))
            writer.roll()
        writer.flush(_DEADLINE_S)
        assert len(writer.drop_before(2)) == 2
        writer.append_message(_key(4), torch.zeros(10))
        writer.close(_DEADLINE_S)
        reader = _reader(store)
        assert [i for i in range(5) if reader.has(_key(i))] == [2, 3, 4]

    def test_a_torn_segment_is_detected(self, store: Store) -> None:
        writer = _writer(store)
        writer.append_message(_key(0), torch.zeros(1000))
        writer.close(_DEADLINE_S)
        (name,) = store.list(_LOG)
        whole = store.open_read(f"{_LOG}/{name}").read()
        with store.open_write(f"{_LOG}/{name}") as file:
            file.write(whole[: len(whole) // 2])
        with pytest.raises(LogTornError, match=name):
            _reader(store).read(_key(0))

    @pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
    def test_a_checkpoint_is_saved_and_loaded(self, store: Store) -> None:
        place = "checkpoints/00000001/rank-00000.g00001"
        saved = {"weight": torch.randn(100, 100), "bias": torch.arange(5)}
        write_part(store, place, saved)
        loaded = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
        PartReader(store, place).fill(loaded)
        assert all(torch.equal(loaded[name], saved[name]) for name in saved)


def _key(iteration: int) -> MessageKey:
    return MessageKey(iteration, 0, Direction.FORWARD, 0, 1, 0)


def _writer(store: Store, segment_bytes: int = 64 << 20) -> LogWriter:
    return LogWriter(store, _LOG, SegmentIdentity("run", 0, 1), LogOptions(segment_bytes=segment_bytes))


def _reader(store: Store) -> LogReader:
    reader = LogReader(store, [_LOG], run_id="run")
    reader.refresh()
    return reader
