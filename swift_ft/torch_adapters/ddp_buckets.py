"""The buckets in which DDP averages gradients: those that it will make, and others in their place.

With more than two replicas, the order of a sum depends on where in a bucket an element lies (decision 38).

Private parts used (tested on torch 2.11 to 2.14):

- ``bucket_bytes_cap``, ``bucket_bytes_cap_default``, ``bucket_bytes_cap_list`` of a DDP model.
- ``torch.distributed._DEFAULT_FIRST_BUCKET_BYTES``.
- ``torch.distributed._compute_bucket_assignment_by_size``, which DDP looks up there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from swift_ft.torch_adapters.ddp_construction import Averaged

_torch: Any = dist  # with the private names that DDP itself looks up there

Layout = list[list[int]]
"""Indices of the parameters in each bucket, in the order in which buckets are reduced."""


def predicted(model: DistributedDataParallel, choice: Averaged, gradients: Sequence[int]) -> Layout | None:
    """The buckets that DDP makes after the first backward; None if it keeps those that it began with.

    Args:
        model: its own.
        choice: the parameters that it averages.
        gradients: their indices, in the order in which backward passes gave their gradients.
    """
    ddp: Any = model
    parameters = choice.parameters
    order = [*gradients[-len(parameters) :]]  # of this backward: earlier ones averaged nothing
    if ddp.find_unused_parameters or {*order} != {*range(len(parameters))}:
        return None
    cap = ddp.bucket_bytes_cap
    first = _torch._DEFAULT_FIRST_BUCKET_BYTES if ddp.bucket_bytes_cap_default else cap
    limits = ddp.bucket_bytes_cap_list or [first, cap]
    ordered = [parameters[index] for index in order]
    layout: Layout
    layout, _ = _torch._compute_bucket_assignment_by_size(ordered, limits, choice.sparse, order)
    return layout


@contextlib.contextmanager
def assigned(layout: Layout | None) -> Iterator[None]:
    """Within the block, torch assigns parameters to these buckets instead of grouping them by size."""
    if layout is None:
        yield
        return
    original = _torch._compute_bucket_assignment_by_size
    reverse = layout[::-1]  # DDP reverses them: it expects the order of the forward pass
    limits = [2**62] * len(layout)
    _torch._compute_bucket_assignment_by_size = lambda *_, **__: (reverse, limits)
    try:
        yield
    finally:
        _torch._compute_bucket_assignment_by_size = original
