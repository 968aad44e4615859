"""Phases of a script's loop, which decide what becomes of its communication."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

import torch.distributed as dist

from swift_ft.errors import UsageError
from swift_ft.runtime.script.script_line import script_line
from swift_ft.torch_adapters.lasting_work import LastingWork
from swift_ft.torch_adapters.script_operations import Operation, OperationInterceptor
from swift_ft.torch_core import outputs
from swift_ft.torch_core.outputs import Output


class ScriptPhase(StrEnum):
    """A part of the script's loop."""

    STEP = "step"
    """Inside `with step:`. It is repeated after a loss, and replayed."""
    HOOK = "hook"
    """In a function for ``session.between``. It is repeated after a loss or skipped, and never replayed."""
    OUTSIDE = "outside"
    """Between two steps, in the script's own loop. It is neither repeated nor replayed."""
    OVER = "over"
    """After the last step, or while swift_ft itself is at work: not in the script's loop."""


@dataclass
class ScriptPhases:
    """Decides about each operation of the script from its first step on.

    See :class:`swift_ft.torch_adapters.script_operations.GroupInterceptor`.

    Attributes:
        steps: decides inside steps; None if all operations there simply take place.
        phase: where the script is.
    """

    steps: OperationInterceptor | None = None
    phase: ScriptPhase = ScriptPhase.OVER
    _steps_begun: int = 0
    _begun_in_step: int = 0  # operations

    def begin_step(self) -> None:
        """The script is inside of another step, or repeats one."""
        self.phase, self._steps_begun = ScriptPhase.STEP, self._steps_begun + 1
        self._begun_in_step = 0
        LastingWork.by_future.begin()

    def end_step(self, *, failed: bool) -> None:
        """The script leaves a step."""
        if not failed:
            LastingWork.by_future.settle()  # the wait for them is over, and is still of the step
        self.phase = ScriptPhase.OUTSIDE

    def begin_unseen(self, name: str, workers: int) -> Callable[[], None] | None:
        """See the protocol. Nobody looks at tensors outside of steps, nor inside where no log has them."""
        if self.phase != ScriptPhase.STEP:
            if self.phase == ScriptPhase.OUTSIDE and workers > 1:
                self.refuse(name)
            return _nothing
        if self.steps is not None or outputs.are_watched():
            return None
        self._begun_in_step += 1
        return partial(self._check_end, name, self._steps_begun)

    def begin(self, operation: Operation) -> Callable[[], None] | None:
        """See the protocol."""
        if self.phase != ScriptPhase.STEP:
            return self.begin_unseen(operation.name, len(operation.members))
        self._begun_in_step += 1
        if outputs.are_watched():
            _show(operation)
        on_end = self.steps.begin(operation) if self.steps is not None else _nothing
        if on_end is None:
            return None
        return partial(self._end, operation, self._steps_begun, self._begun_in_step, on_end)

    def _end(self, operation: Operation, begun: int, number: int, on_end: Callable[[], None]) -> None:
        """A wait for an operation of a step is over."""
        self._check_end(operation.name, begun)
        if outputs.are_watched():
            _show_result(operation, number)
        on_end()

    def _check_end(self, name: str, begun: int) -> None:
        """Refuse a wait in another step than it began in, since a repetition of that could not wait for it.

        Raises:
            UsageError: it is one.
        """
        if (self.phase, self._steps_begun) != (ScriptPhase.STEP, begun):
            raise UsageError(
                f"{script_line()} waits for {name}, which began in a step that is over: if a "
                "machine were lost meanwhile, no step would begin it again. Wait for it inside the same "
                "`with step:`, or communicate in a function for session.between(function, every=...) "
                "(docs/how-to/between-steps.md)",
                alike=True,
            )

    def refuse(self, what: str) -> None:
        """In a run without any failure: not first when a machine is lost.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            f"{script_line()} calls {what} between two steps, where a loss could not be recovered: put it "
            "inside `with step:`, or into a function for session.between(function, every=...) "
            "(docs/how-to/between-steps.md)",
            alike=True,
        )


def _show(operation: Operation) -> None:
    """Show the tensors that this worker gives to others."""
    if not operation.given:
        return
    if operation.source is not None and operation.source != dist.get_rank():
        return
    tensors = {f"tensor {number}": tensor for number, tensor in enumerate(operation.given)}
    members = operation.members if operation.peer is None else (operation.peer,)
    outputs.show(Output(f"{operation.name} on group {operation.group}", tensors, members))


def _show_result(operation: Operation, number: int) -> None:
    """Show what an operation gave to this worker.

    Args:
        operation: that is over.
        number: its place among those that the step has begun. The script may wait for the second one first.
    """
    if not operation.gives_to_all:
        return
    tensors = dict(enumerate(operation.kept or operation.tensors))
    named = {f"tensor {position}": tensor for position, tensor in tensors.items()}
    place = f"the result of {operation.name} on group {operation.group}, operation {number} of the step"
    outputs.show(Output(place, named, received=True))


def _nothing() -> None:
    pass
