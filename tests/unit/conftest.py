from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from swift_ft.storage.store import Store

# How long an example takes says how busy the machine is, and not whether it is right.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty store, on disk and in memory."""
    return f"file://{tmp_path}/store" if request.param == "file" else f"memory://{uuid.uuid4().hex}"


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    """An empty store, on disk and in memory."""
    store = Store(url)
    yield store
    store.delete_all()


@pytest.fixture
def one_process() -> Iterator[None]:
    """A group of torch that this process is in alone."""
    import torch.distributed as dist  # takes seconds, and few tests need it

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def local(tmp_path: Path) -> Store:
    """An empty store on disk."""
    return Store(str(tmp_path / "store"))
