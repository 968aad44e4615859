"""Conformance: the private parts of DCP that `torch_adapters/dcp/` uses, on a real checkpoint."""

from __future__ import annotations

import io
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import s3fs
import torch
from torch.distributed.checkpoint._traverse import set_element

from swift_ft.storage.store import Store
from swift_ft.torch_adapters.dcp.reader import _KNOWN, PartReader
from swift_ft.torch_adapters.dcp.writer import _Writer, staged, write_part

PART = "checkpoints/00000010/rank-00000.g00001"


def state() -> dict[str, Any]:
    return {
        "models": {"model": {"weight": torch.arange(6.0).reshape(2, 3), "half": torch.ones(2).bfloat16()}},
        "plain": {"bytes": io.BytesIO(b"some bytes")},
    }


def test_a_part_is_written_described_and_read(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    write_part(store, PART, staged(state()))
    reader = PartReader(store, PART)
    metadata = reader.read_metadata()
    assert metadata.planner_data is not None
    assert set(metadata.planner_data.values()) == {
        ("models", "model", "weight"),
        ("models", "model", "half"),
        ("plain", "bytes"),
    }
    found = state()
    found["models"]["model"]["weight"].zero_()
    found["plain"]["bytes"] = io.BytesIO()
    reader.fill(found)
    assert torch.equal(found["models"]["model"]["weight"], state()["models"]["model"]["weight"])
    assert found["plain"]["bytes"].getvalue() == b"some bytes"


def test_all_threads_write_and_read_by_the_client_of_the_store(tmp_path: Path) -> None:
    """Another thread would get another one from fsspec, and that one no new credentials."""
    store = Store(f"s3://bucket/{tmp_path.name}")

    def clients() -> list[Any]:
        writer, read = _Writer(store, PART, None, None), PartReader(store, PART)
        return [files.fs for files in (writer.fs, read.fs, PartReader(store, PART, {}).fs)]  # type: ignore[attr-defined]

    before = len(s3fs.S3FileSystem._cache)
    with ThreadPoolExecutor(1) as another:
        found = another.submit(clients).result()
    assert [client is store.files.fs for client in found] == [True] * 3
    assert len(s3fs.S3FileSystem._cache) == before


def test_metadata_names_known_classes_only(tmp_path: Path) -> None:
    """A class that torch adds here must be added to ``_KNOWN``, or no checkpoint can be read."""
    store = Store(str(tmp_path))
    write_part(store, PART, staged(state()))
    named: set[tuple[str, str]] = set()

    class Noting(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            found = super().find_class(module, name)
            if not isinstance(found, torch.dtype):
                named.add((module, name))
            return found

    with (tmp_path / PART / ".metadata").open("rb") as file:
        Noting(file).load()
    assert named <= _KNOWN
    assert ("torch.distributed.checkpoint.metadata", "Metadata") in named


def test_an_element_is_set_in_a_nested_state() -> None:
    nested: dict[str, Any] = {"a": {"b": 1}}
    set_element(nested, ("a", "b"), 2)
    assert nested == {"a": {"b": 2}}


def test_a_copy_does_not_follow_the_state() -> None:
    live = state()
    copy = staged(live)
    live["models"]["model"]["weight"].zero_()
    assert torch.equal(copy["models"]["model"]["weight"], state()["models"]["model"]["weight"])
