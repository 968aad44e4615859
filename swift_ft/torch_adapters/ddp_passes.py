"""Forward and backward passes of DDP models: failures in them are noted, and an abort ends them soon.

Private parts used (tested on torch 2.11 to 2.14):

- ``_sync_buffers`` of a DDP model, in which its buffers travel, and ``_pre_forward``, in which its choice of
  buckets does. ``require_forward_param_sync``, which says whether they do.
- ``Variable._execution_engine.queue_callback``, as DDP's own end of a backward pass is queued: such a
  callback may queue another one.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from swift_ft.torch_adapters.comm_errors import is_broken_communication
from swift_ft.torch_adapters.lasting_group import beginning
from swift_ft.torch_adapters.step_failures import step_failures

_LEAST_APART = 6
_MOST_CALLS = 16
"""At most 16 parameters look whether their backward was aborted, and no more than every sixth one."""


@functools.cache
def note_failed_forwards() -> None:
    """Let all DDP models note what fails where they communicate themselves, past the script's groups.

    Their reducer sends the first replica's choice of buckets before the second forward, and so in C++.
    """
    ddp: Any = DistributedDataParallel
    ddp._sync_buffers = _noting_failures(ddp._sync_buffers, within=beginning)
    ddp._pre_forward = _noting_failures(ddp._pre_forward)


def _noting_failures(
    function: Callable[..., Any],
    within: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
) -> Callable[..., Any]:
    @functools.wraps(function)
    def noting(*args: Any, **kwargs: Any) -> Any:
        try:
            with within():
                return function(*args, **kwargs)
        except RuntimeError as error:
            step_failures.note(error, is_over=is_broken_communication(error))
            raise

    return noting


def end_when(aborted: threading.Event, model: torch.nn.Module) -> None:
    """Let a backward end soon after an abort: it would compute all gradients before it waits for any.

    A call from autograd takes some microseconds, so few parameters make one.
    """

    def look(_: torch.Tensor) -> None:
        if aborted.is_set():
            end_backward()

    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in parameters[:: max(_LEAST_APART, -(-len(parameters) // _MOST_CALLS))]:
        parameter.register_post_accumulate_grad_hook(look)


def end_backward() -> None:
    """Fail, as a broken connection does. `comm_errors` recognizes it by this function's name."""
    step_failures.broken(cause := "the group was aborted in a backward")
    raise RuntimeError(cause)


def after_backward(act: Callable[[], None]) -> None:
    """Within a backward pass: call a function when DDP has finished it. Not called if the pass fails.

    DDP queues its own callback after its last hook. So this one queues another one, which comes behind it.
    """
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(lambda: engine.queue_callback(act))


@contextlib.contextmanager
def trial_forward(module: torch.nn.Module) -> Iterator[None]:
    """Within the block, a forward pass of a DDP model leaves no trace in it.

    A pipeline learns shapes from one. DDP would expect a backward then, and average the first microbatch's
    gradients alone: with other roundings than in a repeated or resumed iteration, which needs no shapes.
    """
    if not isinstance(module, DistributedDataParallel):
        yield
        return
    sync_buffers = module.require_forward_param_sync
    with module.no_sync():
        yield
    module.require_forward_param_sync = sync_buffers
