"""The parameter groups of a module that ``fully_shard`` was applied to, and the reductions under way.

Since torch 2.12 a module has any number of them, before one or none.

Private parts used (tested on torch 2.11 to 2.14): of FSDP's state, ``_fsdp_param_groups`` or
``_fsdp_param_group``; of what all states of a model share, ``reduce_scatter_states`` or
``reduce_scatter_state``.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState


def _all(state: Any) -> list[Any]:
    return [*state._fsdp_param_groups]


def _one(state: Any) -> list[Any]:
    group = state._fsdp_param_group
    return [] if group is None else [group]


def _take_all(shared: Any) -> list[Any]:
    found = [*shared.reduce_scatter_states]
    shared.reduce_scatter_states.clear()
    return found


def _take_one(shared: Any) -> list[Any]:
    found, shared.reduce_scatter_state = shared.reduce_scatter_state, None
    return [] if found is None else [found]


_SEVERAL = hasattr(FSDPState(), "_fsdp_param_groups")

groups_of = _all if _SEVERAL else _one
"""The groups of a module's state, in order."""

take_reductions = _take_all if _SEVERAL else _take_one
"""The reduce-scatters under way of a model's states, which forget them with this call."""
