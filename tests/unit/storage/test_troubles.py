"""Calls of a store fail as a fault says, for a time or a number of calls, and then no more."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pytest
import torch

from swift_ft.faults import parse_faults
from swift_ft.storage.store import Store
from swift_ft.storage.troubles import Troubles
from swift_ft.torch_adapters.dcp.writer import write_part

PATIENT_S = 10.0


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store(tmp_path / "store", patience_s=0.0)
    made.write_json("old.json", {"a": 1})
    return made


@pytest.fixture
def troubles(store: Store) -> Iterator[Troubles]:
    made = Troubles(store)
    yield made
    made.remove()


def begin(troubles: Troubles, text: str) -> None:
    (fault,) = parse_faults(f"{text} worker=0 iteration=1")
    troubles.begin(fault)


def fails(number: int, action: object) -> None:
    assert callable(action)
    with pytest.raises(OSError, match="injected") as caught:
        action()
    assert caught.value.errno == number


def write(store: Store) -> None:
    with store.open_write("log/segment") as file:
        file.write(b"x" * 100_000)


def other_library(store: Store, mode: str) -> None:
    with fsspec.open(store.child_url("old.json" if mode == "rb" else "part"), mode) as file:
        if mode == "rb":
            file.read()
        else:
            file.write(b"data")


@pytest.mark.parametrize(
    ("action", "number", "writes", "reads", "deletes"),
    [
        ("unwritable", errno.EIO, True, False, True),
        ("unreadable", errno.EIO, False, True, False),
        ("busy", errno.EBUSY, True, True, True),
        ("denied", errno.EACCES, True, True, True),
        ("torn", errno.EIO, True, True, False),
        ("full", errno.ENOSPC, True, False, False),
        ("read-only", errno.EROFS, True, False, True),
    ],
)
def test_each_kind_fails_what_it_says(
    store: Store, troubles: Troubles, action: str, number: int, writes: bool, reads: bool, deletes: bool
) -> None:
    begin(troubles, action)
    for call, failing in (
        (lambda: store.write_json("new.json", {}), writes),
        (lambda: write(store), writes),
        (lambda: other_library(store, "wb"), writes),
        (lambda: store.read_json("old.json"), reads),
        (lambda: store.open_read("old.json"), reads),
        (lambda: other_library(store, "rb"), reads),
        (lambda: store.delete("old.json"), deletes),
    ):
        if failing:
            fails(number, call)
        else:
            call()
    troubles.remove()
    assert deletes or not store.temporary_files("")


@pytest.mark.parametrize("url", ["{folder}/there", "memory://{folder}/there"])
def test_a_write_that_is_under_way_fails(tmp_path: Path, url: str) -> None:
    """Also to a store behind a network."""
    store = Store(url.format(folder=tmp_path), patience_s=0.0)
    troubles = Troubles(store)
    file = store.open_write("segment")
    file.write(b"x" * 100_000)
    begin(troubles, "full")
    fails(errno.ENOSPC, lambda: [file.write(b"x" * 100_000) for _ in range(3)])
    troubles.remove()
    file.abort()


def test_what_is_written_to_a_store_behind_a_network_gets_there(tmp_path: Path) -> None:
    store = Store(f"memory://{tmp_path}", patience_s=0.0)
    troubles = Troubles(store)
    write(store)
    troubles.remove()
    with store.open_read("log/segment") as file:
        assert file.read() == b"x" * 100_000


@pytest.mark.parametrize(
    ("action", "number"), [("full", errno.ENOSPC), ("denied", errno.EACCES), ("unwritable", errno.EIO)]
)
def test_a_part_of_a_checkpoint_that_another_thread_writes_fails(
    store: Store, troubles: Troubles, action: str, number: int
) -> None:
    def write_one() -> None:
        with ThreadPoolExecutor(1) as another:
            another.submit(write_part, store, "part", {"w": torch.arange(3)}).result()

    write_one()
    begin(troubles, f"{action} calls=1")
    fails(number, write_one)
    write_one()


def test_half_of_it_gets_there(store: Store, troubles: Troubles, tmp_path: Path) -> None:
    """Under the name that is to be: nobody else sees it."""
    begin(troubles, "torn")
    fails(errno.EIO, lambda: store.files.put(f"{store.root}/a.tmp", f"{store.root}/a", b"12345678"))
    assert (tmp_path / "store" / "a.tmp").read_bytes() == b"1234"
    assert not (tmp_path / "store" / "a").exists()


def test_what_is_there_is_not_found(store: Store, troubles: Troubles) -> None:
    begin(troubles, "missing")
    assert not store.exists("old.json")
    assert store.read_json("old.json") is None
    assert store.list("") == []


def test_a_store_with_an_anchor_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    store = Store(tmp_path, patience_s=PATIENT_S)
    store.write_json("run.json", {})
    store.write_json("log/a", {"a": 1})
    store.anchor("run.json")
    troubles = Troubles(store)
    begin(troubles, "missing seconds=0.3")
    assert store.read_json("log/a") == {"a": 1}
    assert store.list("log") == ["a"]
    troubles.remove()


@pytest.mark.parametrize("action", ["busy", "unwritable", "denied", "full", "read-only", "torn"])
def test_it_is_over_after_its_calls(tmp_path: Path, action: str) -> None:
    """A store with patience makes no more of it than a wait."""
    store = Store(tmp_path / "store", patience_s=PATIENT_S)
    troubles = Troubles(store)
    begin(troubles, f"{action} calls=2")
    store.write_json("a.json", {"a": 1})
    assert store.read_json("a.json") == {"a": 1}
    troubles.remove()


def test_a_call_takes_longer(store: Store, troubles: Troubles) -> None:
    begin(troubles, "lag each=0.2 calls=1")
    began = time.monotonic()
    store.read_json("old.json")
    assert time.monotonic() - began >= 0.2


def test_another_store_of_the_same_filesystem_is_not_touched(
    store: Store, troubles: Troubles, tmp_path: Path
) -> None:
    begin(troubles, "denied")
    Store(tmp_path / "other").write_json("a.json", {})
    with fsspec.open(f"file://{tmp_path}/b", "wb") as file:
        file.write(b"data")
