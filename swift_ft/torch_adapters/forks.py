"""Process groups in forked children, which never free them.

A group of gloo waits for its threads as it is freed. A child has none of them, and would wait for ever: a
loader's process that collects garbage, where a recovery or the script has dropped a group before the fork.
"""

from __future__ import annotations

import os
from weakref import WeakSet

import torch.distributed as dist

_groups: WeakSet[dist.ProcessGroup] = WeakSet()
_kept: list[dist.ProcessGroup] = []


def keep_in_children(group: dist.ProcessGroup) -> None:
    """Let no child that is forked from this process free a group, not even one that is garbage by then."""
    _groups.add(group)


os.register_at_fork(after_in_child=lambda: _kept.extend(_groups))
