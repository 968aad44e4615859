"""Tells exceptions of broken connections from the user's own.

Private parts used (tested on torch 2.11 to 2.14): the names of the functions in which torch communicates and
in which its engines run (``_batch_p2p``, ``_wait_batch_p2p``, ``_distributed_broadcast_coalesced``,
``_engine_run_backward``, ``_pre_forward``), and the file ``distributed_c10d.py``.
"""

from __future__ import annotations

import logging
import sys
import traceback
from pathlib import Path

import torch.distributed as dist

from swift_ft.errors import first_line
from swift_ft.torch_adapters import lasting_group, lasting_work
from swift_ft.torch_adapters.abortable_waits import ABORTED
from swift_ft.torch_adapters.step_failures import is_of_transport

_COLLECTIVES = (
    Path(dist.__file__).parent / "distributed_c10d.py",
    Path(lasting_group.__file__),
    Path(lasting_work.__file__),
)
_WAITS = frozenset(
    {
        *("_wait_batch_p2p", "_batch_p2p", "_distributed_broadcast_coalesced"),  # torch's
        # swift_ft.torch_adapters.abortable_waits
        *("wait_for_works", "call_or_abort", "_ended_or_lost", "raise_if_aborted"),
        "end_backward",  # swift_ft.torch_adapters.ddp_passes
    }
)
_BROKEN = (
    *("connect", "socket", "timed out", "timeout", "abort", "closed", "broken pipe"),
    *("gloo/rendezvous/", "monitoredbarrier", "processgroupucc", "uccutils"),
    "ended with its generation",  # of swift_ft.torch_adapters.lasting_group
)
"""In the text of an error of a collective, besides what transports say: no complaint of an argument has it.

Rather one too many: a repeated step that fails again says so, and a job that a peer's death ends is lost.
"""
_ENGINES = frozenset({"_engine_run_backward", "_pre_forward"})
"""The functions in which autograd and DDP enter C++, which raises errors of any origin."""


def is_broken_communication(error: BaseException, in_backward: str | None = None) -> bool:
    """Whether torch's communication raised an exception.

    torch raises plain ``RuntimeError`` for gloo's broken connections, so the type alone says nothing. What
    counts is where the root cause was raised: in a collective or point-to-point call of torch, or where a
    pipeline schedule waits for one. An exception from a model or a loss function never counts, whatever its
    text. Nor does one of a call in which no connection broke: of a wrong argument, which some operations
    find only when they are waited for.

    Args:
        error: what a step raised.
        in_backward: why the averaging of gradients failed, if it did. It fails inside torch's engine, whose
            traceback has no frame of communication.
    """
    root, seen = error, {id(error)}
    while root.__cause__ is not None and id(root.__cause__) not in seen:  # an error may be its own cause
        root = root.__cause__
        seen.add(id(root))
    if isinstance(root, dist.DistBackendError):  # NCCL's own
        return _broke(root)
    if not isinstance(root, RuntimeError) or root.__traceback__ is None:
        return False
    frame = traceback.extract_tb(root.__traceback__)[-1]
    if is_backward(frame.name):
        return in_backward is not None or is_of_transport(root)
    return frame.name in _WAITS or (is_communication(frame.filename, frame.name) and _broke(root))


def may_come_of_abort(error: BaseException) -> bool:
    """Whether an error may come of what a silent abort has left: then it says nothing about the script.

    Over NCCL nothing fails where the host reads a result: ``loss.item()`` gives any number, a size that was
    to be received is anything, and the script raises what it thinks of it. So does a comparison of ours. An
    exit counts if it says that something is wrong; one without a fault comes from elsewhere.

    Args:
        error: what was raised where operations had begun, and before the host knew that they were done.
    """
    if not in_doubt():
        return False
    return isinstance(error, Exception) or (isinstance(error, SystemExit) and bool(error.code))


def in_doubt() -> bool:
    """Whether a silent abort may have left anything in what this worker reads."""
    waits = lasting_work.LastingWork.waits
    return waits is not None and waits.in_doubt


def interruption_of(error: BaseException, in_backward: str | None = None) -> str | None:
    """Why what raised an exception was interrupted, in a line. None if it has failed by itself.

    Args:
        error: what was raised.
        in_backward: see :func:`is_broken_communication`.
    """
    if is_broken_communication(error, in_backward):
        return first_line(error)
    return ABORTED if may_come_of_abort(error) else None


def _broke(error: RuntimeError) -> bool:
    """Whether an error of a collective is one of its connections."""
    if is_of_transport(error) or lasting_work.is_over():
        return True
    unclear = not isinstance(error, dist.DistBackendError)  # what it says of a call is NCCL's
    return unclear and any(name in str(error).lower() for name in _BROKEN)


def is_communication(filename: str, function: str) -> bool:
    """Whether a Python frame does nothing but communicate."""
    return Path(filename) in _COLLECTIVES or function in _WAITS


def is_backward(function: str) -> bool:
    """Whether a Python frame is one of torch's engine, within which gradients are averaged."""
    return function in _ENGINES


def hide_broken_schedules() -> None:
    """Keep torch from printing a schedule's whole table when a connection breaks: recovery follows.

    For any other error torch prints it as usual.
    """
    logging.getLogger("torch.distributed.pipelining.schedules").addFilter(_worth_printing)


def _worth_printing(_: logging.LogRecord) -> bool:
    error = sys.exc_info()[1]  # the schedule logs while it handles it
    return error is None or interruption_of(error) is None
