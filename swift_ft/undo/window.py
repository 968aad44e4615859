"""The undo window: the updates of the last step, as long as they can be undone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from swift_ft.errors import UndoError, UsageError
from swift_ft.torch_core.tensors import version_of
from swift_ft.undo.records import ParamUpdate
from swift_ft.undo.snapshot import WholeState, size_bytes
from swift_ft.undo.update import GroupUpdate

NO_RULE = "swift_ft has no rule for this optimizer"
HOOKS_CHANGE = "Step hooks of this optimizer change parameters or state"


@dataclass
class Window:
    """The updates of one step.

    Invariant: a parameter is in at most one update. One that is in none was not changed by this step, or its
    update was undone.

    Attributes:
        updates: updates of parameters with a known rule, in the order in which they were made.
        whole: everything that an optimizer held before its step, where that is undone as a whole.
        because: why it is, in words.
        found_inf: the scaler's verdict on the gradients; where it is not 0 the kernel did nothing.
        zeros: gradients that replaced the ones in the window, with torch's count of in-place changes.
        complete: ``step()`` was called. If not, single updates of the next step are under way.
        refuses: why nothing can be undone; empty if it can.
    """

    updates: list[GroupUpdate] = field(default_factory=list)
    whole: WholeState | None = None
    because: str = NO_RULE
    found_inf: Tensor | None = None
    zeros: dict[Tensor, tuple[Tensor, int]] = field(default_factory=dict)
    complete: bool = False
    refuses: str = ""

    def params(self) -> set[Tensor]:
        """The parameters that are updated."""
        if self.skipped():
            return set()
        if self.whole is not None:
            return set(self.whole.params)
        return {param for param, _ in self._pairs()}

    def entries(self) -> Iterable[ParamUpdate]:
        """All updates of single parameters."""
        for update in self.updates:
            yield from update.entries

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """All parameters that are updated, with their gradients."""
        for update in self.updates:
            yield from update.pairs()

    def skipped(self) -> bool:
        """Whether the step did nothing, because a gradient was not finite."""
        return self.found_inf is not None and bool(self.found_inf.item())

    @torch.no_grad()
    def undo(self, parameters: Iterable[Tensor] | None) -> int:
        """Undoes the updates of some or all parameters.

        Args:
            parameters: parameters that this step updated; None for all that it updated.

        Returns:
            The number of parameters whose update was undone.

        Raises:
            UndoError: there is nothing to undo, or it cannot be undone; nothing was changed.
            UsageError: a parameter was not updated by this step.
        """
        if self.refuses:
            raise UndoError(self.refuses)
        if self.skipped():
            raise UndoError(
                "The last step was skipped because a gradient was not finite: there is nothing to undo."
            )
        updated = self.params()
        chosen = updated if parameters is None else set(parameters)
        if not chosen <= updated:
            raise UsageError(
                f"{len(chosen - updated)} of {len(chosen)} parameters were not updated by the last step, or "
                "were undone already: give undo() parameters from `optimizer.updated`."
            )
        if not updated:
            raise UndoError("The last step updated nothing, or was undone already: call step() first.")
        if self.whole is not None:
            return self._undo_whole(self.whole, chosen)
        todo = [
            (update, [entry for entry in update.entries if entry.param in chosen]) for update in self.updates
        ]
        if sum(len(entries) for _, entries in todo) != len(chosen):
            raise UndoError(
                "A parameter is in a group twice and was updated twice, so the step cannot be undone: "
                "list it once."
            )
        for update, entries in todo:
            update.check(entries)
        for update, entries in reversed(todo):
            if entries:
                update.undo(entries)
                update.hyper.restore()
                update.forget(chosen)
        return len(chosen)

    def _undo_whole(self, whole: WholeState, chosen: set[Tensor]) -> int:
        if len(chosen) != len(set(whole.params)):
            raise UndoError(
                f"{self.because}, so its step is undone as a whole: call undo() without parameters."
            )
        whole.restore()
        self.whole = None
        return len(chosen)

    def forget(self, parameters: set[Tensor]) -> None:
        """Drop the updates of some parameters. What is undone as a whole keeps them."""
        for update in self.updates:
            update.forget(parameters)

    def met_later_gradients(self) -> bool:
        """Whether a parameter has a gradient of a later backward pass."""
        for param, used in self._pairs():
            grad = param.grad
            if grad is None or grad is used:
                continue
            zero, version = self.zeros.get(param, (None, 0))
            if grad is not zero or version_of(grad) != version:
                return True
        return False

    def replace_gradients(self) -> None:
        """Gives parameters new gradients of zeros where theirs are in the window."""
        for param, used in self._pairs():
            if param.grad is used:
                param.grad = torch.zeros_like(used)
                self.zeros[param] = (param.grad, 0)

    def note_zeros(self) -> None:
        """Records that nothing was added to the new gradients yet."""
        self.zeros = {param: (grad, version_of(grad)) for param, (grad, _) in self.zeros.items()}

    def memory_bytes(self) -> int:
        """Bytes of snapshots and residuals, without parameters, state and gradients."""
        total = self.whole.size_bytes if self.whole else 0
        for entry in self.entries():
            total += sum(saved.size_bytes for saved in entry.snapshots.values())
            total += sum(residual.size_bytes for residual in (entry.residual or {}).values())
        return total

    def gradient_bytes(self) -> int:
        """Bytes of gradients that only this window still holds."""
        return sum(size_bytes(used) for param, used in self._pairs() if param.grad is not used)
