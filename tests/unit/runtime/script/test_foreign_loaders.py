"""Accelerate's prepared loaders are refused before the first step: a replacement would wait in them."""

from __future__ import annotations

import gc
import importlib
import sys
from types import ModuleType
from typing import Any

import pytest
from torch.utils.data import DataLoader

from swift_ft.errors import UnsupportedError
from swift_ft.runtime.script.unprotected import refuse_loaders_that_communicate


class DataLoaderShard(DataLoader[int]):
    """As in accelerate: it broadcasts the random state, unless there is none to broadcast."""

    def __init__(self, rng_types: list[str] | None) -> None:
        super().__init__([1, 2])  # type: ignore[arg-type]
        self.rng_types = rng_types


class DataLoaderDispatcher(DataLoader[int]):
    """As in accelerate: it broadcasts each batch."""

    def __init__(self) -> None:
        super().__init__([1, 2])  # type: ignore[arg-type]


@pytest.fixture
def accelerate(monkeypatch: pytest.MonkeyPatch) -> Any:
    gc.collect()
    module = ModuleType("accelerate.data_loader")
    vars(module).update(DataLoaderShard=DataLoaderShard, DataLoaderDispatcher=DataLoaderDispatcher)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def test_a_loader_that_broadcasts_batches(accelerate: Any) -> None:
    refuse_loaders_that_communicate()
    loader = accelerate.DataLoaderDispatcher()
    with pytest.raises(UnsupportedError, match=r"DataLoaderDispatcher communicates .* by step\.index"):
        refuse_loaders_that_communicate()
    del loader


def test_a_loader_that_broadcasts_the_random_state(accelerate: Any) -> None:
    loader = accelerate.DataLoaderShard(["generator"])
    with pytest.raises(UnsupportedError, match="DataLoaderShard communicates"):
        refuse_loaders_that_communicate()
    loader.rng_types = None
    refuse_loaders_that_communicate()


def test_the_names_are_accelerates() -> None:
    """Where it is installed."""
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    module = importlib.import_module("accelerate.data_loader")
    gc.collect()
    refuse_loaders_that_communicate()
    loader = module.prepare_data_loader(
        DataLoader([1, 2, 3, 4], shuffle=True),  # type: ignore[arg-type]
        num_processes=2,
        process_index=0,
        rng_types=["torch"],
        put_on_device=False,
    )
    with pytest.raises(UnsupportedError, match="DataLoaderShard communicates"):
        refuse_loaders_that_communicate()
    del loader
