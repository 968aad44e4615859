"""Nothing changes in a store that is opened to be read."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path

import pytest

from swift_ft.errors import StoreNotWritableError, SwiftError
from swift_ft.storage.read_only import ReadOnlyStore, read_all
from swift_ft.storage.store import Store

WRITES: dict[str, Callable[[Store, Path], object]] = {
    "probe": lambda store, _: store.probe(),
    "delete": lambda store, _: store.delete("a.json"),
    "delete_all": lambda store, _: store.delete_all(),
    "sweep": lambda store, _: store.sweep(""),
    "abort_uploads": lambda store, _: store.abort_uploads(""),
    "write_json": lambda store, _: store.write_json("a.json", {}),
    "open_write": lambda store, _: store.open_write("b"),
    "upload": lambda store, path: store.upload(path, "b"),
}
READS = {"anchor", "at_once", "check_anchor", "child_url", "exists", "list", "local_path", "may_pass"}
READS |= {"abandoned_uploads", "find", "has_secret_url", "read_pieces", "temporary_files"}
READS |= {"files", "open_read", "patience_s", "read_json", "redacted", "remote", "root", "size", "url"}


@pytest.mark.parametrize("write", WRITES)
def test_no_write(write: str, tmp_path: Path) -> None:
    Store(tmp_path).write_json("a.json", {"a": 1})
    store = ReadOnlyStore(tmp_path)
    with pytest.raises(StoreNotWritableError, match="read only"):
        WRITES[write](store, tmp_path / "a.json")
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    assert store.read_json("a.json") == {"a": 1}


def test_each_method_is_one_or_the_other() -> None:
    """A new one of the store's has to say which."""
    public = {name for name, _ in inspect.getmembers(Store) if not name.startswith("_")}
    assert public == READS | WRITES.keys()


def _half(number: int) -> int:
    if number % 2:
        raise SwiftError(f"{number} is odd\nin all its parts")
    return number // 2


def test_damaged_files_are_named_and_the_others_read() -> None:
    counts: list[int] = []
    assert read_all(_half, [2, 3, 8, 5], counts.append) == ([1, 4], ["3 is odd", "5 is odd"])
    assert counts == [1, 1, 1, 1]


def test_what_the_stores_client_raises_is_no_damage() -> None:
    with pytest.raises(ZeroDivisionError):
        read_all(lambda number: 1 // number, [1, 0])
