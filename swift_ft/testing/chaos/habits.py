"""Habits of scripts: what people write in a step or around it. The same seed chooses the same ones."""

from __future__ import annotations

import random
from enum import StrEnum

_MOST = 2


class Habit(StrEnum):
    """A habit that is planted into a script (:mod:`swift_ft.testing.chaos.planted`)."""

    COUNTER = "counter"
    """A plain attribute of a module counts its calls, and the output depends on it."""
    NOISE = "noise"
    """The weights change at the top of the step, before the forward pass."""
    CLAMP = "clamp"
    """Weights are clamped through ``.data`` after ``optimizer.step()``."""
    GENERATOR = "generator"
    """A module draws from a ``torch.Generator`` of its own."""
    RATE = "rate"
    """Learning rates change after ``with step:``."""
    ZERO_FIRST = "zero-first"
    """``optimizer.zero_grad()`` is the first line of the step, and no other."""
    SWALLOW = "swallow"
    """``except Exception: pass`` is around the body of the step."""


def random_habits(seed: int) -> tuple[Habit, ...]:
    """One or two habits, sorted."""
    draw = random.Random(f"habits {seed}")
    return tuple(sorted(draw.sample([*Habit], draw.randint(1, _MOST))))
