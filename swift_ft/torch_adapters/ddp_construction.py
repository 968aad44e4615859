"""The construction of DDP models in a script: the constructor communicates.

It also decides, for good, which parameters DDP averages: those that require a gradient then. Others may be
frozen and thawed later, and a reducer that is made again has to keep to that choice.

Private parts used (tested on torch 2.11 to 2.14): ``_build_params_for_reducer`` of a DDP model.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True)
class Averaged:
    """The parameters that a DDP model averages, as it chose them when it was constructed.

    Attributes:
        parameters: in the order in which its reducer numbers them.
        sparse: of each, whether its gradients are sparse.
    """

    parameters: list[torch.nn.Parameter]
    sparse: list[bool]

    @contextlib.contextmanager
    def as_constructed(self, model: torch.nn.Module) -> Iterator[None]:
        """Within the block, these parameters of the model require gradients, and no others."""
        chosen = set(self.parameters)
        changed = [p for p in {*model.parameters(), *chosen} if p.requires_grad != (p in chosen)]
        for parameter in changed:
            parameter.requires_grad_(parameter in chosen)
        try:
            yield
        finally:
            for parameter in changed:
                parameter.requires_grad_(parameter not in chosen)


_constructed: weakref.WeakKeyDictionary[DistributedDataParallel, Averaged] = weakref.WeakKeyDictionary()


def averaged(model: DistributedDataParallel) -> Averaged:
    """The averaged parameters of a model; those it would choose now if no constructor here made it."""
    return _constructed.get(model) or _chosen(model)


def _chosen(model: DistributedDataParallel) -> Averaged:
    ddp: Any = model
    return Averaged(*ddp._build_params_for_reducer())


def join_without_sync() -> None:
    """In a process that replaces a lost worker: construct DDP without communication.

    A new DDP compares shapes and broadcasts parameters. Here the other workers are busy, and this worker
    receives its state from one of them anyway.
    """
    original = DistributedDataParallel.__init__

    @functools.wraps(original)
    def quiet(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **{**kwargs, "init_sync": False})

    DistributedDataParallel.__init__ = quiet  # type: ignore[method-assign]  # init_sync is torch's own switch


def constructed() -> int:
    """The number of DDP models that the script of this process has made since :func:`construct_within`."""
    return len(_constructed)


def construct_within(context: Callable[[], AbstractContextManager[object]]) -> None:
    """Construct every DDP model of this process within a context: a new DDP has communication of its own."""
    original = DistributedDataParallel.__init__

    @functools.wraps(original)
    def within(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        with context():
            original(self, *args, **kwargs)
        _constructed[self] = _chosen(self)

    DistributedDataParallel.__init__ = within  # type: ignore[method-assign]  # as above
