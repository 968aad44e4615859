"""A store of one's own has a class of its own for its files, by a call or from an installed package."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from swift_ft.config import extensions
from swift_ft.errors import UsageError
from swift_ft.extend import RemoteFiles, register_store
from swift_ft.storage import remote
from swift_ft.storage.store import Store
from swift_ft.testing import StoreConformanceTests


class ShelfFileSystem(MemoryFileSystem):  # type: ignore[misc]
    """Somewhere behind a network, as far as anybody can tell."""

    protocol = "shelf"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return MemoryFileSystem._strip_protocol(str(path).replace("shelf://", "memory://"))


class ShelfFiles(RemoteFiles):
    """Writes down what is put."""

    put_paths: ClassVar[list[str]] = []

    def put(self, temporary: str, path: str, data: bytes) -> None:
        self.put_paths.append(path)
        super().put(temporary, path, data)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test registers is gone after it."""
    monkeypatch.setattr(remote, "_registered", {})
    monkeypatch.setattr(ShelfFiles, "put_paths", [])
    extensions.load_once.cache_clear()
    fsspec.register_implementation("shelf", ShelfFileSystem, clobber=True)
    yield
    extensions.load_once.cache_clear()


class TestShelf(StoreConformanceTests):
    @pytest.fixture
    def url(self, registered: None, tmp_path: Path) -> str:
        register_store("shelf", ShelfFiles)
        return f"shelf://{tmp_path.name}"


def test_a_registered_class_has_the_files() -> None:
    store = Store("shelf://one")
    store.write_json("a", {"is": 1})
    assert not ShelfFiles.put_paths
    register_store("shelf", ShelfFiles)
    store = Store("shelf://one")
    store.write_json("b", {"is": 2})
    assert [path.rpartition("/")[2] for path in ShelfFiles.put_paths] == ["b"]
    assert store.read_json("a") == {"is": 1}


def test_a_package_brings_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("shelf", f"{__name__}:_bring", extensions.Extensions.STORES)
    monkeypatch.setattr(extensions, "entry_points", lambda *, group: [entry] if "stores" in group else [])
    Store("shelf://two").write_json("a", {"is": 1})
    assert ShelfFiles.put_paths


def _bring() -> None:
    register_store("shelf", ShelfFiles)


def test_a_package_that_cannot_be_loaded_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("shelf", "no_such_module:bring", extensions.Extensions.STORES)
    monkeypatch.setattr(extensions, "entry_points", lambda *, group: [entry])
    with pytest.raises(UsageError, match=r"for swift_ft.stores .*shelf = no_such_module:bring.*No module"):
        Store("shelf://three")


def test_what_is_no_class_of_files_is_refused() -> None:
    with pytest.raises(UsageError, match=r"takes a subclass of swift_ft\.extend\.Files"):
        register_store("shelf", dict)  # type: ignore[arg-type]
