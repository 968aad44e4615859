"""Copies of parameters, and of what optimizers keep of them, as a step begins.

A step that is lost gets them back. Which ones need a copy, :mod:`swift_ft.checkpoint.step.parameters` finds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch.optim import Optimizer

from swift_ft.checkpoint.step.optimizer_copies import EntryCopy, OptimizerCopy, ValueCopies
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
    """A parameter and what optimizers keep of it, at the beginning of a step."""

    parameter: torch.Tensor
    data: torch.Tensor
    value: torch.Tensor
    states: tuple[EntryCopy, ...]

    @classmethod
    def of(
        cls, parameter: torch.Tensor, kind: Kind, optimizers: Iterable[Optimizer], inner: ValueCopies
    ) -> _Copy:
        states = (EntryCopy(one, parameter, inner) for one in optimizers) if kind == Kind.AFTER else ()
        # Not the values alone: `parameter.data = ...` also takes its memory from it.
        return cls(parameter, local(parameter).detach(), torch.empty_like(local(parameter)), (*states,))

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
        for state in self.states:
            state.put_back()

    def forget_update(self) -> None:
        """It needs no undo any more."""
        for state in self.states:
            if isinstance(state.optimizer, UndoableOptimizer):
                state.optimizer.forget([self.parameter])


def owners_of(parameters: Iterable[tuple[Optimizer, torch.Tensor]]) -> dict[torch.Tensor, list[Optimizer]]:
    """The optimizers of each parameter: one may be in several."""
    owners: dict[torch.Tensor, list[Optimizer]] = {}
    for optimizer, parameter in parameters:
        owners.setdefault(parameter, []).append(optimizer)
    return owners


class ParameterCopies:
    """The parameters that change outside of optimizers, at the beginning of a step.

    Args:
        kinds: when each of them changes.
        owners: see :func:`owners_of`.
    """

    def __init__(
        self, kinds: Mapping[torch.Tensor, Kind], owners: Mapping[torch.Tensor, Sequence[Optimizer]]
    ) -> None:
        # One for all: several entries may share a container.
        self._inner = inner = ValueCopies({*map(id, kinds), *map(id, owners)})
        self._copies = copies = [_Copy.of(p, kind, owners.get(p, ()), inner) for p, kind in kinds.items()]
        copy_all([one.value for one in copies], [local(one.parameter) for one in copies])

    def put_back(self, updated: Collection[torch.Tensor], *, undo_follows: bool = False) -> None:
        """As they were.

        Args:
            updated: parameters whose update is still to be undone, which needs the values that they have now.
            undo_follows: of all of these, also of those of which there is a copy of all.
        """
        if not (undo_follows and any(one.states and one.parameter in updated for one in self._copies)):
            self._inner.put_back()
        for one in self._copies:
            if one.parameter not in updated:
                one.put_back()
            elif one.states and not undo_follows:
                one.put_back()
                one.forget_update()

    def put_back_undone(self) -> None:
        """The updates are undone: what an undo rounds, or has begun from, is as it was, too."""
        self._inner.put_back()
        for one in self._copies:
            one.put_back()


class WholeCopies(ParameterCopies):
    """All parameters and all that optimizers keep: a step can be put back once it is complete.

    Args:
        parameters: those of modules, and of optimizers.
        optimizers: all of them.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], optimizers: Iterable[Optimizer]) -> None:
        super().__init__(dict.fromkeys(parameters, Kind.BEFORE), {})
        self._optimizers = [*map(OptimizerCopy, optimizers)]

    def put_back(self, updated: Collection[torch.Tensor], *, undo_follows: bool = False) -> None:
        """As they were, whatever was updated: no update is left to be undone."""
        if undo_follows:  # which needs what there is now
            return
        for one in self._optimizers:
            one.forget_update()
        self.put_back_undone()

    def put_back_undone(self) -> None:
        """The updates are undone, or need no undo."""
        super().put_back_undone()
        for one in self._optimizers:
            one.put_back()
