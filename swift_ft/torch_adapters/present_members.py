"""Messages of a group in a replay of only some of its members, over a communicator of these.

NCCL sends a batch of messages over the communicator of the whole group, which waits for all members before it
carries anything. In a replay, some never come.

Private parts used (tested on torch 2.11 to 2.14): ``ProcessGroup._start_coalescing`` and ``_end_coalescing``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


class PresentMembers:
    """Stands for a group of torch, for messages and batches of them.

    Args:
        native: a group of torch of the members that are present.
        members: their ranks in the whole group, in the order of their ranks in ``native``.
    """

    def __init__(self, native: dist.ProcessGroup, members: Sequence[int]) -> None:
        self._native = native
        self._rank_of = {of_group: rank for rank, of_group in enumerate(members)}

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> dist.Work:
        """Send to a member of the whole group."""
        return self._native.send(tensors, self._rank_of[peer], tag)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> dist.Work:
        """Receive from a member of the whole group."""
        return self._native.recv(tensors, self._rank_of[peer], tag)

    def _start_coalescing(self, device: torch.device) -> None:
        self._native._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> Any:
        return self._native._end_coalescing(device)
