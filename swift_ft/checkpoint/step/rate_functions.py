"""The functions that the state's schedulers call for rates, as ``LambdaLR`` does.

A scheduler's ``state_dict()`` says nothing of a function. A replacement runs the script from its beginning:
what a step of before has given a scheduler, it lacks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from swift_ft.checkpoint.step.held_by_libraries import OF_SCHEDULERS
from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.errors import UnsupportedError


class RateFunctions:
    """Compares them with those that there were before the first step.

    Args:
        state: what the session protects.
    """

    def __init__(self, state: TrainingState) -> None:
        self._state = state
        self._first: Mapping[str, Any] | None = None

    def check(self) -> None:
        """A step begins.

        Raises:
            UnsupportedError: a scheduler has another number of them than before the first step.
        """
        schedulers = {name: one for name, one in self._state.small.items() if isinstance(one, LRScheduler)}
        now = {name: _functions_of(one) for name, one in schedulers.items()}
        if self._first is None:
            self._first = now
        for name, functions in now.items():
            if functions != self._first.get(name, functions):
                raise UnsupportedError(
                    f"A step has given {name} ({type(schedulers[name]).__name__}) another number of "
                    "functions, or of schedulers, than before the first step: a replacement, which runs the "
                    "script from its beginning, would not have them. Make all groups of the optimizer, with "
                    "their functions, before the first step: parameters that require no gradient yet stay as "
                    "they are.",
                    alike=True,
                )


def _functions_of(value: Any) -> Any:
    """Their number, and the classes of schedulers."""
    if isinstance(value, list | tuple):
        return [*map(_functions_of, value)]
    if isinstance(value, LRScheduler):
        held = {name: one for name, one in vars(value).items() if name.lstrip("_") in OF_SCHEDULERS}
        return type(value), {name: _functions_of(one) for name, one in held.items()}
    return None  # another function in the same place may be what each step sets, also in a replacement
