"""Stand-ins for communication whose results are there already: in a replay, from a log."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


class NoBackend:
    """Of a group that has ended. Messages of a batch begin one by one: each is served, or fails.

    Args:
        group: it has nothing beneath, and says so when it is asked for it.
    """

    supports_coalescing = False

    def __init__(self, group: Any) -> None:
        self._group = group

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group.native, name)


class ServedWork(dist.Work):
    """An operation whose tensors were filled without communication."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._tensors = list(tensors)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """Always."""
        return True

    def is_success(self) -> bool:
        """Always."""
        return True

    def result(self) -> list[torch.Tensor]:
        """The tensors."""
        return self._tensors

    def get_future(self) -> torch.futures.Future[Any]:
        """A completed one."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._tensors)
        return future
