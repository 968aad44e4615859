"""What an interrupted step must put back before it is repeated.

Large tensors are not copied: parameters and optimizer state change in ``optimizer.step()`` only, after the
last message. What changes before that is small, or is zero between steps: gradients, module buffers (running
statistics), random state, schedulers.
"""

from __future__ import annotations

from typing import Any

import torch

from swift_ft.errors import UnsupportedError
from swift_ft.optim import UndoableOptimizer
from swift_ft.recovery.state import TrainingState

__all__ = ["Rollback"]

_CHECKED_STEPS = 2
"""Steps at whose start gradients are looked at; a script that carries them over does so from the start."""


class Rollback:
    """Remembers the beginning of a step, and goes back to it.

    Args:
        state: what the session protects.
    """

    def __init__(self, state: TrainingState) -> None:
        self._state = state
        self._iteration = -1
        self._small: dict[str, Any] = {}
        self._previous_small: dict[str, Any] = {}
        self._previous_buffers: dict[torch.Tensor, torch.Tensor] = {}
        self._had_gradient: list[tuple[torch.nn.Parameter, bool]] = []
        self._buffers: dict[torch.Tensor, tuple[torch.Tensor, int]] = {}
        self._updated: set[str] = set()
        self._steps = 0
        self._after: dict[torch.Tensor, torch.Tensor] = {}
        for name, optimizer in state.optimizers.items():
            if isinstance(optimizer, UndoableOptimizer):
                continue  # it can take its update back
            optimizer.register_step_post_hook(lambda *_, name=name: self._note_update(name))

    def begin(self, iteration: int) -> None:
        """The step of an iteration begins.

        Raises:
            UnsupportedError: if gradients were carried over from the step before.
        """
        self._previous_small, self._previous_buffers = self._small, {}
        self._iteration = iteration
        self._small = self._state.snapshot()
        self._updated.clear()
        self._after.clear()
        parameters = [p for module in self._state.modules.values() for p in module.parameters()]
        self._had_gradient = [(p, p.grad is not None) for p in parameters]
        if self._steps < _CHECKED_STEPS:
            self._steps += 1
            if any(p.grad is not None and bool(p.grad.any()) for p in parameters):
                raise UnsupportedError(
                    "Gradients are carried over from one step to the next, which a repeated step would count "
                    "twice: call optimizer.zero_grad() inside `with step:`."
                )
        for module in self._state.modules.values():
            for buffer in module.buffers():
                self._keep(buffer)

    def dirty(self) -> str | None:
        """Why the interrupted step can neither be repeated nor counted as done, if so."""
        if not self._updated:
            return None
        names = ", ".join(sorted(self._updated))
        return (
            f"communication failed after {names}.step() in the body of the step; "
            "keep communication before the optimizer's step"
        )

    def back(self) -> None:
        """Go back to the beginning of the step."""
        with torch.no_grad():
            for parameter, had_gradient in self._had_gradient:
                # A new one: an update may still have to be undone, and that needs the gradient as it was.
                parameter.grad = torch.zeros_like(parameter) if had_gradient else None
            for buffer, (copy, version) in self._buffers.items():
                if buffer._version != version:
                    self._after[buffer] = buffer.clone()
                    buffer.copy_(copy)
                    self._buffers[buffer] = (copy, buffer._version)
        self._state.restore(self._small)

    def back_to(self, iteration: int) -> None:
        """Go back to the beginning of the last completed step, whose update is undone."""
        if iteration == self._iteration:  # the next one has not begun
            self.back()
            return
        assert iteration == self._iteration - 1
        with torch.no_grad():
            for buffer, copy in self._previous_buffers.items():
                buffer.copy_(copy)
        self._state.restore(self._previous_small)

    def forward(self) -> None:
        """After :meth:`back`: the step counts as done after all, since a replica has completed it.

        Buffers change in the forward pass only, and that was complete here, or nobody had completed the step.
        """
        with torch.no_grad():
            for buffer, copy in self._after.items():
                buffer.copy_(copy)

    def _keep(self, buffer: torch.Tensor) -> None:
        """Copy a buffer, unless it has not changed since its last copy (masks never do)."""
        kept = self._buffers.get(buffer)
        if kept is None or kept[1] != buffer._version:
            if kept is not None:
                self._previous_buffers[buffer] = kept[0]
            self._buffers[buffer] = (buffer.detach().clone(), buffer._version)

    def _note_update(self, name: str) -> None:
        self._updated.add(name)
