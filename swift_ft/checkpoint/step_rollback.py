"""What must be restored before an interrupted step is repeated.

Large tensors are not copied: parameters and optimizer state change in ``optimizer.step()`` only, after the
last message. What changes earlier is small, or zero between steps: gradients, module buffers (running
statistics), random state, schedulers.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.errors import UnsupportedError
from swift_ft.optim import UndoableOptimizer
from swift_ft.torch_adapters.core.buffers import BufferCopies
from swift_ft.torch_adapters.core.shards import local

__all__ = ["Rollback"]

_CHECKED_STEPS = 2
"""Steps at whose start gradients are checked: a script that carries them over does so from the start."""


class Rollback:
    """Saves the state at the beginning of a step, and restores it.

    Args:
        state: what the session protects.
    """

    def __init__(self, state: TrainingState) -> None:
        self._state = state
        self._iteration = -1
        self._small: dict[str, Any] = {}
        self._previous_small: dict[str, Any] | None = None
        self._had_gradient: list[tuple[torch.nn.Parameter, bool]] = []
        self._buffers: BufferCopies | None = None
        self._previous_buffers: BufferCopies | None = None
        self._after: BufferCopies | None = None
        self._updated: set[str] = set()
        self._steps = 0
        for name, optimizer in state.optimizers.items():
            if isinstance(optimizer, UndoableOptimizer):
                continue  # it can undo its update
            optimizer.register_step_post_hook(lambda *_, name=name: self._note_update(name))

    def begin(self, iteration: int) -> None:
        """The step of an iteration begins.

        Raises:
            UnsupportedError: if gradients were carried over from the previous step.
        """
        if iteration == self._iteration + 1:
            self._previous_small, self._previous_buffers = self._small, self._buffers
        elif iteration != self._iteration:  # a repeated iteration still has the one before it
            self._previous_small, self._previous_buffers = None, None
        self._iteration = iteration
        self._small = self._state.snapshot()
        self._updated.clear()
        self._after = None
        parameters = [p for module in self._state.modules.values() for p in module.parameters()]
        self._had_gradient = [(p, p.grad is not None) for p in parameters]
        if self._steps < _CHECKED_STEPS:
            self._steps += 1
            if any(p.grad is not None and bool(local(p.grad).any()) for p in parameters):
                raise UnsupportedError(
                    "Gradients are carried over from one step to the next, which a repeated step would count "
                    "twice: call optimizer.zero_grad() inside `with step:`."
                )
        self._buffers = self._copies(before=self._buffers)

    def forget(self) -> None:
        """The tensors of the state are others from now on: no step before can be rolled back any more."""
        self._iteration, self._previous_small, self._previous_buffers = -1, None, None
        self._had_gradient, self._buffers, self._after = [], None, None

    def dirty(self) -> str | None:
        """Why the interrupted step can neither be repeated nor counted as done; None if it can."""
        if not self._updated:
            return None
        names = ", ".join(sorted(self._updated))
        return (
            f"communication failed after {names}.step() in the body of the step; "
            "keep communication before the optimizer's step"
        )

    def back(self) -> None:
        """Roll back to the beginning of the step."""
        with torch.no_grad():
            for parameter, had_gradient in self._had_gradient:
                # A new tensor: an update may still have to be undone, and that needs the old gradient.
                parameter.grad = torch.zeros_like(parameter) if had_gradient else None
        assert self._buffers is not None
        self._after = self._copies(before=self._buffers)
        self._buffers.restore()
        self._state.restore(self._small)

    def back_to(self, iteration: int) -> None:
        """Roll back to the beginning of the last completed step. The caller undoes its update."""
        if iteration == self._iteration:  # the next one has not begun
            self.back()
            return
        assert iteration == self._iteration - 1
        assert self._previous_small is not None
        self.buffers_of(iteration)
        self._state.restore(self._previous_small)

    def has_buffers_of(self, iteration: int) -> bool:
        """Whether this worker's own buffers at the beginning of an iteration are known."""
        if iteration == self._iteration - 1:
            return self._previous_buffers is not None
        return iteration in (self._iteration, self._iteration + 1)

    def buffers_of(self, iteration: int, model: torch.nn.Module | None = None) -> None:
        """Put back this worker's own buffers at the beginning of an iteration.

        Only if :meth:`has_buffers_of` knows them. The beginning of the next iteration is the end of the
        interrupted one: a replica has completed it, which took all forward passes of this worker, and only
        those change the buffers of the model.

        Args:
            iteration: which one.
            model: only its buffers. Others may change later in a step, as the counter of an averaged model.
        """
        moments = {
            self._iteration - 1: self._previous_buffers,
            self._iteration: self._buffers,
            self._iteration + 1: self._after,  # None where the step is complete: then they are in place
        }
        if (moment := moments[iteration]) is not None:
            moment.restore(model)

    def has_statistics(self, model: torch.nn.Module) -> bool:
        """Whether steps change a model's buffers, as the last two show: running statistics, as a rule."""
        moments = [m for m in (self._previous_buffers, self._buffers, self._after) if m is not None]
        return any(one.differs_from(next_, model) for one, next_ in pairwise(moments))

    def _copies(self, before: BufferCopies | None) -> BufferCopies:
        return BufferCopies(self._state.modules.values(), before)

    def _note_update(self, name: str) -> None:
        self._updated.add(name)
