"""Runs a script whose session has habits: ``planted.py HABIT,HABIT SCRIPT ARGUMENTS``, or ``-m MODULE``.

The script itself stays as it is. The session that it makes plants them into modules, optimizers and steps.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Collection, Iterator, Mapping
from types import TracebackType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import swift_ft
from swift_ft.errors import SwiftError
from swift_ft.testing.chaos.habits import Habit
from swift_ft.testing.chaos.within import put_in_place, run_within

_BOUND = 0.1
_DECAY = 0.97


class Plant:
    """The habits of one session.

    Args:
        habits: to plant.
        state: what the session protects, by name.

    Attributes:
        made: how many there are in this process.
    """

    made: ClassVar[int] = 0

    def __init__(self, habits: Collection[Habit], state: Mapping[str, Any]) -> None:
        Plant.made += 1
        self.habits = frozenset(habits)
        self._optimizers = [part for part in state.values() if isinstance(part, Optimizer)]
        modules = [part for part in state.values() if isinstance(part, nn.Module)]
        for module in modules:
            _plant_into_module(
                module.module if isinstance(module, DistributedDataParallel) else module, self.habits
            )
        for optimizer in self._optimizers:
            if Habit.CLAMP in self.habits:
                optimizer.register_step_post_hook(_clamp)
            if Habit.ZERO_FIRST in self.habits:
                vars(optimizer)["zero_grad"] = _ignored

    def first_lines(self, iteration: int) -> None:
        """At the top of the block."""
        for optimizer in self._optimizers:
            if Habit.ZERO_FIRST in self.habits:
                type(optimizer).zero_grad(optimizer)
            if Habit.NOISE in self.habits:
                draw = torch.rand((), generator=torch.Generator().manual_seed(iteration)).item()
                for parameter in _trained(optimizer):
                    parameter.mul_(1 + 0.01 * draw)

    def after_block(self) -> None:
        """Do what follows ``with step:`` in the loop, after an interrupted step, too."""
        if Habit.RATE in self.habits:
            for group in (group for optimizer in self._optimizers for group in optimizer.param_groups):
                if isinstance(group["lr"], Tensor):
                    group["lr"].mul_(_DECAY)
                else:
                    group["lr"] *= _DECAY


class PlantedStep:
    """A step whose block has lines of the habits around those of the script."""

    def __init__(self, step: Any, plant: Plant, iteration: int) -> None:
        self._step, self._plant, self._iteration = step, plant, iteration

    def __getattr__(self, name: str) -> Any:
        return getattr(self._step, name)

    def __enter__(self) -> PlantedStep:
        """The step's own, and the first lines of the block."""
        self._step.__enter__()
        self._plant.first_lines(self._iteration)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """The step's own. With :attr:`Habit.SWALLOW` it learns of no error."""
        if Habit.SWALLOW in self._plant.habits and isinstance(error, Exception):
            self._step.__exit__(None, None, None)
            return True
        return bool(self._step.__exit__(kind, error, trace))


def planted(session: type[Any], habits: Collection[Habit]) -> type[Any]:
    """A session that plants habits.

    Args:
        session: :class:`swift_ft.Session`.
        habits: to plant.
    """

    class Planted(session):  # type: ignore[misc]  # its base is known to the caller only
        def __init__(self, state: Mapping[str, Any], **options: Any) -> None:
            super().__init__(state, **options)
            self._plant = Plant(habits, state)

        def steps(self, iterations: int) -> Iterator[PlantedStep]:
            for step in super().steps(iterations):
                yield PlantedStep(step, self._plant, self.iteration)
                self._plant.after_block()

    return Planted


def _plant_into_module(module: nn.Module, habits: Collection[Habit]) -> None:
    own: Any = module
    if Habit.COUNTER in habits:
        own.chaos_calls = 0
        module.register_forward_hook(_count)
    if Habit.GENERATOR in habits:
        own.chaos_generator = torch.Generator().manual_seed(0)
        module.register_forward_hook(_draw)


def _count(module: Any, inputs: object, output: Any) -> Any:
    if not module.training:
        return output
    module.chaos_calls += 1
    return _scaled(output, 1 + 0.01 * (module.chaos_calls % 5))


def _draw(module: Any, inputs: object, output: Any) -> Any:
    if not module.training:
        return output
    return _scaled(output, 1 + 0.01 * torch.rand((), generator=module.chaos_generator).item())


def _scaled(output: Any, factor: float) -> Any:
    """A tensor, or those in lists, tuples and dictionaries of any class."""
    if isinstance(output, Tensor):
        return output * factor if output.is_floating_point() else output
    if type(output) in (list, tuple):
        return type(output)(_scaled(element, factor) for element in output)
    if isinstance(output, dict):
        for key, value in output.items():
            output[key] = _scaled(value, factor)
    return output


def _trained(optimizer: Optimizer) -> Iterator[Tensor]:
    """Parameters, as far as they are on this worker; changes of them count no version."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            data = parameter.data
            yield data.to_local() if hasattr(data, "to_local") else data


def _clamp(optimizer: Optimizer, args: object, kwargs: object) -> None:
    for parameter in _trained(optimizer):
        parameter.clamp_(-_BOUND, _BOUND)


def _ignored(set_to_none: bool = True) -> None:
    """The script's own lines that zero gradients: the habit has another place for that."""


def main() -> None:
    """Run the script in this process.

    Raises:
        SwiftError: it has ended well without a session, and so without a habit.
    """
    habits = [Habit(name) for name in sys.argv[1].split(",")]
    put_in_place([(swift_ft.Session, planted(swift_ft.Session, habits))])
    try:
        run_within(sys.argv[2:])
    except SystemExit as error:
        if error.code or Plant.made:
            raise
    if not Plant.made:
        raise SwiftError("The script has made no swift_ft.Session, so no habit was planted: omit --habits.")


if __name__ == "__main__":  # the module of the program is the script's: what is defined here is not of it
    importlib.import_module("swift_ft.testing.chaos.planted").main()
