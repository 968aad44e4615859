"""Hooks that a script sets on a group: the group that takes its place gets them, too. Since torch 2.14."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

WHEN = tuple(when for when in ("pre", "post", "abort") if hasattr(dist.ProcessGroup, f"register_{when}_hook"))
"""The kinds of hooks that the installed torch has: before a collective, after it, before an abort."""


class GroupHooks:
    """Those of one group of the script, in all generations."""

    def __init__(self) -> None:
        self._set: dict[tuple[str, int], Callable[..., None]] = {}

    def register(self, group: Any, when: str, hook_id: int, hook: Callable[..., None]) -> None:
        """Set one on a group of torch, and on all that follow it.

        Args:
            when: one of :data:`WHEN`.
            hook_id: the script's name of it.
            hook: as torch calls it.

        Raises:
            RuntimeError: as torch does, if the backend has no such hooks.
        """
        getattr(group, f"register_{when}_hook")(hook_id, hook)
        self._set[when, hook_id] = hook

    def unregister(self, group: Any, when: str, hook_id: int) -> None:
        """Take one away."""
        getattr(group, f"unregister_{when}_hook")(hook_id)
        self._set.pop((when, hook_id), None)

    def give(self, group: Any) -> None:
        """Set all on a group of torch that takes the place of another."""
        for (when, hook_id), hook in self._set.items():
            getattr(group, f"register_{when}_hook")(hook_id, hook)
