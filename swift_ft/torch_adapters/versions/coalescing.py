"""Batches of messages on groups that are written in Python.

Before torch 2.14, ``batch_isend_irecv`` gives a batch to the backend as a whole only on torch's own class of
groups. On another one it begins message by message. gloo does not mind. NCCL does: two members that both
send first, each on the stream of their pair, wait for each other for ever. That is every steady state of
1F1B. So a batch on such a group is coalesced, too, where the backend can do that. torch 2.14 does so itself.

Private parts used (tested on torch 2.11 to 2.14): ``distributed_c10d._coalescing_manager``,
``ProcessGroup._get_backend``; ``dist.batch_isend_irecv`` is replaced.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch.distributed as dist

_c10d: Any = dist.distributed_c10d

COALESCES_ITSELF = "isinstance" in inspect.unwrap(dist.batch_isend_irecv).__code__.co_names
"""True where torch accepts a subclass of its groups (2.14). Before, it asks for the exact type."""


@functools.cache
def coalesce_on_all_groups() -> None:
    """From now on, a batch is given to any group as a whole if its backend takes that."""
    if COALESCES_ITSELF:
        return
    original = dist.batch_isend_irecv

    @functools.wraps(original)
    def batch_isend_irecv(p2p_op_list: list[dist.P2POp]) -> list[dist.Work]:
        if not p2p_op_list or not isinstance(p2p_op_list[0], dist.P2POp):
            return original(p2p_op_list)  # which says what is wrong with it
        group: Any = p2p_op_list[0].group or dist.group.WORLD
        device = p2p_op_list[0].tensor.device
        if type(group) is dist.ProcessGroup or not group._get_backend(device).supports_coalescing:
            return original(p2p_op_list)
        with _c10d._coalescing_manager(group, device, async_ops=True) as manager:
            for operation in p2p_op_list:
                peer = "group_dst" if operation.op is dist.isend else "group_src"
                operation.op(operation.tensor, group=group, tag=operation.tag, **{peer: operation.group_peer})
        return list(manager.works)

    public: Any = dist
    public.batch_isend_irecv = _c10d.batch_isend_irecv = batch_isend_irecv
