"""The updates of the running iteration and the last one by optimizers, and their undo (paper §3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.errors import RecoveryError, UndoError, UsageError
from swift_ft.optim import UndoableOptimizer
from swift_ft.recovery.events import StatusReported
from swift_ft.recovery.plan import Task
from swift_ft.torch_core.optimizers import parameters_of
from swift_ft.torch_core.tensors import version_of


@dataclass(frozen=True)
class _Completed:
    """The optimizers that made a step in a completed iteration."""

    iteration: int
    optimizers: set[str]


class Updates:
    """Knows which updates can be taken back, and takes them back.

    Args:
        state: what the session protects.
    """

    def __init__(self, state: TrainingState) -> None:
        self._state = state
        self._iteration = 0
        self._windows: dict[str, int] = {}
        self._undone: set[int] = set()
        self._versions: dict[nn.Parameter, int] = {}  # of parameters that no optimizer has
        self._grouped: list[int] = []  # parameters of optimizers as the step began, by id()
        self._last: _Completed | None = None  # the last iteration; None if it cannot be taken back
        self._wait_free: list[tuple[UndoableOptimizer, set[torch.Tensor]]] = []

    def begin(self, iteration: int) -> None:
        """The step of an iteration begins."""
        self._iteration = iteration
        self._undone.clear()
        # Asked in each step: a script may wrap its optimizer, in place, at any time.
        self._wait_free = [
            (optimizer, {*parameters_of(optimizer)})
            for optimizer in self._undoable().values()
            if optimizer.wait_free
        ]
        self._versions = {p: version_of(p) for p in self._state.unowned_parameters()}
        self._grouped = [id(parameter) for _, parameter in self._state.parameters]
        self._note_windows()

    @property
    def come_early(self) -> bool:
        """Whether some come within the backward pass, as soon as gradients are averages."""
        return bool(self._wait_free)

    def updated(self) -> tuple[int, ...]:
        """Indices of the parameters that this iteration has updated so far, and that can be undone."""
        tagged: set[torch.Tensor] = set()
        for name, optimizer in self._undoable().items():
            if optimizer.windows_opened != self._windows.get(name):  # else the tags are the last iteration's
                tagged.update(optimizer.updated)
        return self._indices(tagged)

    def updated_again(self) -> str | None:
        """Why this iteration cannot be undone, if it is that an optimizer stepped more than once."""
        for name, optimizer in self._undoable().items():
            if (steps := optimizer.windows_opened - self._windows.get(name, 0)) > 1:
                return (
                    f"communication failed after {steps} {name}.step() in the body of the step, of which "
                    "only the last can be undone; keep communication before the second one"
                )
        return None

    def updated_apart(self) -> str | None:
        """Why this iteration cannot be undone, if the script went on when communication had failed.

        Each replica may have updated with gradients of its own, and an undo that rounds would leave each with
        roundings of its own.
        """
        if not self.updated() or self.undoes_exactly:
            return None
        return (
            "communication failed, and the script caught the error and updated its parameters; "
            "let the error leave `with step:`, or wrap the optimizer with exact=True"
        )

    def refused(self) -> str | None:
        """Why updates of this iteration, less those that copies have put back, cannot be undone; or None."""
        opened = {n: o for n, o in self._undoable().items() if o.windows_opened != self._windows.get(n)}
        return next((o.refuses_undo for o in opened.values() if o.refuses_undo and o.updated), None)

    def completed(self) -> None:
        """The step is complete. From now on the optimizers' tags are the last iteration's.

        An optimizer that made no step has a window of an earlier iteration, which nothing can take back now.
        No undo brings back an average of the model (EMA), which changes with each update. Nor is a step
        undone that has changed which parameters optimizers have: a plan's indices would mean others then.

        Raises:
            UsageError: a wait-free optimizer has updated parameters, and its step was skipped.
        """
        optimizers = self._undoable()
        if skipped := [name for name, optimizer in optimizers.items() if optimizer.waits_for_step]:
            raise UsageError(
                f"wrap_optimizer(wait_free=True) has updated parameters within the backward pass, and no "
                f"{skipped[0]}.step() followed, as where a GradScaler skips one: leave wait_free out.",
                alike=True,
            )
        stepped = {name for name, o in optimizers.items() if o.windows_opened != self._windows.get(name)}
        for name in optimizers.keys() - stepped:
            optimizers[name].close_undo_window()
        averaged = any(version_of(p) != version for p, version in self._versions.items())
        plain = len(optimizers) < len(self._state.optimizers)
        regrouped = self._grouped != [id(parameter) for _, parameter in self._state.parameters]
        final = averaged or plain or regrouped or self.updated_again() or self.refused()
        self._last = None if final else _Completed(self._iteration, stepped)
        self._note_windows()

    def undoable(self, completed: int) -> tuple[int, ...] | None:
        """Indices of the parameters that the last iteration updated; None if that cannot be undone.

        Args:
            completed: iterations that the state has completed.
        """
        if self._last is None or self._last.iteration != completed - 1:
            return None
        tagged: set[torch.Tensor] = set()
        for name, optimizer in self._undoable().items():
            closed = name in self._last.optimizers and not optimizer.window_open
            if closed or optimizer.windows_opened != self._windows.get(name):
                return None
            tagged.update(optimizer.updated)
        return self._indices(tagged)

    def report_undo(self, report: StatusReported) -> StatusReported:
        """A report that says whether, and how, this worker can take back the last iteration."""
        undoable = self.undoable(report.iteration or 0)
        return replace(report, undoable=undoable or (), no_update=undoable == ())

    @property
    def undoes_exactly(self) -> bool:
        """Whether an undo gives back the very bits of all parameters."""
        optimizers = self._undoable().values()
        return len(optimizers) == len(self._state.optimizers) and all(o.exact for o in optimizers)

    def undo(self, task: Task) -> None:
        """Undo the updates that the plan names, except those that an earlier, interrupted plan undid.

        Raises:
            RecoveryError: if an update cannot be undone.
        """
        self._last = None
        indices = [index for index in task.undo if index not in self._undone]
        chosen = [self._state.parameters[index] for index in indices]
        for optimizer in {id(o): o for o, _ in chosen}.values():
            assert isinstance(optimizer, UndoableOptimizer)
            try:
                optimizer.undo([p for owner, p in chosen if owner is optimizer])
            except UndoError as error:
                raise RecoveryError(f"the last update cannot be undone: {error}") from error
        self._undone.update(indices)

    def reduced(self, parameters: Sequence[torch.Tensor]) -> None:
        """All replicas have contributed to these gradients.

        So none of them is before this iteration any more, and the undo window of the last one closes. A
        wait-free optimizer updates these parameters now.
        """
        for name, optimizer in self._undoable().items():
            if optimizer.windows_opened == self._windows.get(name):
                optimizer.close_undo_window()
        for optimizer, own in self._wait_free:
            optimizer.update([p for p in parameters if p in own])

    def backward_ended(self) -> None:
        """An averaged backward pass has ended, in a step in which :attr:`come_early`."""
        for optimizer, _ in self._wait_free:
            optimizer.backward_ended()

    def forget(self) -> None:
        """The parameters are others from now on: no update before can be undone any more."""
        self._last = None
        for optimizer in self._undoable().values():
            optimizer.close_undo_window()

    def _undoable(self) -> dict[str, UndoableOptimizer]:
        return {n: o for n, o in self._state.optimizers.items() if isinstance(o, UndoableOptimizer)}

    def _note_windows(self) -> None:
        self._windows = {name: optimizer.windows_opened for name, optimizer in self._undoable().items()}

    def _indices(self, parameters: set[torch.Tensor]) -> tuple[int, ...]:
        return tuple(i for i, (_, p) in enumerate(self._state.parameters) if p in parameters)
