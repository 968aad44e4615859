"""Which exceptions are a broken connection, and which are the user's own."""

from __future__ import annotations

import logging
import sys
import traceback
from pathlib import Path

import torch.distributed as dist

__all__ = ["hide_broken_schedules", "is_broken_communication", "is_communication"]

_COLLECTIVES = Path(dist.__file__).parent / "distributed_c10d.py"
_WAITS = frozenset(
    {
        *("_wait_batch_p2p", "_batch_p2p", "_distributed_broadcast_coalesced"),  # torch's
        *("wait_for_works", "call_or_abort"),  # swift_ft.waits
    }
)
_ENGINES = frozenset({"_engine_run_backward", "_pre_forward"})
"""Where autograd and DDP go into C++, and come back with errors of any origin."""
_TRANSPORTS = ("gloo/transport/", "NCCL")


def is_broken_communication(error: BaseException, in_backward: str | None = None) -> bool:
    """Whether an exception comes out of torch's communication itself.

    torch raises plain ``RuntimeError`` for gloo's broken connections, so the type alone says nothing. What
    counts is where the root cause was raised: in a collective or point-to-point call of torch, or where a
    pipeline schedule waits for one. An exception that a model or a loss function raised is never taken for
    one, whatever its text.

    Args:
        error: what a step raised.
        in_backward: what the averaging of gradients failed of, if it did. It fails inside of torch's engine,
            which raises without a frame of communication.
    """
    root = error
    while root.__cause__ is not None:
        root = root.__cause__
    if not isinstance(root, RuntimeError) or root.__traceback__ is None:
        return False
    frame = traceback.extract_tb(root.__traceback__)[-1]
    if frame.name in _ENGINES:
        return in_backward is not None or any(name in str(root) for name in _TRANSPORTS)
    return is_communication(frame.filename, frame.name)


def is_communication(filename: str, function: str) -> bool:
    """Whether a frame of Python's is one in which torch communicates, and nothing else."""
    return Path(filename) == _COLLECTIVES or function in _WAITS


def hide_broken_schedules() -> None:
    """Keep torch from printing a schedule's whole table because a connection broke: recoveries are reported.

    Of any other error it is printed as ever.
    """
    logging.getLogger("torch.distributed.pipelining.schedules").addFilter(_worth_printing)


def _worth_printing(_: logging.LogRecord) -> bool:
    error = sys.exc_info()[1]  # the schedule logs while it handles it
    return error is None or not is_broken_communication(error)
