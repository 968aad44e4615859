"""How the script of this process constructs its DDP models: a constructor communicates."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch.nn.parallel import DistributedDataParallel

__all__ = ["construct_within", "constructed", "join_without_sync"]

_constructed: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()


def join_without_sync() -> None:
    """In a process that replaces a lost worker: construct DDP without communication.

    A new DDP compares shapes and broadcasts parameters. Here the other workers are busy, and this worker
    receives its state from one of them anyway.
    """
    original = DistributedDataParallel.__init__

    @functools.wraps(original)
    def quiet(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **{**kwargs, "init_sync": False})

    DistributedDataParallel.__init__ = quiet  # type: ignore[method-assign]  # init_sync is torch's own switch


def constructed() -> int:
    """How many DDP models the script of this process has, since :func:`construct_within`."""
    return len(_constructed)


def construct_within(context: Callable[[], AbstractContextManager[object]]) -> None:
    """Construct every DDP model of this process within a context: a new DDP has communication of its own."""
    original = DistributedDataParallel.__init__

    @functools.wraps(original)
    def within(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        with context():
            original(self, *args, **kwargs)
        _constructed.add(self)

    DistributedDataParallel.__init__ = within  # type: ignore[method-assign]  # as above
