"""Bringing a model of FSDP back to the beginning of an iteration that was interrupted.

torch does that since 2.13, by ``FSDPModule.reset_iter_state()``. For an older one it is done here.

Private parts used (tested on torch 2.11 to 2.14): of each state, ``_comm_ctx.post_forward_order``; of each
group, ``_post_forward_indices``.

Further ones (tested on torch 2.11 and 2.12): of the root's state, ``_comm_ctx``, ``_state_ctx``,
``_device_handle``; of each state, ``_modules_to_run_forward``, ``_training_state``; of each group,
``_all_gather_result``, ``_post_reduce_event``, ``_all_reduce_state``, ``_reshard_after_forward_event``,
``_partial_reduce_output``, ``_post_forward_indices``, ``_training_state``, ``_to_sharded``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from swift_ft.torch_adapters.versions.fsdp_groups import groups_of, take_reductions


def _by_torch(root: Any) -> None:
    root.reset_iter_state()


def _here(root: Any) -> None:
    state = root._get_fsdp_state()
    stream = state._device_handle.current_stream()

    def wait_for(event: Any) -> None:
        if event is not None:
            stream.wait_event(event)

    shared, iteration = state._comm_ctx, state._state_ctx
    gathered, shared.all_gather_state = shared.all_gather_state, None
    for under_way in (gathered, *take_reductions(shared)):
        wait_for(getattr(under_way, "event", None))
    shared.post_forward_order.clear()
    for one in iteration.all_states:
        one._modules_to_run_forward.clear()
        one._training_state = TrainingState.IDLE
        for group in groups_of(one):
            _reset_group(group, wait_for)
    iteration.iter_forward_root = None
    iteration.post_backward_final_callback_queued = False


def _reset_group(group: Any, wait_for: Callable[[Any], None]) -> None:
    wait_for(getattr(group._all_gather_result, "all_gather_event", None))
    wait_for(group._post_reduce_event)
    wait_for(getattr(group._all_reduce_state, "event", None))
    wait_for(group._reshard_after_forward_event)
    group._all_gather_result = group._post_reduce_event = group._all_reduce_state = None
    group._reshard_after_forward_event = group._partial_reduce_output = None
    group._post_forward_indices.clear()
    group._training_state = TrainingState.IDLE
    group._to_sharded()


def forget_forward_order(state: Any) -> None:
    """Forget the order of the forward passes so far.

    A validation has no backward pass, which would clear it. So it would decide what this worker gathers ahead
    in the next one, and a worker that was replaced, or reset, has another.

    Args:
        state: of any module that was sharded.
    """
    # Not there before the first forward pass.
    if (order := getattr(state._comm_ctx, "post_forward_order", None)) is not None:
        order.clear()
    for group in groups_of(state):
        group._post_forward_indices.clear()


reset_iteration: Callable[[Any], None] = _by_torch if hasattr(FSDPModule, "reset_iter_state") else _here
"""Given the module at the root: all its parameters are sharded, and nothing is under way. Gradients that were
being reduced are lost."""
