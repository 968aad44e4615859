"""A backend for tests that behaves on CPUs as NCCL does on GPUs.

    from swift_ft.testing import nccl_like

    nccl_like.register()
    torch.distributed.init_process_group(nccl_like.NAME)

What that is, is a list of statements with a test each: `docs/nccl-internals.md`.

With ``register(runs_ahead=True)`` a script and its session run as if waits held a stream and not the thread:
no one looks at a wait for an abort, and the script computes on with what that has left.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from swift_ft.testing.nccl_like.communicator import NcclLikeWork
from swift_ft.testing.nccl_like.group import NAME, NcclLikeGroup
from swift_ft.torch_adapters import lasting_group
from swift_ft.torch_adapters.versions.coalescing import coalesce_on_all_groups

__all__ = ["NAME", "NcclLikeGroup", "register"]


def register(*, runs_ahead: bool = False) -> None:
    """Let torch make such groups, by the name ``nccl_like``.

    Args:
        runs_ahead: as with GPUs, an abort is found only where the host waits for its device, and it leaves
            garbage in what was to be received. DDP's averages of gradients fail at once all the same.
    """
    coalesce_on_all_groups()
    if runs_ahead:
        NcclLikeWork.leaves_garbage = True
        seam: Any = lasting_group
        seam.holds_thread = lambda _: False
    if NAME.upper() not in dist.Backend.backend_list and NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, NcclLikeGroup, devices=["cpu"])
