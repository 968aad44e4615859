"""Random plans of faults. The same seed gives the same plans."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TypeVar

from swift_ft.faults import Action, Fault, Target
from swift_ft.faults.failpoints import Point

_T = TypeVar("_T")

_IN_A_STEP = (Point.FORWARD, Point.BACKWARD, Point.OPTIMIZER, Point.BETWEEN)
_OF_REPLICAS = (Point.REDUCE, Point.REDUCING, Point.REDUCED, Point.UPDATE)
_OF_CHECKPOINTS = (Point.CHECKPOINT, Point.COMMIT)
_OF_COPIES = (Point.COPY,)
_IN_A_RECOVERY = (Point.LEAVE, Point.REPORT, Point.JOIN, Point.LOAD, Point.TRANSFER, Point.REPLAY, Point.HELP)

_ACTIONS = {Action.KILL: 8, Action.STOP: 1, Action.BREAK: 1}
_TARGETS = {Target.MACHINE: 3, Target.WORKER: 1, Target.AGENT: 1}
_POINTS = {_IN_A_STEP: 4, _OF_REPLICAS: 2, _OF_CHECKPOINTS: 1, _IN_A_RECOVERY: 3}
"""How often each is drawn, relative to the others."""
_WITH_COPIES = {**_POINTS, _OF_COPIES: 2}


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a run, as far as it says what faults can strike.

    Attributes:
        machines: number of machines.
        workers: number of workers on each.
        iterations: that the script runs.
        microbatches: of a pipeline; 1 without one.
        most: the largest number of faults in a plan.
        copies: the script has memory checkpoints.
    """

    machines: int
    workers: int
    iterations: int
    microbatches: int = 1
    most: int = 3
    copies: bool = False


def random_plan(shape: Shape, seed: int) -> tuple[Fault, ...]:
    """One to ``shape.most`` faults. Faults of a recovery do not strike unless an earlier one causes it."""
    draw = random.Random(seed)
    points = _IN_A_STEP + _OF_REPLICAS + _OF_CHECKPOINTS + _OF_COPIES * shape.copies
    first = _random_fault(shape, draw, points)
    more = draw.randint(0, shape.most - 1)
    kinds = _WITH_COPIES if shape.copies else _POINTS
    return (first, *(_random_fault(shape, draw, _choose(draw, kinds)) for _ in range(more)))


def _random_fault(shape: Shape, draw: random.Random, points: tuple[Point, ...]) -> Fault:
    action = _choose(draw, _ACTIONS)
    point = draw.choice(points)
    target = Target.WORKER if action == Action.BREAK else _choose(draw, _TARGETS)
    of_a_microbatch = point in (Point.FORWARD, Point.BACKWARD) and shape.microbatches > 1
    return Fault(
        action,
        target,
        draw.randrange(shape.machines * (shape.workers if target == Target.WORKER else 1)),
        draw.randrange(shape.iterations),
        point,
        microbatch=draw.randrange(shape.microbatches) if of_a_microbatch else None,
    )


def _choose(draw: random.Random, weights: dict[_T, int]) -> _T:
    (chosen,) = draw.choices(list(weights), list(weights.values()))
    return chosen
