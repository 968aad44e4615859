from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


@pytest.fixture
def as_worker() -> Iterator[Callable[..., None]]:
    """Be one of some workers, of three if nothing else is said, in this one process."""

    def be(rank: int, workers: int = 3) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", rank=rank, world_size=workers, store=FakeStore())

    yield be
    if dist.is_initialized():
        dist.destroy_process_group()
