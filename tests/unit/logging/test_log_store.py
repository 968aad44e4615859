from __future__ import annotations

import threading
from pathlib import Path

import fsspec
import pytest
from fsspec.registry import known_implementations

from swift_ft.errors import StoreNotWritableError, SwiftError, UsageError
from swift_ft.logging import Store


def test_probe_leaves_nothing(store: Store) -> None:
    store.probe()
    assert store.list("") == []


def test_a_store_below_a_file_is_not_writable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreNotWritableError, match=r"cannot be written .*choose a directory"):
        Store(str(tmp_path / "file" / "store")).probe()


def test_an_unknown_scheme_says_so() -> None:
    with pytest.raises(StoreNotWritableError, match=r"nosuch.*choose a plain path"):
        Store("nosuch://a/b").probe()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = {"class": "no_such_package.Fs", "err": "Install no_such_package"}
    monkeypatch.setitem(known_implementations, "missing", entry)
    with pytest.raises(StoreNotWritableError, match=r"no_such_package.*install that package"):
        Store("missing://a/b").probe()


def test_credentials_are_used_but_not_shown() -> None:
    store = Store("memory://user:se@cret@host/run")
    assert store.url == "memory://host/run"
    assert "cret" not in repr(store)
    assert store.child_url("a/b") == "memory://user:se@cret@host/run/a/b"


def test_child_url_opens_the_same_file(store: Store) -> None:
    store.write_json("a/b.json", {"x": 1})
    with fsspec.open(store.child_url("a/b.json")) as file:
        assert b'"x": 1' in file.read()


def test_a_plain_path_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = Store("runs/a")
    monkeypatch.chdir("/")
    assert store.url == f"file://{tmp_path}/runs/a"
    store.write_json("x.json", {})
    assert (tmp_path / "runs/a/x.json").exists()


def test_json_round_trip_and_replacement(store: Store) -> None:
    assert store.read_json("a/b.json") is None
    store.write_json("a/b.json", {"step": 1})
    store.write_json("a/b.json", {"step": 2, "name": "ü"})
    assert store.read_json("a/b.json") == {"step": 2, "name": "ü"}
    assert store.list("a") == ["b.json"]


@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff"])
def test_what_is_no_json_object_is_an_error_of_ours(store: Store, content: bytes) -> None:
    with store.open_write("x.json") as file:
        file.write(content)
    with pytest.raises(SwiftError, match=r"x\.json"):
        store.read_json("x.json")


def test_create_json_succeeds_once(store: Store) -> None:
    assert store.create_json("claim.json", {"by": 1})
    assert not store.create_json("claim.json", {"by": 2})
    assert store.read_json("claim.json") == {"by": 1}
    assert store.list("") == ["claim.json"]


def test_create_json_has_one_winner_among_threads(local: Store) -> None:
    start = threading.Barrier(8)
    won: list[int] = []

    def claim(me: int) -> None:
        start.wait()
        if local.create_json("claim.json", {"by": me}):
            won.append(me)

    threads = [threading.Thread(target=claim, args=(me,)) for me in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [local.read_json("claim.json")] == [{"by": me} for me in won]


def test_create_json_without_hard_links(local: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, target: str) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    assert local.create_json("claim.json", {"by": 1})
    assert not local.create_json("claim.json", {"by": 2})
    assert local.list("") == ["claim.json"]


def test_a_file_does_not_exist_before_its_commit(store: Store) -> None:
    file = store.open_write("dir/data.bin")
    file.write(b"abc")
    assert not store.exists("dir/data.bin")
    assert file.tell() == 3
    assert file.commit() == "dir/data.bin"
    assert store.size("dir/data.bin") == 3
    assert store.list("dir") == ["data.bin"]
    assert store.open_read("dir/data.bin").read() == b"abc"


def test_a_name_may_be_given_at_commit(store: Store) -> None:
    file = store.open_write("dir/unnamed")
    file.write(b"abc")
    file.commit("dir/named")
    assert store.list("dir") == ["named"]


def test_abort_leaves_nothing(store: Store) -> None:
    file = store.open_write("dir/data.bin")
    file.write(b"abc")
    file.abort()
    assert store.list("dir") == []


def test_an_exception_in_the_block_aborts(store: Store) -> None:
    def fail() -> None:
        with store.open_write("dir/data.bin") as file:
            file.write(b"abc")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert store.list("dir") == []


def test_sweep_takes_only_temporary_files(store: Store) -> None:
    store.write_json("dir/kept.json", {})
    for _ in range(2):
        file = store.open_write("dir/data.bin")
        file.write(b"abc")
        file.flush()
        file.sink.close()  # as if the process had died
    swept = store.sweep("dir")
    assert len(set(swept)) == 2
    assert all(name.startswith("data.bin.") and name.endswith(".tmp") for name in swept)
    assert store.list("dir") == ["kept.json"]
    assert store.sweep("absent") == []


def test_delete_minds_nothing_that_is_absent(store: Store) -> None:
    store.write_json("dir/sub/a.json", {})
    store.delete("absent")
    store.delete("absent", recursive=True)
    store.delete("dir", recursive=True)
    assert not store.exists("dir")
    assert store.list("dir") == []


def test_delete_all_empties_this_store_only(tmp_path: Path) -> None:
    one, other = Store(str(tmp_path / "a")), Store(str(tmp_path / "b"))
    for store in (one, other):
        store.write_json("x/y.json", {})
        store.write_json("z.json", {})
    one.delete_all()
    assert one.list("") == []
    assert other.list("") == ["x", "z.json"]


@pytest.mark.parametrize("url", ["/", "file:///", "memory://", "~"])
def test_a_whole_filesystem_is_not_emptied(url: str) -> None:
    with pytest.raises(UsageError, match="directory of its own"):
        Store(url).delete_all()


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../../x"])
def test_paths_stay_inside(store: Store, path: str) -> None:
    with pytest.raises(UsageError, match="leaves the store"):
        store.delete(path)


def test_an_absent_file_cannot_be_opened(store: Store) -> None:
    with pytest.raises(FileNotFoundError):
        store.open_read("absent")
