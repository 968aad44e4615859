"""Copies of parameters, and of what optimizers keep of them, as a step begins.

A step that is lost gets them back. Which ones need a copy, :mod:`swift_ft.checkpoint.step.parameters` finds.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch.optim import Optimizer

from swift_ft.optim import UndoableOptimizer
from swift_ft.torch_core.buffers import copy_all
from swift_ft.torch_core.shards import local, note_changed
from swift_ft.torch_core.tensors import same_bits, write_back


class Kind(IntEnum):
    """When a parameter changes outside of its optimizer's step."""

    BEFORE = 1
    """Before it, or without any optimizer. The undo of the step still works."""
    AFTER = 2
    """After it, or its state does, so that no undo leads back: the optimizer's state of it is copied, too."""


@dataclass(frozen=True)
class _Copy:
    """A parameter and what an optimizer keeps of it, at the beginning of a step."""

    parameter: torch.Tensor
    data: torch.Tensor
    value: torch.Tensor
    optimizer: Optimizer | None
    state: dict[str, tuple[Any, Any]] | None

    @classmethod
    def of(cls, parameter: torch.Tensor, kind: Kind, optimizer: Optimizer | None) -> _Copy:
        state = None
        if kind == Kind.AFTER and optimizer is not None:
            held = optimizer.state.get(parameter, {})
            state = {key: (value, _copied(value)) for key, value in held.items()}
        # Not the values alone: `parameter.data = ...` also takes its memory from it.
        return cls(parameter, local(parameter).detach(), torch.empty_like(local(parameter)), optimizer, state)

    @torch.no_grad()
    def put_back(self) -> None:
        here = local(self.parameter)
        if here.data_ptr() == self.data.data_ptr() or here is not self.parameter:
            if not same_bits(here, self.value):  # else the step before can still be undone
                write_back(here, self.value)
                note_changed(self.parameter)
        else:
            write_back(self.data, self.value)
            self.parameter.data = self.data
        if self.state is None or self.optimizer is None:
            return
        if not self.state:
            self.optimizer.state.pop(self.parameter, None)
            return
        for value, copied in self.state.values():
            if isinstance(value, torch.Tensor):
                value.copy_(copied)
            elif type(value) is list:  # L-BFGS keeps a history of tensors, which it does not write to
                value[:] = copied
        self.optimizer.state[self.parameter] = {key: value for key, (value, _) in self.state.items()}

    def forget_update(self) -> None:
        """It needs no undo any more."""
        if isinstance(self.optimizer, UndoableOptimizer):
            self.optimizer.forget([self.parameter])


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return [*value] if type(value) is list else value


class ParameterCopies:
    """The parameters that change outside of optimizers, at the beginning of a step.

    Args:
        kinds: when each of them changes.
        owners: the optimizer that updates each; none where there is none.
    """

    def __init__(self, kinds: Mapping[torch.Tensor, Kind], owners: Mapping[torch.Tensor, Optimizer]) -> None:
        self._copies = copies = [_Copy.of(p, kind, owners.get(p)) for p, kind in kinds.items()]
        copy_all([one.value for one in copies], [local(one.parameter) for one in copies])

    def put_back(self, updated: Collection[torch.Tensor], *, undo_follows: bool = False) -> None:
        """As they were.

        Args:
            updated: parameters whose update is still to be undone, which needs the values that they have now.
            undo_follows: of all of these, also of those of which there is a copy of all.
        """
        for one in self._copies:
            if one.parameter not in updated:
                one.put_back()
            elif one.state is not None and not undo_follows:
                one.put_back()
                one.forget_update()

    def put_back_undone(self) -> None:
        """The updates are undone: what an undo rounds, or has begun from, is as it was, too."""
        for one in self._copies:
            one.put_back()
