"""Modules that a machine imports once before it forks its workers, so that no worker imports them again."""

from __future__ import annotations

import gc
import importlib
import threading
from collections.abc import Iterable

import torch

from swift_ft.errors import UsageError

_MODULES = (
    "torch",
    "torch.distributed",
    "torch.distributed.pipelining",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "torch.utils.serialization",
    "fsspec.implementations.chained",
    "swift_ft.session",
    "encodings.idna",  # a name of a host is looked up
    "swift_ft.launch.processes.rehearsal",
)


def preload(modules: Iterable[str] = ()) -> None:
    """Import what a worker needs, before this process forks.

    Args:
        modules: what the script imports besides, as the user says (``--preload``).

    Raises:
        UsageError: one of them cannot be imported, or not before workers are forked.
    """
    for module in _MODULES:
        importlib.import_module(module)
    for module in modules:
        _import(module)
    importlib.import_module("swift_ft.checkpoint.state_digest").warm_up()
    # A recovery collects garbage while all workers wait. Imported modules never become garbage: skip them.
    gc.collect()
    gc.freeze()


def _import(module: str) -> None:
    """Import one of the user's modules. A forked process has no thread but one, and cannot use CUDA again."""
    before = {*threading.enumerate()}
    try:
        importlib.import_module(module)
    except (Exception, SystemExit) as error:
        raise UsageError(
            f"--preload {module}: it cannot be imported ({type(error).__name__}: {error}): correct the name, "
            "or leave it out."
        ) from error
    started = [thread.name for thread in threading.enumerate() if thread not in before]
    if started:
        raise UsageError(
            f"--preload {module}: its import starts a thread ({started[0]}), which workers that are forked "
            "later would not have: leave it out."
        )
    if torch.cuda.is_initialized():
        raise UsageError(
            f"--preload {module}: its import uses CUDA, which workers that are forked later could not: leave "
            "it out."
        )
