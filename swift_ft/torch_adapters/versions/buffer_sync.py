"""The name under which a DDP model says whether it keeps its replicas' buffers equal.

torch 2.13 calls the argument and the attribute ``forward_sync_buffers``, and warns of the older name.
"""

from __future__ import annotations

import inspect

from torch.nn.parallel import DistributedDataParallel

BUFFER_SYNC = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel).parameters
)
"""Of the constructor's argument, as of the attribute."""


def keeps_buffers_equal(model: DistributedDataParallel) -> bool:
    """Whether a model copies the first replica's buffers to all others."""
    return bool(getattr(model, BUFFER_SYNC))
