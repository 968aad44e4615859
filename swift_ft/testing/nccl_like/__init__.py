"""A backend for tests that behaves on CPUs as NCCL does on GPUs.

    from swift_ft.testing import nccl_like

    nccl_like.register()
    torch.distributed.init_process_group(nccl_like.NAME)

What that is, is a list of statements with a test each: `docs/nccl-internals.md`.
"""

from __future__ import annotations

import torch.distributed as dist

from swift_ft.testing.nccl_like.group import NAME, NcclLikeGroup
from swift_ft.torch_adapters.versions.coalescing import coalesce_on_all_groups

__all__ = ["NAME", "NcclLikeGroup", "register"]


def register() -> None:
    """Let torch make such groups, by the name ``nccl_like``."""
    coalesce_on_all_groups()
    if NAME.upper() not in dist.Backend.backend_list and NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, NcclLikeGroup, devices=["cpu"])
