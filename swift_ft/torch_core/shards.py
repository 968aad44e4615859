"""A worker's shard of a distributed tensor (``DTensor``), as a plain tensor with a description.

State is saved, sent and compared as what this worker has. So nothing here communicates, and nothing that
stores or sends tensors has to know of meshes. The description says of what the tensor is a part:

    whole shape, offset of this shard in it, placements such as ``R`` (replicated), ``S0``, ``S0/2`` (strided)

Private parts used (tested on torch 2.11 to 2.14):

- ``DTensor._local_tensor``: the shard itself. The public method makes a view for autograd.
- ``DTensor(local, spec)`` and ``_dtensor_spec.DTensorSpec``, ``TensorMeta``: the public constructor moves a
  shard to the mesh's device, also one that FSDP keeps on the host.
- ``placement_types._StridedShard``: how FSDP shards what tensor parallelism has sharded before.
- ``_utils.compute_local_shape_and_global_offset``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor import _dtensor_spec as _specs
from torch.distributed.tensor import _utils as _layout
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from swift_ft.errors import UnsupportedError

Description = dict[str, Any]
"""``shape`` of the whole tensor, ``offset`` of the worker's part, ``placements`` by mesh dimension.

``scattered`` is there, and true, unless the part has one range of each dimension. Plain values, so that
all of it can be stored.
"""


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The worker's own part of a tensor: the tensor itself, or the plain tensor within a ``DTensor``."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def laid_out_as(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A tensor with the placements of another one, where that takes no communication; else as it is.

    The gradient of a sharded parameter may be whole on all workers, as tensor parallelism leaves some.
    """
    if isinstance(tensor, DTensor) and isinstance(like, DTensor) and tensor.placements != like.placements:
        pairs = zip(tensor.placements, like.placements, strict=True)
        if all(one == other or (one.is_replicate() and other.is_shard()) for one, other in pairs):
            return tensor.redistribute(like.device_mesh, like.placements)
    return tensor


def note_changed(tensor: torch.Tensor) -> None:
    """The values of :func:`local` were written to: count that as a change of the tensor."""
    if isinstance(tensor, DTensor):
        increment_version(tensor)


def describe(tensor: torch.Tensor) -> Description | None:
    """Of what a tensor's local values are a part; None if it is no ``DTensor``.

    Raises:
        UnsupportedError: its values are sums that were not added up yet, so no worker has a part of it.
    """
    if not isinstance(tensor, DTensor):
        return None
    shape, offset = _layout.compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    assert tuple(shape) == tuple(local(tensor).shape)
    description: Description = {
        "shape": list(tensor.shape),
        "offset": list(offset),
        "placements": [_name_of(placement) for placement in tensor.placements],
    }
    return description if _is_range(tensor) else {**description, "scattered": True}


def _is_range(tensor: DTensor) -> bool:
    """Whether the worker's part is one range of each dimension.

    It is one of a strided dimension, too, if all mesh dimensions behind have sharded that one first:
    so FSDP shards what other parallelism has sharded.
    """
    placements = tensor.placements
    for number, placement in enumerate(placements):
        if not isinstance(placement, _StridedShard):
            continue
        before = (
            tensor.device_mesh.size(later)
            for later in range(number + 1, len(placements))
            if isinstance(other := placements[later], Shard | _StridedShard) and other.dim == placement.dim
        )
        if math.prod(before) != placement.split_factor:
            return False
    return True


def rebuilt(values: torch.Tensor, description: Description, like: torch.Tensor) -> torch.Tensor:
    """A ``DTensor`` on the mesh and the device of another one. The inverse of :func:`local`.

    Args:
        values: this worker's part.
        like: a parameter, say; its local values say on which device these belong.

    Raises:
        UnsupportedError: the other tensor has no mesh, or one of another number of dimensions.
    """
    placements = [_placement(name) for name in description["placements"]]
    if not isinstance(like, DTensor) or like.device_mesh.ndim != len(placements):
        raise UnsupportedError(
            "A part of the state was sharded when it was saved, and what it belongs to is not, or over "
            "another mesh: start with the same parallelism, or choose another store."
        )
    shape = torch.Size(description["shape"])
    meta = _specs.TensorMeta(shape, _strides(shape), values.dtype)
    spec = _specs.DTensorSpec(like.device_mesh, tuple(placements), tensor_meta=meta)
    make: Any = DTensor
    made: torch.Tensor = make(values.detach().to(local(like).device), spec, requires_grad=False)
    return made


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _name_of(placement: Placement) -> str:
    if isinstance(placement, Replicate):
        return "R"
    if isinstance(placement, _StridedShard):
        return f"S{placement.dim}/{placement.split_factor}"
    if isinstance(placement, Shard):
        return f"S{placement.dim}"
    assert isinstance(placement, Partial)
    raise UnsupportedError(
        "A tensor of the state holds sums that were not added up over its mesh (Partial): redistribute it."
    )


def _placement(name: str) -> Placement:
    if name == "R":
        return Replicate()
    dim, _, factor = name[1:].partition("/")
    return _StridedShard(int(dim), split_factor=int(factor)) if factor else Shard(int(dim))
