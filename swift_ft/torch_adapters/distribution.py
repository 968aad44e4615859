"""A worker's part of a tensor that is distributed over a mesh.

``parallelize_module`` and ``distribute_tensor`` let the first worker of a mesh send all others their parts.
In a process that replaces a lost worker, the others are busy. Its script made the same tensors, and training
continues with what the checkpoint or a replica has. So it takes its part of its own tensor, as torch does
where ``src_data_rank`` is None.

Private parts used (tested on torch 2.11 to 2.14):

- ``Shard._shard_tensor``, ``_StridedShard._shard_tensor``, ``Replicate._make_replicate_tensor``: all that
  distribute a tensor call them, with ``src_data_rank``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard

_replaced: list[tuple[type, str, Any]] = []


def distribute_within(context: Callable[[], AbstractContextManager[object]], *, alone: bool) -> None:
    """From now on, tensors are distributed within a context. Once per process.

    Args:
        context: in which their parts are sent.
        alone: nothing is sent: each worker takes its part of its own tensor.
    """

    def within(original: Any) -> Any:
        @functools.wraps(original)
        def distribute(own: Any, tensor: Any, mesh: Any, mesh_dim: int, src_data_rank: int | None = 0) -> Any:
            with context():
                return original(own, tensor, mesh, mesh_dim, None if alone else src_data_rank)

        return distribute

    for kind, name in ((Shard, "_shard_tensor"), (_StridedShard, "_shard_tensor")):
        original = vars(kind)[name]
        _replace(kind, name, original, within(original))
    original = vars(Replicate)["_make_replicate_tensor"]
    _replace(Replicate, "_make_replicate_tensor", original, classmethod(within(original.__func__)))


def communicate_again() -> None:
    """Training begins: tensors are distributed as torch does it."""
    while _replaced:
        kind, name, original = _replaced.pop()
        setattr(kind, name, original)


def _replace(kind: type, name: str, original: Any, other: Any) -> None:
    _replaced.append((kind, name, original))
    setattr(kind, name, other)
